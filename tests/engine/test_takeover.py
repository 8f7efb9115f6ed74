"""An engine on a worker whose scheduler is gone, or that was never brought up."""

from __future__ import annotations

import asyncio

import anyio
import pytest

from engine.driving import Run
from engine.fake_device import FakeDevice, reference_tokens
from engine.fake_worker import FakeWorker
from gpuworker import messages as m
from gpuworker.engine import Engine, bring_up
from gpuworker.errors import (
    IllegalMessage,
    InvalidRequest,
    MailboxFull,
    StaleKVEpoch,
    WorkerClosed,
)
from gpuworker.lifecycle import State
from gpuworker.testing import fake_worker, walk_to

PROMPT = (5, 6, 7)


async def _generate(engine: Engine, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return [
        token async for delta in engine.generate(prompt, max_tokens=8) for token in delta.token_ids
    ]


async def _num_requests(worker: FakeWorker) -> int:
    return (await worker.ask(m.GetStatus())).num_requests


async def _abandon(worker: FakeWorker, num_generations: int) -> None:
    """Let an engine die in the middle of its generations, with steps in flight."""
    with anyio.CancelScope() as scope:
        async with Engine(worker) as engine:
            generations = [engine.generate((n, n), max_tokens=40) for n in range(num_generations)]
            for generation in generations:
                await anext(generation)
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught


async def test_an_engine_takes_over_from_one_that_was_cancelled() -> None:
    # All slots are taken, so nothing could begin without ending what is there.
    worker = FakeWorker(FakeDevice(max_num_seqs=3))
    await _abandon(worker, 3)
    assert await _num_requests(worker) == 3
    async with Engine(worker) as engine:
        assert await _num_requests(worker) == 0
        assert engine.limits == worker.device.current_limits()
        assert engine.limits.live_requests == ()
        prompts = [(n, n) for n in range(6)]
        results = await asyncio.gather(*(_generate(engine, prompt) for prompt in prompts))
    assert results == [reference_tokens(prompt, 8) for prompt in prompts]
    assert worker.device.slots == {}
    ids = [step.step_id for step in worker.device.log]
    assert ids == list(range(len(ids)))


async def test_an_engine_takes_over_from_a_scheduler_that_leaves_steps_behind() -> None:
    worker = FakeWorker(FakeDevice())
    run = Run(worker.device)
    run.add("a", (1, 2), max_tokens=40)
    run.add("b", (3, 4), max_tokens=40)
    for _ in range(5):
        run.send()
        run.land()
    run.send()
    left = [worker.submit(step) for step in run.flights]  # nobody takes these back
    async with Engine(worker) as engine:
        assert all(future.done() for future in left)
        assert await _num_requests(worker) == 0
        assert await _generate(engine, (1, 2)) == reference_tokens((1, 2), 8)
    takeover = worker.device.log[5 + len(left)]
    assert (takeover.num_rows, set(takeover.finished)) == (0, {"a", "b"})


async def test_the_old_ids_may_be_used_again() -> None:
    worker = FakeWorker(FakeDevice())
    run = Run(worker.device)
    run.add("same", (1, 2), max_tokens=40)
    run.send()
    run.land()
    async with Engine(worker) as engine:
        deltas = [d async for d in engine.generate(PROMPT, max_tokens=4, request_id="same")]
    assert [token for d in deltas for token in d.token_ids] == reference_tokens(PROMPT, 4)


async def test_step_ids_go_on_and_an_idle_worker_is_sent_nothing() -> None:
    worker = FakeWorker(FakeDevice())
    async with Engine(worker) as engine:
        await _generate(engine)
    num_steps = len(worker.device.log)
    async with Engine(worker) as engine:
        assert len(worker.device.log) == num_steps
        assert engine.limits.next_step_id == num_steps
        await _generate(engine)
    assert worker.device.log[num_steps].step_id == num_steps


@pytest.mark.parametrize(
    "error", [MailboxFull("try again"), StaleKVEpoch("it is 1"), InvalidRequest("no")]
)
async def test_entering_that_failed_may_be_tried_again(error: Exception) -> None:
    worker = FakeWorker(FakeDevice())
    await _abandon(worker, 1)
    engine = Engine(worker)
    worker.crash = error
    with pytest.raises(type(error)):
        async with engine:
            pass
    assert await _num_requests(worker) == 1
    worker.crash = None
    async with engine:
        assert await _num_requests(worker) == 0
        assert await _generate(engine) == reference_tokens(PROMPT, 8)


async def test_a_depth_below_one_is_refused_before_anything_is_sent() -> None:
    worker = FakeWorker(FakeDevice())
    await _abandon(worker, 1)
    num_steps = len(worker.device.log)
    with pytest.raises(InvalidRequest, match="depth is 0"):
        async with Engine(worker, depth=0):
            pass
    assert len(worker.device.log) == num_steps


@pytest.mark.parametrize(
    "state", [state for state in State if state not in (State.SERVING, State.CLOSED, State.FAULTED)]
)
async def test_a_worker_that_does_not_serve_is_to_be_brought_up_first(state: State) -> None:
    async with fake_worker() as worker:
        await walk_to(worker, state)
        engine = Engine(worker)
        with pytest.raises(IllegalMessage, match=rf"{state.value}.*call bring_up first") as caught:
            async with engine:
                pass
        assert caught.value.state == state.value
        await bring_up(worker)
        async with engine:
            assert len(await _generate(engine)) == 8


async def test_nothing_works_before_the_engine_is_entered() -> None:
    engine = Engine(FakeWorker(FakeDevice()))
    with pytest.raises(WorkerClosed, match="enter its context"):
        _ = engine.limits
    with pytest.raises(WorkerClosed, match="enter its context"):
        engine.statistics()
    with pytest.raises(WorkerClosed, match="enter its context"):
        await engine.sleep()
    with pytest.raises(WorkerClosed, match="inside its context"):
        await _generate(engine)
