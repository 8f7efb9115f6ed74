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
    ResumeSteps,
    Sleep,
    StartTrace,
    StepOutput,
    StepsResumed,
    TraceStarted,
    WeightsReloaded,
)
from gpuworker.permit import Permit
from gpuworker.runtime import Runtime
from gpuworker.states.common import (
    accept_drop_requests,
    accept_questions,
    accept_shutdown,
    accept_stop_trace,
)
from gpuworker.states.residency import fall_asleep

table: StateTable[Runtime] = StateTable(State.SERVING)
accept_shutdown(table)
accept_drop_requests(table)
accept_questions(table)
accept_stop_trace(table)


@table.on(ExecuteModel)
def execute_model(rt: Runtime, request: ExecuteModel, permit: Permit) -> asyncio.Future[StepOutput]:
    return rt.device.submit(rt.run_step, request, permit)


@table.on(ResumeSteps)
def resume_steps(rt: Runtime, request: ResumeSteps, permit: Permit) -> asyncio.Future[StepsResumed]:
    return rt.device.submit(permit.guard(lambda: rt.resume_steps(request.step_id)))


@table.on(ExecuteDummyBatch)
def execute_dummy_batch(
    rt: Runtime, request: ExecuteDummyBatch, permit: Permit
) -> asyncio.Future[DummyBatchExecuted]:
    return rt.device.submit(permit.guard(lambda: rt.execute_dummy_batch(request.num_tokens)))


@table.on(StartTrace)
def start_trace(rt: Runtime, request: StartTrace, permit: Permit) -> asyncio.Future[TraceStarted]:
    return rt.device.submit(permit.guard(lambda: TraceStarted(changed=rt.start_trace())))


@table.moves(ReloadWeights, to=State.SERVING)
async def reload_weights(rt: Runtime, request: ReloadWeights, undo: Undo) -> WeightsReloaded:
    return await rt.device.run(rt.reload_weights)


@table.moves(Sleep, to=State.SLEEPING)
async def sleep(rt: Runtime, request: Sleep, undo: Undo) -> Asleep:
    return await fall_asleep(rt, request.level, undo)
