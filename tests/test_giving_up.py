"""A device that does not come back: everybody is answered and the worker ends all the same."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from gpuworker import messages as m
from gpuworker.errors import DeviceFault, IllegalMessage, WorkerClosed
from gpuworker.lifecycle import State
from gpuworker.testing import FakeRuntime, empty_step, fake_worker, walk_to


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """Set it to let go what is stuck."""
    event = threading.Event()
    yield event
    event.set()


async def test_a_stuck_step_is_given_up_and_everybody_is_answered(stuck: threading.Event) -> None:
    entered = threading.Event()

    def hang(step: m.ExecuteModel) -> None:
        entered.set()
        stuck.wait(60)

    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)
        runtime.before_step = hang
        replies = [worker.submit(empty_step(1)), worker.submit(empty_step(2))]
        move, behind = worker.submit(m.Sleep()), worker.submit(empty_step(3))
        assert await asyncio.to_thread(entered.wait, 20)
        activity = worker.activity()
        assert activity is not None
        assert (activity.kind, activity.name, activity.limit_s) == ("step", "step 1", 300.0)
        assert (await worker.ask(m.GetHealth())).ready is False
        worker.give_up(DeviceFault("step 1 is stuck"))
        for reply in (*replies, move):
            with pytest.raises(DeviceFault, match="step 1 is stuck"):
                await reply
        with pytest.raises(IllegalMessage):
            await behind
        health = await worker.ask(m.GetHealth())
        assert (health.health, health.state) == ("faulted", "faulted")
        assert health.fault == "device_fault: step 1 is stuck"
        assert isinstance(await worker.ask(m.Shutdown()), m.Closed)
        with pytest.raises(WorkerClosed):
            await worker.ask(m.InitDevice())
    assert worker.fault is not None
    assert "device" in runtime.books  # nothing was released behind the stuck call


async def test_a_stuck_move_is_given_up(stuck: threading.Event) -> None:
    entered = threading.Event()

    async with fake_worker() as worker:
        await walk_to(worker, State.DEVICE_READY)
        runtime = worker._runtime

        def hang() -> m.ModelLoaded:
            entered.set()
            stuck.wait(60)
            raise AssertionError("its result is of no interest any more")

        runtime.load_model = hang  # type: ignore[method-assign]
        loading = worker.submit(m.LoadModel())
        assert await asyncio.to_thread(entered.wait, 20)
        activity = worker.activity()
        assert activity is not None
        assert (activity.kind, activity.name) == ("move", "load_model")
        worker.give_up(DeviceFault("stuck"))
        with pytest.raises(DeviceFault, match="stuck"):
            await loading
        assert worker.state is State.FAULTED


async def test_what_waited_behind_a_stuck_call_is_not_carried_out_later(
    stuck: threading.Event,
) -> None:
    entered, ran = threading.Event(), threading.Event()

    def hang(step: m.ExecuteModel) -> None:
        if step.step_id == 1:
            entered.set()
            stuck.wait(60)
        else:
            ran.set()

    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)
        runtime.before_step = hang
        replies = [worker.submit(empty_step(1)), worker.submit(empty_step(2))]
        assert await asyncio.to_thread(entered.wait, 20)
        worker.give_up(DeviceFault("stuck"))
        await asyncio.gather(*replies, return_exceptions=True)
    stuck.set()
    await asyncio.to_thread(worker._device._thread.join, 20)
    assert not ran.is_set()
