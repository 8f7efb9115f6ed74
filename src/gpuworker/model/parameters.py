"""Layer 1. What a model's parameters are and which checkpoint tensors fill them.

The decoder merges what is multiplied together (q, k and v; gate and up), checkpoints usually do
not. A ParameterSpec therefore lists *variants*: alternative sets of checkpoint tensors, each of
which fills the parameter completely. The loader takes the first variant that is all present.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["ParameterSpec", "Region", "Source"]

Region = tuple[tuple[int, int], ...]
"""Half-open interval per axis."""


@dataclass(frozen=True, slots=True)
class Source:
    """A part of a checkpoint tensor and where it goes."""

    name: str
    """Tensor name in the checkpoint."""
    shape: tuple[int, ...]
    """Full shape that the checkpoint tensor must have."""
    source: Region
    """Part of the checkpoint tensor that is taken."""
    target: Region
    """Part of the parameter that it fills; same extents as source."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One contiguous parameter of the decoder."""

    name: str
    """Our name, for example layers.0.attention.qkv.weight."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    variants: tuple[tuple[Source, ...], ...]

    @property
    def num_elements(self) -> int:
        """Product of the shape."""
        return torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Size in bytes, without alignment."""
        return self.num_elements * self.dtype.itemsize
