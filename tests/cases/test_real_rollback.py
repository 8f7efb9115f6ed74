"""Every move on a real model, failed at every device call: state and measured bytes as before."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.errors import OutOfDeviceMemory, SpillFailed
from gpuworker.lifecycle import State
from gpuworker.testing import fail_at, walk_to
from real_worker import Hand, real_worker, tiny_config

PROMPT = [7, 8, 9, 10, 11]

MOVES: list[tuple[State, m.Request, tuple[m.Request, ...]]] = [
    (State.UNINIT, m.InitDevice(), ()),
    (State.DEVICE_READY, m.LoadModel(), ()),
    (State.DEVICE_READY, m.ProfileMemory(), (m.LoadModel(),)),
    (State.PROFILED, m.UpdateMaxModelLen(max_model_len=32), ()),
    (State.PROFILED, m.AllocateKVCache(num_blocks=8), ()),
    (State.KV_ALLOCATED, m.WarmUp(), ()),
    (State.WARMED_UP, m.StartServing(), ()),
    (State.SERVING, m.ReloadWeights(), ()),
    (State.SERVING, m.Sleep(level=1), ()),
    (State.SERVING, m.Sleep(level=2), ()),
    (State.SLEEPING, m.ResumePools(tags=("weights", "kv_cache")), ()),
    (State.SLEEPING, m.WakeUp(), ()),
]


async def _facts(worker: GPUWorker) -> tuple[object, ...]:
    status = await worker.ask(m.GetStatus())
    return status.state, status.memory, status.asleep, status.weights, status.kv_epoch


@pytest.mark.parametrize(
    ("state", "request_", "first"), MOVES, ids=[type(move[1]).__name__ for move in MOVES]
)
async def test_a_failed_move_leaves_the_measured_bytes_as_before(
    tiny_model: Path, state: State, request_: m.Request, first: tuple[m.Request, ...]
) -> None:
    async with real_worker(tiny_config(tiny_model), state) as worker:
        for request in first:
            await worker.ask(request)
        before = await _facts(worker)
        call = 0
        while True:
            with fail_at(worker._device, call) as counter:
                try:
                    await worker.ask(request_)
                except OutOfDeviceMemory:
                    assert await _facts(worker) == before, f"device call {call}"
                    call += 1
                    continue
            assert counter.num_calls == call >= 1
            break
        if State.SERVING.value in (state.value, worker.state.value):
            if worker.state is State.SLEEPING:
                await worker.ask(m.ResumePools(tags=("weights",)))
                if (await worker.ask(m.GetStatus())).weights != "defined":
                    await worker.ask(m.ReloadWeights())
                await worker.ask(m.WakeUp())
            assert len(await Hand(worker).run(PROMPT, 3)) == 3


async def test_a_sleep_that_cannot_keep_the_weights_serves_on(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        hand = Hand(worker)
        tokens = await hand.run(PROMPT, 3)
        before = await _facts(worker)
        worker._runtime._weights._spill.directory = tmp_path / "gone"  # type: ignore[attr-defined]
        with pytest.raises(SpillFailed, match="gone"):
            await worker.ask(m.Sleep(level=1))
        assert await _facts(worker) == before
        assert await hand.run(PROMPT, 3) == tokens


async def test_leaving_gives_everything_back(tiny_model: Path) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        await Hand(worker).run(PROMPT, 3, finish=False)
        runtime = worker._runtime
    assert runtime.memory() == ()
    assert runtime.num_requests() == 0
    assert not runtime.has_model()


async def test_two_real_workers_in_one_process_do_not_disturb_each_other(
    tiny_model: Path,
) -> None:
    config = tiny_config(tiny_model)
    async with real_worker(config) as one, real_worker(config, State.UNINIT) as other:
        tokens = await Hand(one).run(PROMPT, 6)
        await walk_to(other, State.SERVING)
        await one.ask(m.Sleep(level=2))
        assert await Hand(other).run(PROMPT, 6) == tokens
