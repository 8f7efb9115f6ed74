"""Layer 1. How the paged KV cache is cut out of one range of memory.

The cache of a layer is two tensors, keys and values, of the shape that attention wants. They
lie one after the other in one contiguous range, each at a multiple of ALIGNMENT_BYTES.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpuworker.kernels.attention import kv_cache_shape
from gpuworker.kernels.batch import LayerKV

__all__ = [
    "ALIGNMENT_BYTES",
    "NULL_BLOCK",
    "KVLayer",
    "ViewFactory",
    "bind",
    "block_bytes",
    "kv_cache_bytes",
    "num_blocks_in",
]

ALIGNMENT_BYTES = 256
NULL_BLOCK = 0
"""The block of no request: dummy tokens are written there, and no step may name it."""

ViewFactory = Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]
"""(offset_bytes, shape, dtype) -> view of the range that the cache is laid over."""


@dataclass(frozen=True, slots=True)
class KVLayer:
    """What one layer keeps per token: num_kv_heads keys and as many values of head_size."""

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def block_bytes(self, block_size: int) -> int:
        """Return the bytes of one block: keys and values of block_size tokens."""
        return 2 * self._tensor_bytes(1, block_size)

    def _tensor_bytes(self, num_blocks: int, block_size: int) -> int:
        shape = kv_cache_shape(num_blocks, block_size, self.num_kv_heads, self.head_size)
        return torch.Size(shape).numel() * self.dtype.itemsize

    def aligned_tensor_bytes(self, num_blocks: int, block_size: int) -> int:
        """Return what the keys, or the values, of num_blocks occupy in the range."""
        size = self._tensor_bytes(num_blocks, block_size)
        return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def block_bytes(layers: Sequence[KVLayer], block_size: int) -> int:
    """Return the bytes of one block over all layers, without alignment."""
    return sum(layer.block_bytes(block_size) for layer in layers)


def kv_cache_bytes(layers: Sequence[KVLayer], num_blocks: int, block_size: int) -> int:
    """Return the bytes of the range that bind needs, alignment included."""
    return sum(2 * layer.aligned_tensor_bytes(num_blocks, block_size) for layer in layers)


def num_blocks_in(layers: Sequence[KVLayer], num_bytes: int, block_size: int) -> int:
    """Return the greatest number of blocks whose kv_cache_bytes fit num_bytes; 0 if none do."""
    num_blocks = max(num_bytes, 0) // block_bytes(layers, block_size)
    while num_blocks > 0 and kv_cache_bytes(layers, num_blocks, block_size) > num_bytes:
        num_blocks -= 1
    return num_blocks


def bind(
    view: ViewFactory, layers: Sequence[KVLayer], num_blocks: int, block_size: int
) -> tuple[LayerKV, ...]:
    """Lay the caches of all layers over one range, from offset 0 to kv_cache_bytes."""
    caches = []
    offset = 0
    for layer in layers:
        shape = kv_cache_shape(num_blocks, block_size, layer.num_kv_heads, layer.head_size)
        stride = layer.aligned_tensor_bytes(num_blocks, block_size)
        keys = view(offset, shape, layer.dtype)
        values = view(offset + stride, shape, layer.dtype)
        caches.append(LayerKV(keys, values))
        offset += 2 * stride
    return tuple(caches)
