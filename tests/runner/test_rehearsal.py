from __future__ import annotations

import pytest
import torch

from gpuworker.config import LimitsConfig
from gpuworker.errors import InvalidRequest, OutOfDeviceMemory
from gpuworker.runner.params import Feature, features_of
from gpuworker.runner.rehearsal import sampler_shapes
from gpuworker.step import SamplingParams
from runner_state import snapshot
from runner_toys import (
    HEAD,
    LAYERS,
    VOCAB,
    ToyDecoder,
    ToyScheduler,
    generate_alone,
    make_cache,
    make_runner,
)

UNSEEDED = SamplingParams(temperature=0.9, presence_penalty=0.3)


def test_profile_run_is_the_largest_batch_with_the_longest_chunk() -> None:
    decoder = ToyDecoder()
    rows: list[int] = []
    runner = make_runner(
        decoder, max_num_seqs=3, max_num_batched_tokens=40, max_model_len=30, block_size=4
    )
    runner.unbind_kv_cache()
    logits = decoder.logits

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(hidden.shape[0])
        return logits(hidden)

    decoder.logits = counted  # type: ignore[method-assign]
    num_bytes = runner.profile_run()
    batch = decoder.batches[0]
    assert batch.query_lens == (30, 5, 5)
    assert batch.seq_lens == (30, 5, 5)
    assert set(rows) == {3}
    # 8 blocks and the null block, keys and values; both layers share them.
    assert num_bytes == 9 * 4 * HEAD * 8 * 2
    assert runner.num_requests == 0


def test_profile_run_ends_the_longest_sequence_when_a_step_holds_less() -> None:
    decoder = ToyDecoder()
    runner = make_runner(decoder, max_num_seqs=2, max_num_batched_tokens=10, max_model_len=50)
    runner.profile_run()
    assert decoder.batches[0].query_lens == (9, 1)
    assert decoder.batches[0].seq_lens == (50, 1)


def test_profile_run_of_short_sequences_fills_every_request() -> None:
    decoder = ToyDecoder()
    runner = make_runner(decoder, max_num_seqs=3, max_num_batched_tokens=64, max_model_len=5)
    runner.profile_run()
    assert decoder.batches[0].query_lens == (5, 5, 5)


@pytest.mark.parametrize("num_tokens", [1, 4, 6, 64])
def test_dummy_run_writes_the_null_block_only(num_tokens: int) -> None:
    decoder = ToyDecoder()
    runner = make_runner(decoder)
    cache = make_cache(32, 4)
    runner.bind_kv_cache(cache, 32)
    before = snapshot(runner)
    runner.dummy_run(num_tokens)
    assert sum(decoder.batches[0].query_lens) == num_tokens
    assert len(decoder.batches[0].query_lens) == min(num_tokens, 4)
    for layer in cache:
        assert bool(layer.k[0].any())
        assert not bool(layer.k[1:].any())
        assert not bool(layer.v[1:].any())
    assert snapshot(runner) == before


@pytest.mark.parametrize("num_tokens", [0, 65])
def test_dummy_run_beyond_the_largest_step_is_refused(num_tokens: int) -> None:
    with pytest.raises(InvalidRequest, match=rf"{num_tokens} tokens is outside \[1, 64\]"):
        make_runner().dummy_run(num_tokens)


def test_dummy_run_between_steps_changes_no_token() -> None:
    scheduler = ToyScheduler(make_runner())
    scheduler.add("x", [1, 2, 3], SamplingParams(temperature=0.0))
    for _ in range(6):
        scheduler.runner.dummy_run(7)
        scheduler.step()
    expected = generate_alone([1, 2, 3], SamplingParams(temperature=0.0), 6)
    assert scheduler.live["x"].output == expected


def test_warm_up_runs_prefill_and_decode_and_leaves_no_trace() -> None:
    decoder = ToyDecoder()
    runner = make_runner(decoder)
    cache = make_cache(32, 4)
    runner.bind_kv_cache(cache, 32)
    before = snapshot(runner)
    torch_state = torch.get_rng_state()
    assert runner.warm_up() >= 4
    shapes = [batch.query_lens for batch in decoder.batches]
    assert (61, 1, 1, 1) in shapes
    assert {(1,), (1, 1), (1, 1, 1, 1)} <= set(shapes)
    assert snapshot(runner) == before
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert not any(bool(layer.k[1:].any()) for layer in cache)
    scheduler = ToyScheduler(runner)
    scheduler.add("alone", [4, 5], UNSEEDED)
    assert scheduler.generate("alone", 6) == generate_alone([4, 5], UNSEEDED, 6)


def test_warm_up_uses_every_feature_of_the_sampler() -> None:
    used = Feature(0)
    for params in sampler_shapes(LimitsConfig()):
        used |= features_of(params, VOCAB)
    assert used == ~Feature(0)


def test_lack_of_memory_in_a_profile_run_has_its_own_error() -> None:
    decoder = ToyDecoder()
    decoder.fail_with = RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")
    runner = make_runner(decoder)
    with pytest.raises(OutOfDeviceMemory, match="profile run"):
        runner.profile_run()


def test_layers_of_the_toy_share_one_kind() -> None:
    assert len(set(LAYERS)) == 1
