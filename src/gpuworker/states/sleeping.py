"""Layer 3. SLEEPING - some or all memory is given back; addresses are kept.

Holds:    the device, address ranges, after level 1 a kept copy of the weights.
Promises: no step is computed until everything is resident and the weights are defined.
"""

from __future__ import annotations

import time

import anyio.lowlevel

from gpuworker.errors import InvalidRequest, WeightsUndefined
from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import (
    Asleep,
    Awake,
    PoolsResumed,
    ReloadWeights,
    ResumePools,
    Sleep,
    Tag,
    WakeUp,
    WeightsReloaded,
)
from gpuworker.runtime import Runtime
from gpuworker.states.common import (
    accept_drop_requests,
    accept_questions,
    accept_shutdown,
    accept_stop_trace,
)
from gpuworker.states.residency import fall_asleep

table: StateTable[Runtime] = StateTable(State.SLEEPING)
accept_shutdown(table)
accept_drop_requests(table)
accept_questions(table)
accept_stop_trace(table)


@table.moves(ResumePools, to=State.SLEEPING)
async def resume_pools(rt: Runtime, request: ResumePools, undo: Undo) -> PoolsResumed:
    resumed = await _resume(rt, request.tags, undo)
    return PoolsResumed(
        resumed=resumed,
        asleep=rt.asleep(),
        weights=rt.weights_truth(),
        kv_epoch=rt.kv_epoch(),
    )


@table.moves(ReloadWeights, to=State.SLEEPING)
async def reload_weights(rt: Runtime, request: ReloadWeights, undo: Undo) -> WeightsReloaded:
    if "weights" in rt.asleep():
        raise InvalidRequest(
            "the weights are not resident; send resume_pools with tags [weights] first"
        )
    return await rt.device.run(rt.reload_weights)


@table.moves(Sleep, to=State.SLEEPING)
async def sleep(rt: Runtime, request: Sleep, undo: Undo) -> Asleep:
    return await fall_asleep(rt, request.level, undo)


@table.moves(WakeUp, to=State.SERVING)
async def wake_up(rt: Runtime, request: WakeUp, undo: Undo) -> Awake:
    if rt.weights_truth() != "defined":
        raise WeightsUndefined(
            f"the weights are {rt.weights_truth()}; send resume_pools with tags [weights], then "
            "reload_weights, then wake_up"
        )
    started = time.monotonic()
    resumed = await _resume(rt, rt.asleep(), undo)
    return Awake(resumed=resumed, kv_epoch=rt.kv_epoch(), wake_s=time.monotonic() - started)


async def _resume(rt: Runtime, tags: tuple[Tag, ...], undo: Undo) -> tuple[Tag, ...]:
    resumed: list[Tag] = []
    for tag in dict.fromkeys(tags):
        await anyio.lowlevel.checkpoint()
        if await rt.device.run(rt.resume, tag):
            # Kept contents stay kept, so going back to sleep loses nothing.
            undo.push(rt.device.run, rt.release, (tag,), True)
            resumed.append(tag)
    return tuple(resumed)
