"""Layer 3. SERVING - steps are computed.

Holds:    everything, resident; defined weights.
Promises: a step runs in the order of its arrival, or is refused before anything changes.
"""

from __future__ import annotations

import asyncio

from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import (
    Asleep,
    DummyBatchExecuted,
    ExecuteDummyBatch,
    ExecuteModel,
    ReloadWeights,
    Sleep,
    StartTrace,
    StepOutput,
    TraceStarted,
    WeightsReloaded,
)
from gpuworker.runtime import Runtime
from gpuworker.states.common import accept_questions, accept_shutdown, accept_stop_trace
from gpuworker.states.residency import fall_asleep

table: StateTable[Runtime] = StateTable(State.SERVING)
accept_shutdown(table)
accept_questions(table)
accept_stop_trace(table)


@table.on(ExecuteModel)
def execute_model(rt: Runtime, request: ExecuteModel) -> asyncio.Future[StepOutput]:
    return rt.device.submit(rt.run_step, request)


@table.on(ExecuteDummyBatch)
def execute_dummy_batch(
    rt: Runtime, request: ExecuteDummyBatch
) -> asyncio.Future[DummyBatchExecuted]:
    return rt.device.submit(rt.execute_dummy_batch, request.num_tokens)


@table.on(StartTrace)
def start_trace(rt: Runtime, request: StartTrace) -> asyncio.Future[TraceStarted]:
    return rt.device.submit(lambda: TraceStarted(changed=rt.start_trace()))


@table.moves(ReloadWeights, to=State.SERVING)
async def reload_weights(rt: Runtime, request: ReloadWeights, undo: Undo) -> WeightsReloaded:
    return await rt.device.run(rt.reload_weights)


@table.moves(Sleep, to=State.SLEEPING)
async def sleep(rt: Runtime, request: Sleep, undo: Undo) -> Asleep:
    return await fall_asleep(rt, request.level, undo)
