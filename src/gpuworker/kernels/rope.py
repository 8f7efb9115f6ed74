"""Layer 1. Rotary position embedding of queries and keys."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Rotation", "apply_rope"]


class Rotation(NamedTuple):
    """Cosines and sines of T tokens, for rotating pairs (i, i + rotary_dim / 2)."""

    cos: torch.Tensor
    """[T, 1, rotary_dim]."""
    signed_sin: torch.Tensor
    """[T, 1, rotary_dim], the first half negated."""


def apply_rope(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate the leading rotary_dim elements of each head of x [T, heads, head_size].

    Returns a new contiguous tensor; elements beyond rotary_dim are passed through.
    """
    rotary_dim = rotation.cos.shape[-1]
    if rotary_dim == x.shape[-1]:
        return _rotate(x, rotation, rotary_dim)
    rotated = _rotate(x[..., :rotary_dim], rotation, rotary_dim)
    return torch.cat((rotated, x[..., rotary_dim:]), dim=-1)


def _rotate(x: torch.Tensor, rotation: Rotation, rotary_dim: int) -> torch.Tensor:
    # Rolling by half swaps the halves; the sign of the swap is in signed_sin.
    swapped = torch.roll(x, rotary_dim // 2, -1)
    return (x * rotation.cos).addcmul_(swapped, rotation.signed_sin)
