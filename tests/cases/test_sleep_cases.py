"""Public cases B01-B04 on a real model: sleep, wake, and what may be computed in between."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from gpuworker import messages as m
from gpuworker.errors import IllegalMessage, InvalidRequest, StaleKVEpoch, WeightsUndefined
from gpuworker.lifecycle import State
from gpuworker.step import NewRequest, StepRow, pack_step
from gpuworker.torch_runtime import TorchRuntime
from real_worker import GREEDY, Hand, real_worker, resumed, sampled, tiny_config

PROMPT = [10, 200, 30, 40, 50, 60, 70, 80]


async def test_b01_sleep_sent_during_a_step_waits_for_it(tiny_model: Path) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        hand = Hand(worker)
        prompt = PROMPT * 6
        alone = await hand.run(prompt, 1)
        new = NewRequest(request_id="y", slot=0, num_prompt_tokens=48, sampling=GREEDY)
        step = m.ExecuteModel(
            step_id=100,
            kv_epoch=0,
            num_rows=1,
            num_block_ids=16,
            num_token_ids=48,
            new_requests=(new,),
            buffer=pack_step([StepRow(0, 48, 0, range(1, 17))], prompt),
        )
        running, asleep = worker.submit(step), worker.submit(m.Sleep(level=1))
        assert sampled(await running) == alone
        assert (await asleep).level == 1
        assert worker.state is State.SLEEPING
        await worker.ask(m.WakeUp())
        hand.step_id = 100
        assert await hand.run(prompt, 1, slot=1, request_id="z") == alone


async def test_b02_blocks_of_an_earlier_epoch_are_refused_not_computed(tiny_model: Path) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        hand = Hand(worker)
        cold = await hand.run(PROMPT, 1)
        before = (await worker.ask(m.GetStatus())).kv_epoch
        await worker.ask(m.Sleep(level=1))
        awake = await worker.ask(m.WakeUp())
        assert awake.kv_epoch == before + 1
        new = NewRequest(request_id="n", slot=0, num_prompt_tokens=9, sampling=GREEDY)
        rows = [StepRow(0, 1, 8, [1, 2, 3])]
        with pytest.raises(StaleKVEpoch, match=f"{before}"):
            await hand.step(rows, new=[new], tokens=[*PROMPT, 5], kv_epoch=before)
        await hand.resume()
        assert (await worker.ask(m.GetStatus())).num_requests == 0
        assert await hand.run(PROMPT, 1) == cold


async def test_b02_a_live_request_is_recomputed_after_sleep_with_the_same_tokens(
    tiny_model: Path,
) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        hand = Hand(worker)
        expected = await hand.run(PROMPT, 6)
        begun = await hand.run(PROMPT, 3, request_id="a", finish=False)
        await worker.ask(m.Sleep(level=1))
        await worker.ask(m.WakeUp())
        refused = await hand.step([StepRow(0, 1, 10)])
        assert [refusal.request_id for refusal in refused.refusals] == ["a"]
        begun += sampled(await hand.step([resumed(0, 11, [9, 3, 7, 5])]))
        for computed in (11, 12):
            begun += sampled(await hand.step([StepRow(0, 1, computed)]))
        assert begun == expected


async def test_b03_no_forward_pass_until_everything_is_resident(tiny_model: Path) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        hand = Hand(worker)
        tokens = await hand.run(PROMPT, 4)
        await worker.ask(m.Sleep(level=1))
        resumed_pools = await worker.ask(m.ResumePools(tags=("weights",)))
        assert (resumed_pools.resumed, resumed_pools.asleep) == (("weights",), ("kv_cache",))
        with pytest.raises(IllegalMessage, match="sleeping"):
            await hand.step([StepRow(0, 1, 0, [1])])
        with pytest.raises(IllegalMessage, match="sleeping"):
            await worker.ask(m.ExecuteDummyBatch())
        await worker.ask(m.ReloadWeights())  # weights may change in this state
        await worker.ask(m.ResumePools(tags=("kv_cache",)))
        await worker.ask(m.WakeUp())
        await hand.resume()  # the step that was refused stands at the head of the others
        assert await hand.run(PROMPT, 4) == tokens
        assert (await worker.ask(m.ExecuteDummyBatch(num_tokens=3))).num_tokens == 3


async def test_b13_weights_cannot_be_loaded_into_memory_that_is_not_there(
    tiny_model: Path,
) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        await worker.ask(m.Sleep(level=1))
        with pytest.raises(InvalidRequest, match="resume_pools"):
            await worker.ask(m.ReloadWeights())
        await worker.ask(m.ResumePools(tags=("weights",)))
        await worker.ask(m.ReloadWeights())
        await worker.ask(m.WakeUp())
        assert worker.state is State.SERVING


ORDERS: list[tuple[tuple[m.Tag, ...], ...]] = [
    (("kv_cache",), ("weights",)),
    (("weights",), ("kv_cache",)),
    (("weights", "kv_cache"),),
    (("kv_cache", "weights", "kv_cache"),),
]


@pytest.mark.parametrize("order", ORDERS)
async def test_b04_level_2_survives_any_order_of_waking(
    tiny_model: Path, order: tuple[tuple[m.Tag, ...], ...]
) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        hand = Hand(worker)
        tokens = await hand.run(PROMPT, 6)
        runtime = worker._runtime
        assert isinstance(runtime, TorchRuntime)
        assert runtime._weights is not None
        before = {name: value.clone() for name, value in runtime._weights.params.items()}
        await worker.ask(m.Sleep(level=2))
        assert (await worker.ask(m.GetStatus())).weights == "undefined"
        for tags in order:
            await worker.ask(m.ResumePools(tags=tags))
        with pytest.raises(WeightsUndefined, match="reload_weights"):
            await worker.ask(m.WakeUp())
        assert worker.state is State.SLEEPING
        await worker.ask(m.ReloadWeights())
        await worker.ask(m.WakeUp())
        for name, value in runtime._weights.params.items():
            assert torch.equal(value, before[name]), name
        assert await hand.run(PROMPT, 6) == tokens


async def test_level_1_keeps_addresses_and_bytes_and_copies_only_once(tiny_model: Path) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        runtime = worker._runtime
        assert isinstance(runtime, TorchRuntime)
        assert runtime._weights is not None
        params = runtime._weights.params
        before = {name: (value.data_ptr(), value.clone()) for name, value in params.items()}
        spilled = []
        for _ in range(3):
            asleep = await worker.ask(m.Sleep(level=1))
            spilled.append(asleep.spilled_bytes)
            await worker.ask(m.WakeUp())
            for name, value in params.items():
                assert (value.data_ptr(), True) == (
                    before[name][0],
                    torch.equal(value, before[name][1]),
                )
        assert spilled[0] > 0
        assert spilled[1:] == [0, 0]


@pytest.mark.parametrize("level", [1, 2])
async def test_sleep_really_gives_the_memory_back(tiny_model: Path, level: int) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        before = (await worker.ask(m.GetStatus())).memory
        assert {use.tag for use in before} == {"weights", "kv_cache"}
        assert all(use.resident_bytes == use.reserved_bytes > 0 for use in before)
        await worker.ask(m.Sleep(level=level))
        status = await worker.ask(m.GetStatus())
        assert [use.resident_bytes for use in status.memory] == [0, 0]
        spilled = {use.tag: use.spilled_bytes for use in status.memory}
        assert (spilled["weights"] > 0, spilled["kv_cache"]) == (level == 1, 0)
        await worker.ask(m.ResumePools(tags=("kv_cache", "weights")))
        after = (await worker.ask(m.GetStatus())).memory
        assert [use.resident_bytes for use in after] == [use.resident_bytes for use in before]


async def test_sleeping_again_after_a_partial_wake_loses_nothing(tiny_model: Path) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        hand = Hand(worker)
        tokens = await hand.run(PROMPT, 4)
        await worker.ask(m.Sleep(level=1))
        await worker.ask(m.ResumePools(tags=("weights",)))
        await worker.ask(m.Sleep(level=1))
        assert (await worker.ask(m.GetStatus())).asleep == ("weights", "kv_cache")
        await worker.ask(m.WakeUp())
        assert await hand.run(PROMPT, 4) == tokens


async def test_b37_a_cancelled_sleep_or_wake_leaves_a_worker_that_computes_the_same(
    tiny_model: Path,
) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        hand = Hand(worker)
        tokens = await hand.run(PROMPT, 4)
        for turns in range(0, 40, 3):
            message = m.Sleep(level=1) if worker.state is State.SERVING else m.WakeUp()
            task = asyncio.create_task(worker.ask(message))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            status = await worker.ask(m.GetStatus())
            assert (status.state, status.moving) == (worker.state.value, "")
            if worker.state is State.SLEEPING:
                await worker.ask(m.WakeUp())
            assert await hand.run(PROMPT, 4) == tokens
