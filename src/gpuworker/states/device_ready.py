"""Layer 3. DEVICE_READY - the device is ours; the model may or may not be loaded.

Holds:    the device; after LoadModel the weights and an idle runner.
Promises: ProfileMemory is refused until the model is loaded.
"""

from __future__ import annotations

from gpuworker.errors import InvalidRequest
from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import (
    LoadModel,
    MemoryProfiled,
    ModelLoaded,
    ProfileMemory,
)
from gpuworker.runtime import Runtime
from gpuworker.states.common import (
    accept_drop_requests,
    accept_questions,
    accept_shutdown,
    require_model,
)

table: StateTable[Runtime] = StateTable(State.DEVICE_READY)
accept_shutdown(table)
accept_drop_requests(table)
accept_questions(table)


@table.moves(LoadModel, to=State.DEVICE_READY)
async def load_model(rt: Runtime, request: LoadModel, undo: Undo) -> ModelLoaded:
    if rt.has_model():
        raise InvalidRequest("a model is loaded already; one worker serves one model")
    reply = await rt.device.run(rt.load_model)
    undo.push(rt.device.run, rt.unload_model)
    return reply


@table.moves(ProfileMemory, to=State.PROFILED)
async def profile_memory(rt: Runtime, request: ProfileMemory, undo: Undo) -> MemoryProfiled:
    require_model(rt)
    reply = await rt.device.run(rt.profile_memory)
    undo.push(rt.device.run, rt.forget_profile)
    return reply
