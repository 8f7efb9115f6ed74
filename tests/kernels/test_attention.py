"""Paged attention back ends against the float32 reference, on random layouts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.kernels import attention_plan
from gpuworker.kernels.attention import kv_cache_shape, paged_attention, write_kv
from gpuworker.kernels.batch import AttentionBatch, LayerKV

torch.set_num_threads(1)


def _case(
    requests: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (6, 2),
    head_size: int = 16,
    block_size: int = 4,
    scattered: bool = True,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> tuple[torch.Tensor, LayerKV, AttentionBatch]:
    """Build requests of (context, query) lengths; cache slots that hold no token are NaN."""
    generator = torch.Generator().manual_seed(seed)
    seq_lens = [context + query for context, query in requests]
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 1
    order = torch.arange(1, num_blocks)
    if scattered:
        order = order[torch.randperm(len(order), generator=generator)]
    table = torch.zeros(len(requests), max(counts), dtype=torch.int32)
    kv = LayerKV(
        *(
            torch.full(
                kv_cache_shape(num_blocks, block_size, heads[1], head_size),
                float("nan"),
                dtype=dtype,
            )
            for _ in range(2)
        )
    )
    start = 0
    query_slots: list[int] = []
    for row, ((context, _), seq_len, count) in enumerate(
        zip(requests, seq_lens, counts, strict=True)
    ):
        table[row, :count] = order[start : start + count]
        start += count
        slots = [
            int(table[row, p // block_size]) * block_size + p % block_size for p in range(seq_len)
        ]
        query_slots += slots[context:]
        if context:
            past = AttentionBatch((), (), table, torch.tensor(slots[:context]), block_size)
            shape = (context, heads[1], head_size)
            write_kv(kv, *(torch.randn(shape, generator=generator).to(dtype) for _ in "kv"), past)
    batch = AttentionBatch(
        query_lens=tuple(query for _, query in requests),
        seq_lens=tuple(seq_lens),
        block_table=table,
        slot_mapping=torch.tensor(query_slots),
        block_size=block_size,
    )
    shape = (len(query_slots), heads[1], head_size)
    write_kv(kv, *(torch.randn(shape, generator=generator).to(dtype) for _ in "kv"), batch)
    q = torch.randn(len(query_slots), heads[0], head_size, generator=generator).to(dtype)
    return q, kv, batch


def _assert_close_to_reference(
    q: torch.Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    *,
    window: int | None = None,
    softcap: float | None = None,
    tolerance: float = 1e-5,
) -> None:
    options = {"scale": 0.3, "sliding_window": window, "softcap": softcap}
    expected = paged_attention(q, kv, batch, backend="reference", **options)
    result = paged_attention(q, kv, batch, backend="sdpa", **options)
    assert result.shape == q.shape
    assert not expected.isnan().any()
    error = (result.float() - expected.float()).norm() / expected.float().norm()
    assert error < tolerance


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.integers(0, 40), st.one_of(st.just(1), st.integers(1, 30))),
        min_size=1,
        max_size=7,
    ),
    heads=st.sampled_from([(6, 2), (4, 4), (4, 1)]),
    block_size=st.sampled_from([1, 4, 16]),
    scattered=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 50)),
    softcap=st.sampled_from([None, 1.5]),
    seed=st.integers(0, 1000),
)
def test_sdpa_equals_reference(
    requests: list[tuple[int, int]],
    heads: tuple[int, int],
    block_size: int,
    scattered: bool,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    q, kv, batch = _case(
        requests, heads=heads, block_size=block_size, scattered=scattered, seed=seed
    )
    _assert_close_to_reference(q, kv, batch, window=window, softcap=softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_sdpa_in_sixteen_bits(dtype: torch.dtype, softcap: float | None) -> None:
    q, kv, batch = _case([(30, 1), (3, 1), (0, 20), (10, 9)], dtype=dtype)
    _assert_close_to_reference(q, kv, batch, softcap=softcap, tolerance=1e-2)


@pytest.mark.parametrize("window", [None, 100, 300])
def test_query_longer_than_a_mask_piece(window: int | None) -> None:
    q, kv, batch = _case([(37, 600), (500, 1)], block_size=16, head_size=8)
    _assert_close_to_reference(q, kv, batch, window=window)


def test_decode_rows_beyond_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention_plan, "_GROUP_BYTES", 4096)
    requests = [(length, 1) for length in (50, 3, 70, 20, 21, 0, 64)]
    q, kv, batch = _case(requests)
    _assert_close_to_reference(q, kv, batch)
    _assert_close_to_reference(q, kv, batch, window=10)


def test_queries_may_be_a_strided_view() -> None:
    q, kv, batch = _case([(9, 1), (4, 6)])
    wide = torch.cat((q, q), dim=1)
    options = {"scale": 0.3, "sliding_window": None, "softcap": None}
    expected = paged_attention(q, kv, batch, backend="auto", **options)
    result = paged_attention(wide[:, : q.shape[1]], kv, batch, backend="auto", **options)
    torch.testing.assert_close(result, expected)


def test_write_kv_fills_only_its_slots() -> None:
    _, kv, batch = _case([(0, 5), (2, 1)], block_size=4)
    written = (~kv.k.isnan()).flatten(0, 1).all(dim=(1, 2))
    assert int(written.sum()) == sum(batch.seq_lens)
    assert bool(written[batch.slot_mapping].all())
