"""Every (state, message) pair: a move, in place, or refused with the accepted list."""

from __future__ import annotations

import inspect
import pkgutil

import pytest

import gpuworker.states
from gpuworker import messages as m
from gpuworker.config import ModelConfig, SupervisionConfig, WorkerConfig
from gpuworker.errors import DeviceFault, IllegalMessage, StaleKVEpoch, WorkerClosed
from gpuworker.lifecycle import State
from gpuworker.states import TABLES
from gpuworker.testing import empty_step, fake_worker, walk_to

CONFIG = WorkerConfig(
    model=ModelConfig(model="fake"), supervision=SupervisionConfig(trace_dir="/nowhere")
)

# Written by hand on purpose: the tables must say this, not the other way round.
LEGAL: dict[State, dict[type[m.Request], State]] = {
    State.UNINIT: {m.InitDevice: State.DEVICE_READY},
    State.DEVICE_READY: {
        m.LoadModel: State.DEVICE_READY,
        m.ProfileMemory: State.PROFILED,
    },
    State.PROFILED: {
        m.UpdateMaxModelLen: State.PROFILED,
        m.AllocateKVCache: State.KV_ALLOCATED,
    },
    State.KV_ALLOCATED: {m.WarmUp: State.WARMED_UP},
    State.WARMED_UP: {m.StartServing: State.SERVING},
    State.SERVING: {
        m.ExecuteModel: State.SERVING,
        m.ResumeSteps: State.SERVING,
        m.ExecuteDummyBatch: State.SERVING,
        m.StartTrace: State.SERVING,
        m.StopTrace: State.SERVING,
        m.ReloadWeights: State.SERVING,
        m.Sleep: State.SLEEPING,
    },
    State.SLEEPING: {
        m.ResumePools: State.SLEEPING,
        m.ReloadWeights: State.SLEEPING,
        m.Sleep: State.SLEEPING,
        m.StopTrace: State.SLEEPING,
        m.WakeUp: State.SERVING,
    },
    State.FAULTED: {},
}
for state, legal in LEGAL.items():
    if state not in (State.UNINIT, State.FAULTED):
        legal[m.GetLimits] = legal[m.GetKVCacheSpec] = state
    legal[m.DropRequests] = state
    legal[m.Shutdown] = State.CLOSED

ARGUMENTS = {
    m.AllocateKVCache: m.AllocateKVCache(num_blocks=8),
    m.UpdateMaxModelLen: m.UpdateMaxModelLen(max_model_len=512),
    m.ResumePools: m.ResumePools(tags=("weights", "kv_cache")),
    m.ExecuteModel: empty_step(1),
    m.ResumeSteps: m.ResumeSteps(step_id=1),
    m.Hello: m.Hello(min_version=1, max_version=1, epoch=1),
    m.Cancel: m.Cancel(corr=1),
}
QUEUED = [request for request in m.REQUESTS if request not in (m.GetStatus, m.GetHealth)]


def _request(message: type[m.Request]) -> m.Request:
    return ARGUMENTS.get(message) or message()


@pytest.mark.parametrize("state", LEGAL)
@pytest.mark.parametrize("message", QUEUED)
async def test_each_message_has_exactly_its_outcome_in_each_state(
    state: State, message: type[m.Request]
) -> None:
    async with fake_worker(CONFIG) as worker:
        if state is State.FAULTED:
            worker._lifecycle.fault()
        else:
            await walk_to(worker, state)
            if state is State.DEVICE_READY and message is not m.LoadModel:
                await worker.ask(m.LoadModel())
        if state is State.SLEEPING and message is m.ReloadWeights:
            await worker.ask(m.ResumePools(tags=("weights",)))
        if message is m.ResumeSteps and state is State.SERVING:
            with pytest.raises(StaleKVEpoch):
                await worker.ask(empty_step(1, kv_epoch=7))
        if message in LEGAL[state]:
            reply = await worker.ask(_request(message))
            assert type(reply) is m.REPLY_OF[message]
            assert worker.state is LEGAL[state][message]
        else:
            with pytest.raises(IllegalMessage) as refusal:
                await worker.ask(_request(message))
            assert refusal.value.state == state.value
            assert set(refusal.value.accepted) == {
                m.message_tag(accepted.__name__) for accepted in LEGAL[state]
            }
            assert worker.state is state


@pytest.mark.parametrize("state", LEGAL)
async def test_status_is_answered_in_each_live_state(state: State) -> None:
    async with fake_worker() as worker:
        if state is State.FAULTED:
            worker._lifecycle.fault()
        else:
            await walk_to(worker, state)
        status = await worker.ask(m.GetStatus())
        assert status.state == state.value
        assert status.health == ("faulted" if state is State.FAULTED else "ok")
        health = await worker.ask(m.GetHealth())
        assert (health.state, health.health) == (status.state, status.health)
        assert health.ready is (state is State.SERVING)


@pytest.mark.parametrize("message", m.REQUESTS)
async def test_a_closed_worker_answers_everything_with_worker_closed(
    message: type[m.Request],
) -> None:
    async with fake_worker() as worker:
        await worker.ask(m.Shutdown())
        with pytest.raises(WorkerClosed):
            await worker.ask(_request(message))


async def test_a_fault_in_a_step_leads_to_faulted_and_shutdown_still_works() -> None:
    def broken(step: m.ExecuteModel) -> None:
        raise DeviceFault("sticky")

    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        worker._runtime.before_step = broken  # type: ignore[attr-defined]
        with pytest.raises(DeviceFault):
            await worker.ask(empty_step(1))
        assert worker.state is State.FAULTED
        status = await worker.ask(m.GetStatus())
        assert (status.health, status.last_error) == ("faulted", "device_fault: sticky")
        with pytest.raises(IllegalMessage, match="accepted: drop_requests, shutdown"):
            await worker.ask(empty_step(2))
        await worker.ask(m.Shutdown())
        assert worker.state is State.CLOSED


def test_there_is_one_module_per_state_and_it_says_what_it_holds() -> None:
    modules = {info.name for info in pkgutil.iter_modules(gpuworker.states.__path__)}
    assert {state.value for state in State} <= modules
    assert [table.state for table in TABLES] == list(State)
    for state in State:
        module = __import__(f"gpuworker.states.{state.value}", fromlist=["table"])
        doc = inspect.getdoc(module)
        assert doc is not None
        assert f"Layer 3. {state.name} - " in doc
        assert "Holds:" in doc
        assert "Promises:" in doc
