"""Public cases B05, B06, B34-B36 and bad input at the worker: named errors, and it lives on."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import CacheConfig, DeviceConfig
from gpuworker.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    ConfigError,
    InsufficientKVMemory,
    InvalidRequest,
    OutOfDeviceMemory,
    UnsupportedModel,
)
from gpuworker.lifecycle import State
from gpuworker.step import NewRequest, StepRow
from real_worker import GREEDY, Hand, real_worker, tiny_config, with_model

GIB = 1 << 30


class FakeReader:
    """Says what a test wants about memory; other processes may change in the middle."""

    def __init__(self, *, total: int = 64 * GIB, available: int = 10 * GIB) -> None:
        self.total, self.available, self.process = total, available, GIB
        self.on_reset: Callable[[], None] = lambda: None

    def total_bytes(self) -> int:
        return self.total

    def available_bytes(self) -> int:
        return self.available

    def process_bytes(self) -> int:
        return self.process

    def reset_peak(self) -> None:
        self.on_reset()

    def peak_bytes(self) -> int:
        return self.process + GIB // 4


async def _profile(tiny_model: Path, reader: FakeReader, share: float = 0.1) -> m.MemoryProfiled:
    config = tiny_config(tiny_model)
    config = msgspec.structs.replace(
        config, device=DeviceConfig(num_threads=1, memory_utilization=share)
    )
    async with real_worker(config, State.DEVICE_READY, reader) as worker:
        await worker.ask(m.LoadModel())
        return await worker.ask(m.ProfileMemory())


async def test_b05_memory_given_back_by_a_neighbour_is_a_warning_and_not_ours(
    tiny_model: Path,
) -> None:
    alone = await _profile(tiny_model, FakeReader())
    assert alone.warnings == ()
    reader = FakeReader()

    def neighbour_leaves() -> None:
        reader.available += 4 * GIB

    reader.on_reset = neighbour_leaves
    profiled = await _profile(tiny_model, reader)
    assert len(profiled.warnings) == 1
    assert "4.0" in profiled.warnings[0] or "4 GiB" in profiled.warnings[0]
    assert profiled.kv_budget_bytes == alone.kv_budget_bytes > 0


async def test_b06_memory_taken_by_a_neighbour_is_not_charged_to_us(tiny_model: Path) -> None:
    alone = await _profile(tiny_model, FakeReader(available=40 * GIB))
    reader = FakeReader(available=40 * GIB)

    def neighbour_comes() -> None:
        reader.available -= 5 * GIB

    reader.on_reset = neighbour_comes
    profiled = await _profile(tiny_model, reader)
    assert abs(profiled.kv_budget_bytes - alone.kv_budget_bytes) <= 0.05 * alone.kv_budget_bytes
    assert profiled.warnings


async def test_b06_a_budget_below_one_block_is_refused_with_every_component(
    tiny_model: Path,
) -> None:
    config = tiny_config(tiny_model)
    config = msgspec.structs.replace(
        config, device=DeviceConfig(num_threads=1, memory_utilization=0.01)
    )
    async with real_worker(config, State.DEVICE_READY, FakeReader()) as worker:
        await worker.ask(m.LoadModel())
        with pytest.raises(InsufficientKVMemory) as refusal:
            await worker.ask(m.ProfileMemory())
        for word in ("weights", "activation", "other processes", "memory_utilization"):
            assert word in str(refusal.value)
        assert worker.state is State.DEVICE_READY


async def test_an_explicit_cache_size_is_used_and_still_checked(tiny_model: Path) -> None:
    def sized(num_bytes: int) -> CacheConfig:
        return CacheConfig(block_size=4, kv_cache_memory_bytes=num_bytes)

    config = msgspec.structs.replace(tiny_config(tiny_model), cache=sized(1 << 20))
    async with real_worker(config, State.PROFILED, FakeReader()) as worker:
        spec = await worker.ask(m.GetKVCacheSpec())
        limit = (1 << 20) // spec.block_bytes
        with pytest.raises(InsufficientKVMemory, match=f"room for {limit}"):
            await worker.ask(m.AllocateKVCache(num_blocks=limit + 1))
        allocated = await worker.ask(m.AllocateKVCache(num_blocks=limit))
        assert allocated.kv_cache_bytes <= 1 << 20
    config = msgspec.structs.replace(config, cache=sized(20 * GIB))
    async with real_worker(config, State.DEVICE_READY, FakeReader()) as worker:
        await worker.ask(m.LoadModel())
        with pytest.raises(InsufficientKVMemory, match="kv_cache_memory_bytes"):
            await worker.ask(m.ProfileMemory())


async def test_weights_that_do_not_fit_are_refused_before_they_are_mapped(
    tiny_model: Path,
) -> None:
    reader = FakeReader(available=1000)
    async with real_worker(tiny_config(tiny_model), State.DEVICE_READY, reader) as worker:
        with pytest.raises(OutOfDeviceMemory, match="1000 are available"):
            await worker.ask(m.LoadModel())
        assert (await worker.ask(m.GetStatus())).memory == ()
        reader.available = 10 * GIB
        await worker.ask(m.LoadModel())


def _edit_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def _missing_shard(directory: Path) -> None:
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    (directory / "model.safetensors").unlink()
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00002.safetensors")})
    )


BROKEN: list[tuple[str, Callable[[Path], None], type[Exception], str]] = [
    ("missing_shard", _missing_shard, CheckpointNotFound, "model-00001-of-00002.safetensors"),
    ("truncated", _truncate, CheckpointMismatch, "model.safetensors"),
    ("no_config", lambda d: (d / "config.json").unlink(), CheckpointNotFound, "config.json"),
    ("bad_json", lambda d: (d / "config.json").write_text("{"), CheckpointMismatch, "config.json"),
    (
        "architecture",
        lambda d: _edit_config(d, architectures=["T5Model"], model_type="t5"),
        UnsupportedModel,
        "LlamaForCausalLM",
    ),
    ("dtype", lambda d: _edit_config(d, dtype="float8_e4m3fn"), UnsupportedModel, "float8_e4m3fn"),
    (
        "rope",
        lambda d: _edit_config(d, rope_scaling={"rope_type": "foo", "factor": 2.0}),
        UnsupportedModel,
        "foo",
    ),
    ("layers", lambda d: _edit_config(d, num_hidden_layers=3), CheckpointMismatch, "layers.2."),
    ("hidden", lambda d: _edit_config(d, hidden_size=32), CheckpointError, "32"),
]


@pytest.mark.parametrize(("name", "damage", "error", "words"), BROKEN, ids=lambda v: str(v)[:20])
async def test_a_broken_checkpoint_is_named_and_the_worker_lives_on(
    tiny_model: Path,
    tmp_path: Path,
    name: str,
    damage: Callable[[Path], None],
    error: type[Exception],
    words: str,
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    damage(directory)
    async with real_worker(tiny_config(directory), State.DEVICE_READY) as worker:
        with pytest.raises(error) as refusal:
            await worker.ask(m.LoadModel())
        assert words in str(refusal.value)
        status = await worker.ask(m.GetStatus())
        assert (status.state, status.memory, status.weights) == ("device_ready", (), "undefined")
        shutil.rmtree(directory)
        shutil.copytree(tiny_model, directory)
        await worker.ask(m.LoadModel())  # mended in place


async def test_a_model_that_is_nowhere_is_named(tmp_path: Path) -> None:
    async with real_worker(tiny_config(tmp_path / "gone"), State.DEVICE_READY) as worker:
        with pytest.raises(CheckpointNotFound, match="gone"):
            await worker.ask(m.LoadModel())


async def test_a_longer_sequence_than_the_model_knows_is_refused(tiny_model: Path) -> None:
    config = with_model(tiny_config(tiny_model), max_model_len=100_000)
    async with real_worker(config, State.DEVICE_READY) as worker:
        with pytest.raises(ConfigError, match="100000 exceeds the 512"):
            await worker.ask(m.LoadModel())


async def test_cuda_is_refused_by_name_in_this_release(tiny_model: Path) -> None:
    config = msgspec.structs.replace(tiny_config(tiny_model), device=DeviceConfig(kind="cuda"))
    async with real_worker(config, State.UNINIT) as worker:
        with pytest.raises(ConfigError, match="cpu"):
            await worker.ask(m.InitDevice())
        assert worker.state is State.UNINIT


async def test_dummy_weights_need_no_weight_file(tiny_model: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_model / "config.json", tmp_path)
    config = with_model(tiny_config(tmp_path), load_format="dummy")
    async with real_worker(config) as worker:
        tokens = await Hand(worker).run([1, 2, 3], 5)
        await worker.ask(m.Sleep(level=2))
        await worker.ask(m.ResumePools(tags=("weights",)))
        await worker.ask(m.ReloadWeights())
        await worker.ask(m.WakeUp())
        assert await _later_hand(worker).run([1, 2, 3], 5) == tokens


def _later_hand(worker: GPUWorker) -> Hand:
    hand = Hand(worker)
    hand.step_id = 1000
    return hand


async def test_a_reload_that_fails_keeps_the_old_weights_or_says_they_are_gone(
    tiny_model: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "model"
    shutil.copytree(tiny_model, directory)
    async with real_worker(tiny_config(directory)) as worker:
        hand = Hand(worker)
        tokens = await hand.run([1, 2, 3], 5)
        _truncate(directory)
        with pytest.raises(CheckpointMismatch):
            await worker.ask(m.ReloadWeights())
        status = await worker.ask(m.GetStatus())
        assert (status.state, status.weights, status.kv_epoch) == ("serving", "defined", 0)
        assert await hand.run([1, 2, 3], 5) == tokens


async def test_a_shorter_limit_is_set_and_a_longer_one_refused(tiny_model: Path) -> None:
    async with real_worker(tiny_config(tiny_model), State.PROFILED) as worker:
        with pytest.raises(InvalidRequest, match="65"):
            await worker.ask(m.UpdateMaxModelLen(max_model_len=65))
        await worker.ask(m.UpdateMaxModelLen(max_model_len=8))
        for request in (m.AllocateKVCache(num_blocks=9), m.WarmUp(), m.StartServing()):
            await worker.ask(request)
        hand = Hand(worker)
        assert len(await hand.run([1, 2, 3], 5, blocks=[1, 2])) == 5
        new = NewRequest(request_id="long", slot=0, num_prompt_tokens=9, sampling=GREEDY)
        rows = [StepRow(0, 9, 0, [1, 2, 3])]
        output = await hand.step(rows, new=[new], tokens=list(range(9)))
        assert [refusal.request_id for refusal in output.refusals] == ["long"]
        assert "8" in output.refusals[0].message


async def test_b32_one_trace_file_however_often_it_is_stopped(
    tiny_model: Path, tmp_path: Path
) -> None:
    config = tiny_config(tiny_model, trace_dir=tmp_path / "traces")
    async with real_worker(config) as worker:
        hand = Hand(worker)
        assert not (await worker.ask(m.StopTrace())).changed
        assert (await worker.ask(m.StartTrace())).changed
        assert not (await worker.ask(m.StartTrace())).changed
        await hand.run([1, 2, 3], 2)
        stops = await asyncio.gather(worker.ask(m.StopTrace()), worker.ask(m.StopTrace()))
        assert sorted(stop.changed for stop in stops) == [False, True]
        assert not (await worker.ask(m.StopTrace())).changed
        files = list((tmp_path / "traces").iterdir())
        assert [str(file) for file in files] == [stop.path for stop in stops if stop.changed]
        assert files[0].stat().st_size > 0
        await worker.ask(m.StartTrace())
        await hand.run([1, 2, 3], 2)
    assert len(list((tmp_path / "traces").iterdir())) == 2  # shutdown wrote the running one once


async def test_b32_a_trace_that_is_not_configured_is_refused(tiny_model: Path) -> None:
    async with real_worker(tiny_config(tiny_model)) as worker:
        for request in (m.StartTrace(), m.StopTrace()):
            with pytest.raises(InvalidRequest, match="trace_dir"):
                await worker.ask(request)
        assert worker.state is State.SERVING
