"""Layer 1. What the KV cache of a described model looks like."""

from __future__ import annotations

import torch

from gpuworker.messages import KVCacheSpec, KVLayerSpec
from gpuworker.model.description import ModelDescription
from gpuworker.runner.kv_cache import KVLayer, block_bytes

__all__ = ["kv_cache_spec", "kv_layers"]


def kv_layers(description: ModelDescription, dtype: torch.dtype) -> tuple[KVLayer, ...]:
    """Say what each layer keeps per token."""
    layer = KVLayer(description.num_kv_heads, description.head_size, dtype)
    return (layer,) * description.num_layers


def kv_cache_spec(
    description: ModelDescription, dtype: torch.dtype, block_size: int
) -> KVCacheSpec:
    """Describe the cache for a scheduler; sliding layers keep full pages as the others do."""
    layers = kv_layers(description, dtype)
    return KVCacheSpec(
        block_size=block_size,
        dtype=str(dtype).removeprefix("torch."),
        block_bytes=block_bytes(layers, block_size),
        layers=tuple(
            KVLayerSpec(
                layer=index,
                kind="full" if spec.sliding_window is None else "sliding",
                num_kv_heads=layer.num_kv_heads,
                head_size=layer.head_size,
                sliding_window=spec.sliding_window,
                block_bytes=layer.block_bytes(block_size),
            )
            for index, (spec, layer) in enumerate(zip(description.layers, layers, strict=True))
        ),
    )
