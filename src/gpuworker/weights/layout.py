"""Layer 1. Where each parameter lies in the weight arena."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from gpuworker.model.parameters import ParameterSpec

__all__ = ["ALIGNMENT_BYTES", "Placement", "ViewSource", "WeightLayout"]

ALIGNMENT_BYTES = 256
"""Start of every parameter; enough for any vector unit and any device's copy engine."""


class ViewSource(Protocol):
    """What parameters are views of; a device.arena.Arena is one."""

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over the given bytes, without a copy."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One parameter's bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All parameters, one after the other in the order of their specs."""

    placements: tuple[Placement, ...]
    total_bytes: int
    """Size of the arena part that they need, a multiple of the alignment."""
    digest: str
    """SHA-256 over names, shapes, dtypes and offsets: equal digests mean equal bytes."""

    @classmethod
    def of(cls, specs: Sequence[ParameterSpec]) -> WeightLayout:
        """Place parameters without gaps beyond alignment; ValueError for a name given twice."""
        placements: list[Placement] = []
        seen: set[str] = set()
        offset_bytes = 0
        for spec in specs:
            if spec.name in seen:
                raise ValueError(f"parameter {spec.name} is specified twice")
            seen.add(spec.name)
            placements.append(Placement(spec.name, spec.shape, spec.dtype, offset_bytes))
            offset_bytes += -(-spec.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return cls(tuple(placements), offset_bytes, _digest(placements))

    def bind(self, arena: ViewSource) -> dict[str, torch.Tensor]:
        """Return the parameters as views of an arena, by name; it need not be mapped yet."""
        return {
            place.name: arena.view(place.offset_bytes, place.shape, place.dtype)
            for place in self.placements
        }


def _digest(placements: Sequence[Placement]) -> str:
    text = "\n".join(
        f"{place.name} {list(place.shape)} {place.dtype} {place.offset_bytes}"
        for place in placements
    )
    return hashlib.sha256(text.encode()).hexdigest()
