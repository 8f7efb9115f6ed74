"""Layer 1. What the runner needs of a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from gpuworker.kernels.batch import AttentionBatch, LayerKV

__all__ = ["DecoderLike"]


class DecoderLike(Protocol):
    """A model that computes the tokens of a step over a paged cache."""

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Fill the cache slots of the step and return its hidden states [T, H].

        input_ids and positions are int64 [T].
        """
        ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 logits [N, vocab] of rows [N, H]: a new tensor, which is overwritten."""
        ...
