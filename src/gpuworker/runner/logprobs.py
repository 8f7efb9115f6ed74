"""Layer 1. Log-probabilities of the sampled tokens, from the raw logits."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.kernels.sampling import rank_of, top_candidates
from gpuworker.step import Int32Array, Logprobs

__all__ = ["RawLogits"]


class RawLogits:
    """The raw logits of the rows that report log-probabilities, kept while others change."""

    def __init__(self, logits: torch.Tensor, num_logprobs: Int32Array) -> None:
        """Copy rows of logits [N, vocab]; num_logprobs [N] is -1 where a row reports nothing."""
        self._num_rows = num_logprobs.size
        self._rows = np.flatnonzero(num_logprobs >= 0)
        self._num_top = np.minimum(num_logprobs[self._rows], logits.shape[-1]).astype(np.int32)
        rows = torch.from_numpy(self._rows).to(logits.device)
        self._logits = logits.index_select(0, rows)

    def report(self, tokens: NDArray[np.int64]) -> Logprobs:
        """Return the log-probabilities of the sampled tokens [N] and of the most likely ones.

        What a row did not ask for has token id -1, value 0 and rank 0. Equally likely tokens
        are in the order of their ids.
        """
        num_columns = 1 + int(self._num_top.max())
        ids = np.full((self._num_rows, num_columns), -1, np.int32)
        values = np.zeros((self._num_rows, num_columns), np.float32)
        ranks = np.zeros(self._num_rows, np.int32)
        chosen = tokens[self._rows]
        index = torch.from_numpy(chosen).to(self._logits.device)
        chosen_logits = self._logits.gather(-1, index[:, None])
        norm = self._logits.logsumexp(dim=-1, keepdim=True)
        ids[self._rows, 0] = chosen
        values[self._rows, 0] = (chosen_logits - norm)[:, 0].cpu().numpy()
        ranks[self._rows] = rank_of(self._logits, chosen_logits[:, 0]).cpu().numpy()
        if num_columns > 1:
            top, top_ids = top_candidates(self._logits, np.maximum(self._num_top, 1))
            asked = np.arange(num_columns - 1) < self._num_top[:, None]
            top_values = (top - norm)[:, : num_columns - 1].cpu().numpy()
            top_tokens = top_ids[:, : num_columns - 1].cpu().numpy()
            ids[self._rows, 1:] = np.where(asked, top_tokens, -1)
            values[self._rows, 1:] = np.where(asked, top_values, 0.0)
        return Logprobs(
            num_columns=num_columns,
            token_ids=ids.astype("<i4").data.cast("B"),
            values=values.astype("<f4").data.cast("B"),
            ranks=ranks.astype("<i4").data.cast("B"),
        )
