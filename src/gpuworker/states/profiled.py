"""Layer 3. PROFILED - what is left for the KV cache is known; no block exists yet.

Holds:    the device, the weights, a memory budget.
Promises: AllocateKVCache with at most max_num_blocks of the profile will fit.
"""

from __future__ import annotations

from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import (
    AllocateKVCache,
    KVCacheAllocated,
    MaxModelLenUpdated,
    UpdateMaxModelLen,
)
from gpuworker.runtime import Runtime
from gpuworker.states.common import accept_drop_requests, accept_questions, accept_shutdown

table: StateTable[Runtime] = StateTable(State.PROFILED)
accept_shutdown(table)
accept_drop_requests(table)
accept_questions(table)


@table.moves(UpdateMaxModelLen, to=State.PROFILED)
async def update_max_model_len(
    rt: Runtime, request: UpdateMaxModelLen, undo: Undo
) -> MaxModelLenUpdated:
    before = await rt.device.run(rt.set_max_model_len, request.max_model_len)
    undo.push(rt.device.run, rt.set_max_model_len, before)
    return MaxModelLenUpdated(max_model_len=request.max_model_len)


@table.moves(AllocateKVCache, to=State.KV_ALLOCATED)
async def allocate_kv_cache(rt: Runtime, request: AllocateKVCache, undo: Undo) -> KVCacheAllocated:
    reply = await rt.device.run(rt.allocate_kv_cache, request.num_blocks)
    undo.push(rt.device.run, rt.free_kv_cache)
    return reply
