"""Layer 1. Choosing tokens from logits: pure functions of tensors.

Functions with a trailing underscore in torch's manner change their first argument. Candidates
are always ordered by (logit descending, token id ascending); that order decides ties, so
top_k = 1 is argmax.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.kernels.noise import gumbel_noise

__all__ = [
    "add_bias_",
    "apply_penalties_",
    "argmax",
    "draw",
    "draw_from_candidates",
    "forbid_",
    "keep_nucleus_",
    "keep_only_",
    "keep_probable_",
    "nucleus",
    "rank_of",
    "scale_",
    "top_candidates",
]

_LOWEST = torch.finfo(torch.float32).min
# Elements per pass over [N, vocab] on a CPU, so that temporaries stay in the second-level cache.
_CHUNK_ELEMENTS = 1 << 16


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """Return the first index int64 [N] of each row's maximum."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised, torch's is not: a tenth of the time.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def keep_only_(row: torch.Tensor, ids: torch.Tensor) -> None:
    """Set every logit of row [vocab] to -inf except those of ids int64 [K]."""
    kept = row.index_select(0, ids)
    row.fill_(float("-inf")).index_copy_(0, ids, kept)


def forbid_(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> None:
    """Set logits[rows[i], ids[i]] to -inf."""
    logits[rows, ids] = float("-inf")


def add_bias_(
    logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, bias: torch.Tensor
) -> None:
    """Add bias[i] to logits[rows[i], ids[i]]; each (row, id) occurs once."""
    logits[rows, ids] = logits[rows, ids] + bias


def apply_penalties_(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> None:
    """Penalise tokens that were seen; every argument but logits is [M], one entry per token.

    Entry i is token ids[i] of row rows[i], seen in prompt or output and output_counts[i] times
    in the output. A positive logit is divided by repetition, another multiplied by it (Keskar
    et al., 2019); then frequency * count and, for a count above 0, presence are subtracted.
    """
    values = logits[rows, ids]
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * output_counts
    values -= presence * (output_counts > 0)
    # A repetition penalty close to 0 overflows; +inf would turn into NaN further on.
    logits[rows, ids] = values.clamp_(max=-_LOWEST)


def scale_(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Turn float32 [N, K] into (x - max) / temperature [N].

    With the maximum at exactly 0 no temperature overflows: others go to -inf at worst. A row of
    -inf stays one.
    """
    peak = logits.amax(dim=-1, keepdim=True).clamp_(min=_LOWEST)
    return logits.sub_(peak).div_(temperature[:, None])


def keep_probable_(scaled: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Drop tokens with less than min_p [N] times the greatest probability; 0 drops none."""
    return scaled.masked_fill_(scaled < min_p.log()[:, None], float("-inf"))


def top_candidates(logits: torch.Tensor, k: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and ids [N, W >= max(k)] of the k[i] best tokens of row i.

    Entries after the k[i]-th are -inf. Exactly k[i] tokens are chosen: among equal logits the
    lower token ids. 1 <= k[i] <= vocab. The result for a row does not depend on the others.
    """
    vocab_size = logits.shape[-1]
    # One more than needed shows whether the choice at the threshold was a tie.
    width = min(int(k.max()) + 1, vocab_size)
    values, ids = _ordered(*logits.topk(width, dim=-1))
    limits = torch.from_numpy(k).to(logits.device, torch.int64)[:, None]
    if width < vocab_size:
        threshold = values.gather(-1, limits - 1)[:, 0]
        # Equal logits that reach the end of the list: lower ids may have been left out.
        open_ended = (threshold == values[:, -1]) & (threshold > float("-inf"))
        for row in open_ended.nonzero()[:, 0].tolist():
            num_greater = int((values[row] > threshold[row]).sum())
            equal = (logits[row] == threshold[row]).nonzero()[:, 0]
            ids[row, num_greater : int(k[row])] = equal[: int(k[row]) - num_greater]
    beyond = torch.arange(width, device=logits.device) >= limits
    return values.masked_fill_(beyond, float("-inf")), ids


def _ordered(values: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ids, by_id = ids.sort(dim=-1)
    values = values.gather(-1, by_id)
    values, by_value = torch.sort(values, dim=-1, descending=True, stable=True)
    return values, ids.gather(-1, by_value)


def nucleus(
    values: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor | None = None
) -> torch.Tensor:
    """Return which scaled candidates [N, K], best first, form the nucleus of mass top_p [N].

    A candidate stays while the mass of those before it is below top_p * total, so the first one
    always stays. total float64 [N] is the mass of the vocabulary in units of the best token's
    probability; None takes that of the candidates.
    """
    mass = values.double().exp_()
    after = mass.cumsum(dim=-1)
    limit = top_p * (after[:, -1] if total is None else total)
    keep = (after - mass) < limit[:, None]
    keep[:, 0] = True
    return keep


def keep_nucleus_(row: torch.Tensor, top_p: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Drop what is outside the nucleus of scaled logits [1, vocab]; see nucleus.

    For a nucleus of any size. Sorts the values only, which is an order of magnitude cheaper on
    a CPU than sorting token ids with them.
    """
    if row.device.type == "cpu":
        values = torch.from_numpy(np.sort(row.numpy(), axis=-1)[:, ::-1].copy())
    else:
        values = row.sort(dim=-1, descending=True).values
    size = int(nucleus(values, top_p, total).sum())
    threshold = values[0, size - 1]
    greater = row > threshold
    equal = (row[0] == threshold).nonzero()[: size - int(greater.sum()), 0]
    row.masked_fill_(~greater, float("-inf"))[0, equal] = threshold
    return row


def draw_from_candidates(
    values: torch.Tensor, ids: torch.Tensor, hashes: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Draw one id int64 [N] from scaled candidates [N, K]; hashes is vocabulary_hash."""
    scores = gumbel_noise(hashes[ids], keys).add_(values)
    return ids.gather(-1, scores.argmax(dim=-1, keepdim=True))[:, 0]


def draw(scaled: torch.Tensor, hashes: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Draw one id int64 [N] from scaled logits [N, vocab] of the whole vocabulary."""
    num_rows, vocab_size = scaled.shape
    rows = num_rows
    if scaled.device.type == "cpu":
        rows = max(1, _CHUNK_ELEMENTS // vocab_size)
    chunks = [
        argmax(gumbel_noise(hashes, keys[start : start + rows]).add_(scaled[start : start + rows]))
        for start in range(0, num_rows, rows)
    ]
    return torch.cat(chunks)


def rank_of(logits: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return 1 + the number of logits of each row that are greater than values [N]."""
    return (logits > values[:, None]).sum(dim=-1).add_(1)
