"""The engine on a worker that computes: a batch, a tiny pool and sleep change no token."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import anyio
import pytest

from gpuworker.actor import GPUWorker
from gpuworker.cli.tiny_model import make_tiny_model
from gpuworker.config import CacheConfig, DeviceConfig, LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.engine import Engine, bring_up
from gpuworker.ipc.client import connect
from gpuworker.ipc.server import serve
from gpuworker.lifecycle import State
from gpuworker.messages import (
    GetStatus,
    InitDevice,
    LoadModel,
    Reply,
    Request,
    ResumePools,
    Shutdown,
    Sleep,
)
from gpuworker.step import SamplingParams
from gpuworker.testing import walk_to

GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(model=str(make_tiny_model(tmp_path_factory.mktemp("tiny")))),
        device=DeviceConfig(num_threads=1),
        cache=CacheConfig(block_size=4, kv_cache_memory_bytes=8 << 20),
        limits=LimitsConfig(max_num_seqs=6, max_num_batched_tokens=24),
    )


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    rng = random.Random(3)
    prefixes = [tuple(rng.randrange(200) for _ in range(20)) for _ in range(3)]
    return [
        rng.choice(prefixes)[: rng.randrange(4, 20)]
        + tuple(rng.randrange(200) for _ in range(rng.randrange(1, 20)))
        for _ in range(20)
    ]


async def _generate(engine: Engine, prompt: tuple[int, ...], first: asyncio.Event) -> list[int]:
    tokens: list[int] = []
    async for delta in engine.generate(prompt, sampling=GREEDY, max_tokens=20, stop_token_ids=()):
        tokens += delta.token_ids
        first.set()
    return tokens


async def _alone(config: WorkerConfig, prompts: list[tuple[int, ...]]) -> list[list[int]]:
    async with GPUWorker(config) as worker:
        await bring_up(worker)
        async with Engine(worker) as engine:
            return [await _generate(engine, prompt, asyncio.Event()) for prompt in prompts]


async def test_a_batch_in_a_tiny_pool_generates_what_lone_runs_do(
    config: WorkerConfig, prompts: list[tuple[int, ...]]
) -> None:
    expected = await _alone(config, prompts)
    async with GPUWorker(config) as worker:
        await bring_up(worker, num_blocks=26)
        async with Engine(worker) as engine:
            results = await asyncio.gather(
                *(_generate(engine, prompt, asyncio.Event()) for prompt in prompts)
            )
            statistics = engine.statistics()
        assert (await worker.ask(GetStatus())).num_requests == 0
    assert results == expected
    assert statistics.num_preemptions > 0
    assert statistics.num_prefix_hits > 0


async def test_both_levels_of_sleep_in_the_middle_change_no_token(
    config: WorkerConfig, prompts: list[tuple[int, ...]]
) -> None:
    expected = await _alone(config, prompts)
    async with GPUWorker(config) as worker:
        await bring_up(worker)
        async with Engine(worker) as engine, asyncio.TaskGroup() as tasks:
            begun = [asyncio.Event() for _ in prompts]
            results = [
                tasks.create_task(_generate(engine, prompt, first))
                for prompt, first in zip(prompts, begun, strict=True)
            ]
            await begun[2].wait()
            await engine.sleep(1)
            await engine.wake_up()
            await begun[10].wait()
            await engine.sleep(2)
            await worker.ask(ResumePools(tags=("weights",)))
            await engine.reload_weights()
            await engine.wake_up()
            assert not all(result.done() for result in results)
    assert [result.result() for result in results] == expected


async def test_over_a_socket_everything_is_as_in_the_same_process(
    config: WorkerConfig, prompts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    expected = await _alone(config, prompts[:6])
    async with GPUWorker(config) as worker, asyncio.TaskGroup() as tasks:
        endpoint = f"ipc://{tmp_path}/private/worker"
        tasks.create_task(serve(worker, endpoint))
        async with connect(endpoint) as remote:
            await bring_up(remote)
            async with Engine(remote) as engine:
                begun = [asyncio.Event() for _ in expected]
                results = [
                    asyncio.create_task(_generate(engine, prompt, first))
                    for prompt, first in zip(prompts, begun, strict=False)
                ]
                await begun[1].wait()
                await engine.sleep(1)
                await engine.wake_up()
                assert await asyncio.gather(*results) == expected
            await remote.ask(Shutdown())


@pytest.mark.parametrize(
    ("state", "more"),
    [
        (State.UNINIT, ()),
        (State.UNINIT, (InitDevice(), LoadModel())),
        (State.DEVICE_READY, ()),
        (State.PROFILED, ()),
        (State.KV_ALLOCATED, ()),
        (State.WARMED_UP, ()),
        (State.SERVING, ()),
        (State.SERVING, (Sleep(level=1),)),
        (State.SERVING, (Sleep(level=2),)),
        (State.SERVING, (Sleep(level=2), ResumePools(tags=("weights",)))),
    ],
)
async def test_a_worker_found_in_any_state_is_brought_up_and_generates(
    config: WorkerConfig,
    prompts: list[tuple[int, ...]],
    state: State,
    more: tuple[Request[Reply], ...],
) -> None:
    (expected,) = await _alone(config, prompts[:1])
    async with GPUWorker(config) as worker:
        await walk_to(worker, state)
        for request in more:
            await worker.ask(request)
        await bring_up(worker)
        async with Engine(worker) as engine:
            assert await _generate(engine, prompts[0], asyncio.Event()) == expected


async def test_an_engine_takes_over_from_one_that_died_and_the_worker_slept_and_lost_its_weights(
    config: WorkerConfig, prompts: list[tuple[int, ...]]
) -> None:
    expected = await _alone(config, prompts[:8])
    async with GPUWorker(config) as worker:
        await bring_up(worker)
        for level in (None, 1, 2):
            with anyio.CancelScope() as scope:
                async with Engine(worker) as abandoned:
                    generations = [
                        abandoned.generate(prompt, max_tokens=100, stop_token_ids=())
                        for prompt in prompts[:6]
                    ]
                    for generation in generations:
                        await anext(generation)
                    scope.cancel()
                    await anyio.sleep_forever()
            assert (await worker.ask(GetStatus())).num_requests == 6
            if level is not None:
                await worker.ask(Sleep(level=level))
            await bring_up(worker)
            async with Engine(worker) as engine:
                assert (await worker.ask(GetStatus())).num_requests == 0
                results = await asyncio.gather(
                    *(_generate(engine, prompt, asyncio.Event()) for prompt in prompts[:8])
                )
            assert results == expected
        assert (await worker.ask(GetStatus())).num_requests == 0
