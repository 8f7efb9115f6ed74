"""The actor: order, draining, back-pressure, status, cancellation, answers at the end."""

from __future__ import annotations

import asyncio
import threading

import anyio
import pytest

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import ModelConfig, SupervisionConfig, WorkerConfig
from gpuworker.errors import IllegalMessage, MailboxFull, StepFailed, WorkerClosed
from gpuworker.lifecycle import State
from gpuworker.testing import FakeRuntime, empty_step, fake_worker, walk_to


class Gate:
    """Holds every step on the device thread until it is opened."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.steps: list[int] = []

    def __call__(self, step: m.ExecuteModel) -> None:
        self.entered.set()
        assert self.open.wait(20)
        self.steps.append(step.step_id)


def _gated(worker: GPUWorker) -> Gate:
    runtime = worker._runtime
    assert isinstance(runtime, FakeRuntime)
    gate = Gate()
    runtime.before_step = gate
    return gate


async def _entered(gate: Gate) -> None:
    assert await asyncio.to_thread(gate.entered.wait, 20)


async def test_steps_pipeline_and_a_move_drains_them() -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        sent = [
            worker.submit(request)
            for request in (empty_step(1), empty_step(2), empty_step(3), m.Sleep(), empty_step(4))
        ]
        await _entered(gate)
        assert not any(reply.done() for reply in sent)
        gate.open.set()
        answers = await asyncio.gather(*sent, return_exceptions=True)
        assert [type(answer) for answer in answers] == [
            m.StepOutput,
            m.StepOutput,
            m.StepOutput,
            m.Asleep,
            IllegalMessage,
        ]
        assert gate.steps == [1, 2, 3]


async def test_sleep_while_a_step_runs_waits_for_it() -> None:
    # Public case B01: success was reported while a forward pass used the memory.
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        step = worker.submit(empty_step(1))
        await _entered(gate)
        sleep = worker.submit(m.Sleep())
        for _ in range(50):
            await asyncio.sleep(0)
        status = await worker.ask(m.GetStatus())
        assert (status.state, status.running_step_id, sleep.done()) == ("serving", 1, False)
        assert all(use.resident_bytes > 0 for use in status.memory)
        gate.open.set()
        assert isinstance(await step, m.StepOutput)
        await sleep
        status = await worker.ask(m.GetStatus())
        assert (status.state, status.running_step_id) == ("sleeping", None)
        assert all(use.resident_bytes == 0 for use in status.memory)


async def test_status_answers_while_a_step_is_stuck_and_turns_stalled() -> None:
    # Public case B18: health said fine while the loop was frozen.
    config = WorkerConfig(
        model=ModelConfig(model="fake"), supervision=SupervisionConfig(step_limit_s=1e-9)
    )
    async with fake_worker(config) as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        step = worker.submit(empty_step(7))
        await _entered(gate)
        status = await worker.ask(m.GetStatus())
        assert status.health == "stalled"
        assert status.running_step_id == 7
        assert status.running_step_s > 1e-9
        gate.open.set()
        await step
        status = await worker.ask(m.GetStatus())
        assert (status.health, status.num_steps) == ("ok", 1)


async def test_status_shows_the_error_of_the_last_step() -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)

        def fail(step: m.ExecuteModel) -> None:
            raise StepFailed("division by zero")

        runtime.before_step = fail
        with pytest.raises(StepFailed):
            await worker.ask(empty_step(1))
        status = await worker.ask(m.GetStatus())
        assert status.last_error == "step_failed: division by zero"
        assert (status.state, status.health, status.num_steps) == ("serving", "ok", 0)
        runtime.before_step = None
        await worker.ask(m.ResumeSteps(step_id=1))
        await worker.ask(empty_step(2))
        assert (await worker.ask(m.GetStatus())).last_error == ""


async def test_an_abandoned_step_leaves_the_worker_healthy() -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        with anyio.move_on_after(0.01):
            await worker.ask(empty_step(1))
        gate.open.set()
        assert (await worker.ask(empty_step(2))).step_id == 2
        assert gate.steps == [1, 2]


async def test_a_message_withdrawn_before_its_turn_has_no_effect() -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        step = worker.submit(empty_step(1))
        await _entered(gate)
        first, second = worker.submit(m.ReloadWeights()), worker.submit(m.Sleep())
        second.cancel()
        gate.open.set()
        await asyncio.gather(step, first)
        assert (await worker.ask(m.GetStatus())).state == "serving"


async def test_cancelling_a_submitted_move_cancels_and_undoes_it() -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        step = worker.submit(empty_step(1))
        await _entered(gate)
        sleep = worker.submit(m.Sleep())
        for _ in range(20):
            await asyncio.sleep(0)
        sleep.cancel()
        gate.open.set()
        await step
        status = await worker.ask(m.GetStatus())
        assert (status.state, status.asleep) == ("serving", ())
        assert (await worker.ask(empty_step(2))).step_id == 2


async def test_a_full_mailbox_refuses_at_once_and_loses_nothing() -> None:
    config = WorkerConfig(
        model=ModelConfig(model="fake"), supervision=SupervisionConfig(mailbox_limit=3)
    )
    async with fake_worker(config) as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        sent = [worker.submit(empty_step(i)) for i in range(3)]
        with pytest.raises(MailboxFull, match="the limit is 3"):
            worker.submit(empty_step(3))
        assert (await worker.ask(m.GetStatus())).state == "serving"
        gate.open.set()
        assert [(await reply).step_id for reply in sent] == [0, 1, 2]
        assert (await worker.ask(empty_step(3))).step_id == 3


async def test_shutdown_answers_what_is_queued_behind_it() -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        step, closed, late = (
            worker.submit(empty_step(1)),
            worker.submit(m.Shutdown()),
            worker.submit(empty_step(2)),
        )
        gate.open.set()
        answers = await asyncio.gather(step, closed, late, return_exceptions=True)
        assert [type(answer) for answer in answers] == [m.StepOutput, m.Closed, WorkerClosed]
        assert gate.steps == [1]


async def test_leaving_the_block_during_a_move_undoes_it_and_answers_everyone() -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        gate = _gated(worker)
        step = worker.submit(empty_step(1))
        await _entered(gate)
        move, behind = worker.submit(m.Sleep()), worker.submit(empty_step(2))
        await asyncio.sleep(0)
        gate.open.set()
    answers = await asyncio.gather(step, move, behind, return_exceptions=True)
    assert isinstance(answers[0], m.StepOutput)
    assert all(isinstance(answer, WorkerClosed | m.Asleep) for answer in answers[1:])
    runtime = worker._runtime
    assert isinstance(runtime, FakeRuntime)
    assert runtime.books == {}
    assert worker.state is State.CLOSED


async def test_an_error_in_the_block_arrives_as_it_was_raised() -> None:
    worker = fake_worker()

    async def fail_inside() -> None:
        async with worker:
            await walk_to(worker, State.PROFILED)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail_inside()
    assert worker.state is State.CLOSED


async def test_two_workers_live_in_one_process() -> None:
    async with fake_worker() as one, fake_worker() as other:
        await asyncio.gather(walk_to(one, State.SERVING), walk_to(other, State.PROFILED))
        assert (one.state, other.state) == (State.SERVING, State.PROFILED)


async def test_a_bug_in_a_handler_is_reported_and_undone() -> None:
    async with fake_worker() as worker:
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)
        original = runtime.open_device

        def bug() -> m.DeviceReady:
            raise ZeroDivisionError("a bug")

        runtime.open_device = bug  # type: ignore[method-assign]
        with pytest.raises(ZeroDivisionError):
            await worker.ask(m.InitDevice())
        status = await worker.ask(m.GetStatus())
        assert (status.state, status.last_error) == ("uninit", "ZeroDivisionError: a bug")
        runtime.open_device = original  # type: ignore[method-assign]
        await worker.ask(m.InitDevice())
        assert worker.state is State.DEVICE_READY


async def test_cancelled_lifecycle_calls_never_stop_the_machine() -> None:
    # Public case B37: a cancelled transition left the queue marked busy for ever.
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        for turns in range(12):
            task = asyncio.create_task(worker.ask(m.Sleep()))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            with anyio.fail_after(20):
                status = await worker.ask(m.GetStatus())
                assert status.moving == ""
                if status.state == "sleeping":
                    await worker.ask(m.WakeUp())
                epoch = (await worker.ask(m.GetStatus())).kv_epoch
                assert (await worker.ask(empty_step(turns, epoch))).step_id == turns


async def test_stopping_a_trace_twice_is_harmless() -> None:
    # Public case B32 for the message side; the file itself is tested with the real runtime.
    config = WorkerConfig(
        model=ModelConfig(model="fake"), supervision=SupervisionConfig(trace_dir="/nowhere")
    )
    async with fake_worker(config) as worker:
        await walk_to(worker, State.SERVING)
        assert not (await worker.ask(m.StopTrace())).changed
        assert (await worker.ask(m.StartTrace())).changed
        assert not (await worker.ask(m.StartTrace())).changed
        stops = await asyncio.gather(worker.ask(m.StopTrace()), worker.ask(m.StopTrace()))
        assert sorted(stop.changed for stop in stops) == [False, True]


async def test_statistics_count_what_was_answered_and_refused() -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        before = worker.statistics()
        await worker.ask(empty_step(1))
        with pytest.raises(IllegalMessage):
            await worker.ask(m.WakeUp())
        after = worker.statistics()
        assert after.num_answered == before.num_answered + 1
        assert after.num_refused == before.num_refused + 1
        assert (after.num_queued, after.num_in_flight) == (0, 0)
