from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.runner.kv_cache import (
    ALIGNMENT_BYTES,
    KVLayer,
    bind,
    block_bytes,
    kv_cache_bytes,
    num_blocks_in,
)

LAYERS = (KVLayer(3, 5, torch.bfloat16), KVLayer(1, 8, torch.float32))


def test_block_bytes_count_keys_and_values_of_every_layer() -> None:
    assert LAYERS[0].block_bytes(7) == 2 * 7 * 3 * 5 * 2
    assert block_bytes(LAYERS, 7) == 2 * 7 * 3 * 5 * 2 + 2 * 7 * 1 * 8 * 4


@pytest.mark.parametrize("num_blocks", [1, 3, 9])
def test_caches_are_aligned_disjoint_and_inside_the_range(num_blocks: int) -> None:
    size = kv_cache_bytes(LAYERS, num_blocks, 7)
    base = torch.zeros(size, dtype=torch.uint8)
    offsets: list[int] = []

    def view(offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        offsets.append(offset)
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return base[offset : offset + num_bytes].view(dtype).view(shape)

    caches = bind(view, LAYERS, num_blocks, 7)

    assert offsets == sorted(offsets)
    assert all(offset % ALIGNMENT_BYTES == 0 for offset in offsets)
    tensors = [tensor for cache in caches for tensor in cache]
    for mark, tensor in enumerate(tensors, start=1):
        tensor.fill_(mark)
    for mark, tensor in enumerate(tensors, start=1):
        assert bool((tensor == mark).all())
    assert [tuple(cache.k.shape) for cache in caches] == [
        (num_blocks, 7, 3, 5),
        (num_blocks, 7, 1, 8),
    ]
    assert [cache.v.dtype for cache in caches] == [torch.bfloat16, torch.float32]


@given(num_bytes=st.integers(0, 100_000), block_size=st.integers(1, 40))
def test_num_blocks_in_is_the_greatest_that_fits(num_bytes: int, block_size: int) -> None:
    num_blocks = num_blocks_in(LAYERS, num_bytes, block_size)
    assert num_blocks == 0 or kv_cache_bytes(LAYERS, num_blocks, block_size) <= num_bytes
    assert kv_cache_bytes(LAYERS, num_blocks + 1, block_size) > num_bytes
