"""Bringing a worker up from any state, and what is said on the way."""

from __future__ import annotations

import asyncio

import pytest

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import CacheConfig, LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.engine import BringUpStep, bring_up
from gpuworker.errors import (
    DeviceFault,
    InsufficientKVMemory,
    InvalidRequest,
    WorkerClosed,
    WorkerFaulted,
)
from gpuworker.lifecycle import State
from gpuworker.testing import fake_worker, walk_to

UP: tuple[tuple[str, type[m.Request[object]]], ...] = (
    ("uninit", m.InitDevice),
    ("device_ready", m.LoadModel),
    ("device_ready", m.ProfileMemory),
    ("profiled", m.AllocateKVCache),
    ("kv_allocated", m.WarmUp),
    ("warmed_up", m.StartServing),
)


def _worker(max_model_len: int = 100, block_size: int = 16) -> GPUWorker:
    return fake_worker(
        WorkerConfig(
            model=ModelConfig(model="fake", max_model_len=max_model_len),
            cache=CacheConfig(block_size=block_size),
            limits=LimitsConfig(max_num_seqs=4, max_num_batched_tokens=64),
        )
    )


def _said(steps: list[BringUpStep]) -> list[tuple[str, type[m.Request[object]]]]:
    return [(step.state, type(step.request)) for step in steps]


async def test_every_message_of_the_way_is_reported() -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        limits = await bring_up(worker, on_step=steps.append)
        assert worker.state is State.SERVING
    assert _said(steps) == list(UP)
    for step in steps:
        assert isinstance(step.reply, m.REPLY_OF[type(step.request)])
        assert step.seconds >= 0
    assert steps[-1].status.state == "serving"
    assert limits == m.Limits(
        block_size=16,
        max_num_blocks=64,
        num_blocks=4 * 7 + 1,
        max_model_len=100,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_logprobs=20,
        window=2,
        kv_epoch=0,
        next_step_id=0,
        live_requests=(),
        vocab_size=256,
        eos_token_ids=(0,),
    )


async def test_the_pool_is_larger_than_useful_when_told_so() -> None:
    async with _worker() as worker:
        assert (await bring_up(worker, num_blocks=64)).num_blocks == 64


async def test_the_profile_bounds_what_would_be_useful() -> None:
    async with _worker(max_model_len=800) as worker:
        limits = await bring_up(worker)
    assert limits.num_blocks == 64
    assert limits.max_model_len == 800


async def test_a_length_that_no_pool_holds_is_lowered_and_reported() -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        limits = await bring_up(worker, num_blocks=5, on_step=steps.append)
    assert limits.max_model_len == 64
    (step,) = [step for step in steps if isinstance(step.request, m.UpdateMaxModelLen)]
    assert step.note == "4 usable blocks hold 64 tokens, not 100"


async def test_a_pool_that_holds_no_request_is_an_error_before_anything_is_mapped() -> None:
    async with _worker() as worker:
        with pytest.raises(InsufficientKVMemory, match="1 blocks of 16"):
            await bring_up(worker, num_blocks=1)
        assert worker.state is State.PROFILED


@pytest.mark.parametrize(
    ("state", "num_before"),
    [
        (State.UNINIT, 0),
        (State.DEVICE_READY, 1),
        (State.PROFILED, 3),
        (State.KV_ALLOCATED, 4),
        (State.WARMED_UP, 5),
        (State.SERVING, 6),
    ],
)
async def test_the_way_begins_where_the_worker_is(state: State, num_before: int) -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        await walk_to(worker, state)
        limits = await bring_up(worker, on_step=steps.append)
        assert worker.state is State.SERVING
        assert limits == await worker.ask(m.GetLimits())
    assert _said(steps) == list(UP[num_before:])
    assert limits.num_blocks == (29 if num_before <= 3 else 32)


async def test_a_loaded_model_is_not_loaded_again() -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        await worker.ask(m.InitDevice())
        await worker.ask(m.LoadModel())
        await bring_up(worker, on_step=steps.append)
    assert _said(steps) == list(UP[2:])


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ([m.Sleep(level=1)], [m.WakeUp]),
        ([m.Sleep(level=1), m.ResumePools(tags=("kv_cache",))], [m.WakeUp]),
        ([m.Sleep(level=2)], [m.ResumePools, m.ReloadWeights, m.WakeUp]),
        ([m.Sleep(level=2), m.ResumePools(tags=("weights",))], [m.ReloadWeights, m.WakeUp]),
        ([m.Sleep(level=1), m.Sleep(level=2)], [m.ResumePools, m.ReloadWeights, m.WakeUp]),
    ],
)
async def test_a_sleeping_worker_is_woken_with_its_weights(
    before: list[m.Request[m.Reply]], expected: list[type[m.Request[object]]]
) -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        await walk_to(worker, State.SERVING)
        for request in before:
            await worker.ask(request)
        limits = await bring_up(worker, on_step=steps.append)
        status = await worker.ask(m.GetStatus())
        assert (status.state, status.weights, status.asleep) == ("serving", "defined", ())
        assert limits.kv_epoch == status.kv_epoch
    assert _said(steps) == [("sleeping", message) for message in expected]
    assert all(step.note == "the weights are undefined" for step in steps[:-1])


async def test_weights_that_a_failed_reload_left_behind_are_loaded_again() -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        await walk_to(worker, State.SERVING)
        worker._runtime._truth = "poisoned"
        await bring_up(worker, on_step=steps.append)
        assert (await worker.ask(m.GetStatus())).weights == "defined"
    assert _said(steps) == [("serving", m.ReloadWeights)]
    assert steps[0].note == "the weights are poisoned"


async def test_what_was_sent_before_happens_before() -> None:
    steps: list[BringUpStep] = []
    async with _worker() as worker:
        early = [worker.submit(message()) for _, message in UP[:3]]
        await bring_up(worker, on_step=steps.append)
        await asyncio.gather(*early)
    assert _said(steps) == list(UP[3:])


@pytest.mark.parametrize("state", [State.KV_ALLOCATED, State.SERVING, State.SLEEPING])
async def test_a_pool_is_not_resized(state: State) -> None:
    async with _worker() as worker:
        await walk_to(worker, state)
        with pytest.raises(InvalidRequest, match=r"num_blocks is 40.*a pool of 32 blocks"):
            await bring_up(worker, num_blocks=40)
        assert worker.state is state
        assert (await bring_up(worker, num_blocks=32)).num_blocks == 32


async def test_a_worker_that_cannot_go_on_says_so() -> None:
    async with _worker() as worker:
        await walk_to(worker, State.SERVING)
        worker._runtime.progress.fault = DeviceFault("sticky")
        with pytest.raises(WorkerFaulted, match="start another"):
            await bring_up(worker)
        await worker.ask(m.Shutdown())
        with pytest.raises(WorkerClosed):
            await bring_up(worker)
