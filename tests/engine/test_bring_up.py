"""Bringing a worker up from any state, and what is said on the way."""

from __future__ import annotations

import pytest

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import CacheConfig, LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.engine import BringUpStep, ServingInfo, bring_up
from gpuworker.errors import (
    DeviceFault,
    InsufficientKVMemory,
    InvalidRequest,
    WorkerClosed,
    WorkerFaulted,
)
from gpuworker.lifecycle import State
from gpuworker.testing import fake_worker, walk_to

LIMITS = LimitsConfig(max_num_seqs=4, max_num_batched_tokens=64)


def _worker(max_model_len: int = 100, block_size: int = 16) -> GPUWorker:
    return fake_worker(
        WorkerConfig(
            model=ModelConfig(model="fake", max_model_len=max_model_len),
            cache=CacheConfig(block_size=block_size),
            limits=LIMITS,
        )
    )


async def test_every_message_of_the_way_is_reported() -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        serving = await bring_up(worker, limits=LIMITS, on_step=steps.append)
        assert worker.state is State.SERVING
    assert [(step.state, type(step.request)) for step in steps] == [
        ("uninit", m.InitDevice),
        ("device_ready", m.LoadModel),
        ("device_ready", m.GetKVCacheSpec),
        ("device_ready", m.ProfileMemory),
        ("profiled", m.AllocateKVCache),
        ("kv_allocated", m.WarmUp),
        ("warmed_up", m.StartServing),
    ]
    for step in steps:
        assert isinstance(step.reply, m.REPLY_OF[type(step.request)])
        assert step.seconds >= 0
    assert steps[-1].status.state == "serving"
    assert serving == ServingInfo(
        block_size=16,
        num_blocks=4 * 7 + 1,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_epoch=0,
        vocab_size=256,
        eos_token_ids=(0,),
    )
    assert serving.limits(depth=3).depth == 3


async def test_the_pool_takes_everything_when_told_so() -> None:
    async with _worker() as worker:
        serving = await bring_up(worker, limits=LIMITS, max_num_blocks_useful=False)
    assert serving.num_blocks == 64


async def test_the_profile_bounds_what_would_be_useful() -> None:
    async with _worker(max_model_len=800) as worker:
        serving = await bring_up(worker, limits=LIMITS)
    assert serving.num_blocks == 64
    assert serving.max_model_len == 800


async def test_a_length_that_no_pool_holds_is_lowered_and_reported() -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        serving = await bring_up(worker, num_blocks=5, on_step=steps.append)
    assert serving.max_model_len == 64
    (step,) = [step for step in steps if isinstance(step.request, m.UpdateMaxModelLen)]
    assert step.note == "4 usable blocks hold 64 tokens, not 100"


async def test_a_pool_that_holds_no_request_is_an_error_before_anything_is_mapped() -> None:
    async with _worker() as worker:
        with pytest.raises(InsufficientKVMemory, match="1 blocks of 16"):
            await bring_up(worker, num_blocks=1)
        assert worker.state is State.PROFILED


@pytest.mark.parametrize(
    "state",
    [State.PROFILED, State.KV_ALLOCATED, State.WARMED_UP, State.SERVING, State.SLEEPING],
)
async def test_the_way_begins_where_the_worker_is(state: State) -> None:
    async with _worker() as worker:
        earlier = await bring_up(worker, num_blocks=32)
    async with _worker() as worker:
        await walk_to(worker, state)
        with pytest.raises(InvalidRequest, match="pass the ServingInfo"):
            await bring_up(worker)
        assert worker.state is state
        serving = await bring_up(worker, num_blocks=32, earlier=earlier)
        assert worker.state is State.SERVING
        epoch = (await worker.ask(m.GetStatus())).kv_epoch
    assert epoch == (1 if state is State.SLEEPING else 0)
    assert serving == ServingInfo(
        block_size=16,
        num_blocks=32,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        kv_epoch=epoch,
        vocab_size=256,
        eos_token_ids=(0,),
    )


async def test_an_initialised_device_is_not_initialised_again() -> None:
    async with _worker() as worker:
        await worker.ask(m.InitDevice())
        await bring_up(worker)
        assert worker.state is State.SERVING


async def test_a_profiled_worker_needs_a_number_of_blocks() -> None:
    async with _worker() as worker:
        earlier = await bring_up(worker)
    async with _worker() as worker:
        await walk_to(worker, State.PROFILED)
        with pytest.raises(InvalidRequest, match="give num_blocks"):
            await bring_up(worker, earlier=earlier)


async def test_a_worker_that_cannot_go_on_says_so() -> None:
    async with _worker() as worker:
        await walk_to(worker, State.SERVING)
        worker._runtime.progress.fault = DeviceFault("sticky")
        with pytest.raises(WorkerFaulted, match="start another"):
            await bring_up(worker)
        await worker.ask(m.Shutdown())
        with pytest.raises(WorkerClosed):
            await bring_up(worker)
