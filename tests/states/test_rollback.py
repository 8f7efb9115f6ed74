"""Every move fails once at every acquisition; state and books are then as before."""

from __future__ import annotations

import asyncio
import copy

import anyio
import pytest

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.errors import DeviceFault, OutOfDeviceMemory
from gpuworker.lifecycle import State
from gpuworker.testing import FakeRuntime, fail_at, fake_worker, walk_to

MOVES: list[tuple[State, m.Request, tuple[m.Request, ...]]] = [
    (State.UNINIT, m.InitDevice(), ()),
    (State.DEVICE_READY, m.LoadModel(), ()),
    (State.DEVICE_READY, m.ProfileMemory(), (m.LoadModel(),)),
    (State.PROFILED, m.UpdateMaxModelLen(max_model_len=100), ()),
    (State.PROFILED, m.AllocateKVCache(num_blocks=8), ()),
    (State.KV_ALLOCATED, m.WarmUp(), ()),
    (State.WARMED_UP, m.StartServing(), ()),
    (State.SERVING, m.ReloadWeights(), ()),
    (State.SERVING, m.Sleep(level=1), ()),
    (State.SERVING, m.Sleep(level=2), ()),
    (State.SLEEPING, m.ResumePools(tags=("weights", "kv_cache")), ()),
    (State.SLEEPING, m.ReloadWeights(), (m.ResumePools(tags=("weights",)),)),
    (State.SLEEPING, m.Sleep(level=1), (m.ResumePools(tags=("weights",)),)),
    (State.SLEEPING, m.WakeUp(), ()),
]
IDS = [f"{state.value}-{type(request).__name__}{i}" for i, (state, request, _) in enumerate(MOVES)]


async def _prepare(worker: GPUWorker, state: State, first: tuple[m.Request, ...]) -> FakeRuntime:
    await walk_to(worker, state)
    for request in first:
        await worker.ask(request)
    runtime = worker._runtime
    assert isinstance(runtime, FakeRuntime)
    return runtime


def _books(runtime: FakeRuntime) -> tuple[object, ...]:
    return (
        copy.deepcopy(runtime.books),
        runtime.asleep(),
        runtime.weights_truth(),
        runtime._max_model_len,
        runtime.memory(),
    )


async def _num_device_calls(state: State, request: m.Request, first: tuple[m.Request, ...]) -> int:
    async with fake_worker() as worker:
        await _prepare(worker, state, first)
        with fail_at(worker._device, None) as counter:
            await worker.ask(request)
        return counter.num_calls


@pytest.mark.parametrize(("state", "request_", "first"), MOVES, ids=IDS)
async def test_a_move_that_fails_at_any_device_call_is_undone(
    state: State, request_: m.Request, first: tuple[m.Request, ...]
) -> None:
    num_calls = await _num_device_calls(state, request_, first)
    assert num_calls >= 1
    for call in range(num_calls):
        async with fake_worker() as worker:
            runtime = await _prepare(worker, state, first)
            before, epoch = _books(runtime), runtime.kv_epoch()
            with fail_at(worker._device, call), pytest.raises(OutOfDeviceMemory):
                await worker.ask(request_)
            assert worker.state is state
            assert _books(runtime) == before
            assert runtime.kv_epoch() == epoch
            assert type(await worker.ask(request_)) is m.REPLY_OF[type(request_)]


@pytest.mark.parametrize(("state", "request_", "first"), MOVES, ids=IDS)
async def test_a_move_that_is_cancelled_at_any_await_leaves_a_definite_state(
    state: State, request_: m.Request, first: tuple[m.Request, ...]
) -> None:
    # The sender gives up after n turns of the event loop, for every n until the move wins.
    async with fake_worker() as worker:
        runtime = await _prepare(worker, state, first)
        await worker.ask(request_)
        done = (worker.state, _books(runtime))
    for turns in range(200):
        async with fake_worker() as worker:
            runtime = await _prepare(worker, state, first)
            before = _books(runtime)
            task = asyncio.create_task(worker.ask(request_))
            for _ in range(turns):
                await asyncio.sleep(0)
            won = task.done()
            task.cancel()
            await asyncio.wait([task])
            status = await worker.ask(m.GetStatus())
            assert status.moving == ""
            assert status.state == worker.state.value
            assert (worker.state, _books(runtime)) in ((state, before), done)
            await worker.ask(m.Shutdown())
            assert runtime.books == {}
            if won:
                return
    pytest.fail("the move never finished")


async def test_a_cancelled_sleep_gives_the_kept_copy_back() -> None:
    async with fake_worker() as worker:
        runtime = await _prepare(worker, State.SERVING, ())
        before = _books(runtime)
        # Call 1 is the release itself.
        with fail_at(worker._device, 1), pytest.raises(OutOfDeviceMemory):
            await worker.ask(m.Sleep(level=1))
        assert _books(runtime) == before
        assert worker.state is State.SERVING


async def test_a_deadline_during_a_device_call_undoes_the_move() -> None:
    async with fake_worker() as worker:
        runtime = await _prepare(worker, State.WARMED_UP, ())
        before = _books(runtime)
        original = runtime.start_serving
        scope = anyio.CancelScope()

        def cancelled_meanwhile() -> m.ServingStarted:
            worker._device._loop.call_soon_threadsafe(scope.cancel)
            return original()

        runtime.start_serving = cancelled_meanwhile  # type: ignore[method-assign]
        with scope:
            await worker.ask(m.StartServing())
        assert scope.cancelled_caught
        assert worker.state is State.WARMED_UP
        assert _books(runtime) == before
        runtime.start_serving = original  # type: ignore[method-assign]
        await worker.ask(m.StartServing())
        assert worker.state is State.SERVING


async def test_an_undo_that_fails_means_faulted() -> None:
    async with fake_worker() as worker:
        runtime = await _prepare(worker, State.SLEEPING, ())
        original = runtime.resume

        def only_weights(tag: m.Tag) -> bool:
            if tag == "kv_cache":
                raise OutOfDeviceMemory("no room")
            return original(tag)

        def release(tags: tuple[m.Tag, ...], keep: bool) -> None:
            raise OutOfDeviceMemory("cannot unmap")

        runtime.resume = only_weights  # type: ignore[method-assign]
        runtime.release = release  # type: ignore[method-assign]
        with pytest.raises(DeviceFault, match="undoing wake_up failed"):
            await worker.ask(m.WakeUp())
        assert worker.state is State.FAULTED
