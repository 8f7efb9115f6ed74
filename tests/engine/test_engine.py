"""The engine around a worker that pipelines, sleeps, changes epochs, refuses and dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest

from engine.fake_device import FakeDevice, reference_tokens
from engine.fake_worker import FakeWorker
from gpuworker.config import LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.engine import Engine, bring_up
from gpuworker.errors import (
    ConnectionLost,
    IllegalMessage,
    InvalidRequest,
    MailboxFull,
    StepFailed,
    WorkerClosed,
    WorkerError,
    WorkerFaulted,
)
from gpuworker.lifecycle import State
from gpuworker.messages import Shutdown
from gpuworker.step import SamplingParams
from gpuworker.testing import empty_step, fake_worker

PROMPT = (5, 6, 7)


@pytest.fixture
def worker() -> FakeWorker:
    return FakeWorker(FakeDevice())


@pytest.fixture
async def engine(worker: FakeWorker) -> AsyncIterator[Engine]:
    # Not entered here: a fixture may be torn down by another task.
    return Engine(worker)


async def _generate(engine: Engine, prompt: tuple[int, ...], max_tokens: int = 8) -> list[int]:
    tokens: list[int] = []
    async for delta in engine.generate(prompt, max_tokens=max_tokens):
        tokens += delta.token_ids
    return tokens


async def _first(engine: Engine, prompt: tuple[int, ...] = PROMPT, **options: object) -> object:
    """Begin a generation and return it after its first token."""
    generation = engine.generate(prompt, **{"max_tokens": 30, **options})
    await anext(generation)
    return generation


async def test_generations_side_by_side_are_those_of_lone_runs(
    worker: FakeWorker, engine: Engine
) -> None:
    prompts = [tuple(range(n, 2 * n + 3)) for n in range(20)]
    async with engine:
        results = await asyncio.gather(*(_generate(engine, prompt) for prompt in prompts))
    assert results == [reference_tokens(prompt, 8) for prompt in prompts]
    assert worker.device.slots == {}


async def test_two_steps_are_in_flight(worker: FakeWorker, engine: Engine) -> None:
    async with engine:
        await _generate(engine, PROMPT)
        assert worker.max_in_flight == 2
        assert engine.statistics().num_steps >= 8


async def test_depth_one_sends_a_step_only_after_the_reply(worker: FakeWorker) -> None:
    async with Engine(worker, depth=1) as engine:
        assert await _generate(engine, PROMPT) == reference_tokens(PROMPT, 8)
    assert worker.max_in_flight == 1


async def test_a_request_joins_while_a_step_is_in_flight(
    worker: FakeWorker, engine: Engine
) -> None:
    worker.held = True
    async with engine, anyio.create_task_group() as tasks:
        tasks.start_soon(_generate, engine, (1,))
        await anyio.wait_all_tasks_blocked()
        assert worker.max_in_flight == 2
        tasks.start_soon(_generate, engine, (2,))
        await anyio.wait_all_tasks_blocked()
        worker.release()
    assert worker.device.log[2].new_requests[0].num_prompt_tokens == 1


async def test_the_last_delta_tells_why_it_is_the_last(engine: Engine) -> None:
    stop = reference_tokens(PROMPT, 3)[2]
    async with engine:
        deltas = [
            delta
            async for delta in engine.generate(
                PROMPT,
                max_tokens=30,
                stop_token_ids=[stop],
                sampling=SamplingParams(logprobs=1),
            )
        ]
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].token_ids[-1] == stop
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert all(len(delta.logprobs) == len(delta.token_ids) for delta in deltas)


async def test_a_generation_ends_at_the_eos_of_the_model_unless_told_otherwise() -> None:
    reference = reference_tokens(PROMPT, 30)
    eos, other = reference[6], reference[2]
    assert reference.index(eos) == 6
    async with Engine(FakeWorker(FakeDevice(eos_token_ids=(eos,)))) as engine:

        async def generate(stop_token_ids: tuple[int, ...] | None) -> list[int]:
            return [
                token
                async for delta in engine.generate(
                    PROMPT, max_tokens=30, stop_token_ids=stop_token_ids
                )
                for token in delta.token_ids
            ]

        assert await _generate(engine, PROMPT, max_tokens=30) == reference[:7]
        assert await generate(None) == reference[:7]
        assert await generate(()) == reference
        assert await generate((other,)) == reference[:3]


async def test_closing_a_generation_aborts_its_request(worker: FakeWorker, engine: Engine) -> None:
    async with engine:
        generation = await _first(engine)
        await generation.aclose()
        assert engine.statistics().num_running == 0
        assert await _generate(engine, (1, 2)) == reference_tokens((1, 2), 8)
    assert worker.device.slots == {}
    assert sum(len(step.finished) for step in worker.device.log) == 2


async def test_cancelling_the_consumer_aborts_its_request(
    worker: FakeWorker, engine: Engine
) -> None:
    async with engine:
        with anyio.move_on_after(60) as scope:
            async for _ in engine.generate(PROMPT, max_tokens=60):
                scope.cancel()
        assert engine.statistics().num_running == 0
        assert await _generate(engine, (1, 2)) == reference_tokens((1, 2), 8)
    assert worker.device.slots == {}


async def test_what_can_never_fit_is_refused_by_generate(engine: Engine) -> None:
    async with engine:
        with pytest.raises(InvalidRequest, match="exceed max_model_len 64"):
            await _generate(engine, tuple(range(64)))


async def test_a_refusal_is_raised_where_it_belongs(worker: FakeWorker, engine: Engine) -> None:
    worker.device.refuse.add("bad")
    async with engine:
        other = asyncio.create_task(_generate(engine, PROMPT))
        with pytest.raises(InvalidRequest, match="not this one"):
            async for _ in engine.generate(PROMPT, request_id="bad"):
                pass
        assert await other == reference_tokens(PROMPT, 8)


async def test_a_failed_step_is_raised_by_its_generations_and_the_engine_goes_on(
    worker: FakeWorker, engine: Engine
) -> None:
    worker.device.fail_at[2] = StepFailed("the kernel raised")
    async with engine:
        with pytest.raises(StepFailed):
            await _generate(engine, PROMPT)
        assert await _generate(engine, PROMPT) == reference_tokens(PROMPT, 8)


async def test_a_worker_error_ends_every_generation(worker: FakeWorker, engine: Engine) -> None:
    async with engine:
        generations = [await _first(engine, (n,)) for n in range(3)]
        worker.state = "sleeping"  # somebody else told it to
        for generation in generations:
            with pytest.raises(IllegalMessage, match="in sleeping") as caught:
                [delta async for delta in generation]
            assert caught.value.state == "sleeping"
        worker.state = "serving"
        assert await _generate(engine, PROMPT) == reference_tokens(PROMPT, 8)


@pytest.mark.parametrize("error", [WorkerFaulted("gone"), WorkerClosed("x"), ConnectionLost("y")])
async def test_a_lost_worker_ends_the_engine(
    worker: FakeWorker, engine: Engine, error: Exception
) -> None:
    async with engine:
        generation = await _first(engine)
        worker.crash = error
        with pytest.raises(type(error)):
            [delta async for delta in generation]
        with pytest.raises(type(error)):
            await _generate(engine, PROMPT)
        with pytest.raises(type(error)):
            async with engine.paused():
                pass


async def test_a_full_mailbox_only_delays(worker: FakeWorker, engine: Engine) -> None:
    original, worker.mailbox_limit = worker.mailbox_limit, 0
    async with engine, anyio.create_task_group() as tasks:
        results: list[list[int]] = []

        async def generate() -> None:
            results.append(await _generate(engine, PROMPT))

        tasks.start_soon(generate)
        with pytest.raises(MailboxFull):
            worker.submit(empty_step(0))
        worker.mailbox_limit = original
    assert results == [reference_tokens(PROMPT, 8)]


async def test_an_epoch_that_changes_behind_the_engine_costs_no_token(
    worker: FakeWorker, engine: Engine
) -> None:
    async with engine:
        tokens: list[int] = []
        async for delta in engine.generate(PROMPT, max_tokens=20):
            tokens += delta.token_ids
            if len(tokens) in (5, 11):
                worker.device.new_epoch()
    assert tokens == reference_tokens(PROMPT, 20)


async def test_a_worker_that_contradicts_itself_about_the_epoch_is_not_asked_for_ever(
    worker: FakeWorker, engine: Engine
) -> None:
    async with engine:
        generation = await _first(engine)
        execute = worker.device.execute

        def stale(step: object) -> object:
            worker.device.epoch += 1
            try:
                return execute(step)
            finally:
                worker.device.epoch -= 1

        worker.device.execute = stale  # type: ignore[method-assign]
        with pytest.raises(WorkerError, match="KV epoch"):
            [delta async for delta in generation]


async def test_nothing_is_in_flight_while_paused(worker: FakeWorker, engine: Engine) -> None:
    async with engine:
        generation = await _first(engine)
        async with engine.paused(), engine.paused():
            num_steps = len(worker.device.log)
            await anyio.wait_all_tasks_blocked()
            assert len(worker.device.log) == num_steps
            worker.device.new_epoch()
        tokens = [token async for delta in generation for token in delta.token_ids]
        assert tokens == reference_tokens(PROMPT, 30)[1:]
    assert worker.device.num_stale == 0


async def test_sleep_and_wake_up_in_the_middle_of_generations(
    worker: FakeWorker, engine: Engine
) -> None:
    async with engine:
        generation = await _first(engine)
        assert (await engine.sleep(2)).level == 2
        waiting = asyncio.create_task(_generate(engine, (1, 2)))
        await anyio.wait_all_tasks_blocked()
        assert not waiting.done()
        await engine.wake_up()
        tokens = [token async for delta in generation for token in delta.token_ids]
        assert tokens == reference_tokens(PROMPT, 30)[1:]
        assert await waiting == reference_tokens((1, 2), 8)
    assert worker.num_moves_met_steps == worker.device.num_stale == 0


async def test_reloaded_weights_start_a_new_epoch(worker: FakeWorker, engine: Engine) -> None:
    async with engine:
        generation = await _first(engine)
        await engine.reload_weights()
        tokens = [token async for delta in generation for token in delta.token_ids]
    assert tokens == reference_tokens(PROMPT, 30)[1:]
    assert worker.num_moves_met_steps == worker.device.num_stale == 0


async def test_a_failed_sleep_lets_the_generations_go_on(
    worker: FakeWorker, engine: Engine
) -> None:
    async with engine:
        with pytest.raises(IllegalMessage):
            await engine.wake_up()
        assert await _generate(engine, PROMPT) == reference_tokens(PROMPT, 8)


async def test_leaving_aborts_and_tells_the_worker(worker: FakeWorker, engine: Engine) -> None:
    async with engine:
        generation = await _first(engine)
    deltas = [delta async for delta in generation]
    assert deltas[-1].finish_reason == "abort"
    assert worker.device.slots == {}
    with pytest.raises(WorkerClosed, match="closed"):
        await _generate(engine, PROMPT)
    with pytest.raises(IllegalMessage, match="build another"):
        await engine.__aenter__()


async def test_leaving_while_the_worker_sleeps_does_not_hang(
    worker: FakeWorker, engine: Engine
) -> None:
    async with engine:
        await _first(engine)
        await engine.sleep()
    assert worker.state == "sleeping"


async def test_an_error_inside_is_raised_as_it_is(worker: FakeWorker, engine: Engine) -> None:
    async def fail_inside() -> None:
        async with engine:
            await _first(engine)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail_inside()
    assert worker.device.slots == {}


async def test_cancelling_the_block_ends_the_engine(worker: FakeWorker, engine: Engine) -> None:
    worker.held = True
    with anyio.CancelScope() as scope:
        async with engine, anyio.create_task_group() as tasks:
            tasks.start_soon(_generate, engine, PROMPT)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught
    worker.release()
    await anyio.wait_all_tasks_blocked()


async def test_a_bug_in_the_worker_is_not_swallowed(worker: FakeWorker, engine: Engine) -> None:
    worker.crash = ZeroDivisionError("a bug")
    with pytest.raises(ExceptionGroup) as caught:
        async with engine:
            await _generate(engine, PROMPT)
    assert caught.group_contains(ZeroDivisionError)


async def test_engines_may_follow_each_other_on_one_worker(worker: FakeWorker) -> None:
    for _ in range(3):
        async with Engine(worker) as engine:
            assert await _generate(engine, PROMPT) == reference_tokens(PROMPT, 8)


async def test_nothing_in_the_engine_shuts_the_worker_down(
    worker: FakeWorker, engine: Engine
) -> None:
    async with engine:
        await _generate(engine, PROMPT)
    with pytest.raises(IllegalMessage):  # the fake does not know it, so nobody may have asked
        await worker.ask(Shutdown())


async def test_the_engine_runs_on_the_actor_and_through_its_sleep() -> None:
    config = WorkerConfig(model=ModelConfig(model="fake"), limits=LimitsConfig(max_num_seqs=2))
    async with fake_worker(config) as worker:
        await bring_up(worker)
        async with Engine(worker) as engine:
            generation = await _first(engine)
            await engine.sleep()
            assert worker.state is State.SLEEPING
            await engine.wake_up()
            tokens = [token async for delta in generation for token in delta.token_ids]
            assert tokens == [100] * 29  # what the fake runtime says for slot 0
            await engine.reload_weights()
            others = await asyncio.gather(*(_generate(engine, (n,)) for n in range(5)))
            assert [len(other) for other in others] == [8] * 5
        assert worker.state is State.SERVING
