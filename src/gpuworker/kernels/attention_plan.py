"""Layer 1. How the requests of a step are grouped for dense attention.

Dense attention wants keys as one [rows, keys] rectangle. Decode rows are put together, in order
of length, into groups whose keys fit a core's cache, and their keys are gathered by token. A
longer query is a group of its own, in pieces so that masks stay small. Where the keys of a
group lie one after the other in the cache, they are viewed instead of gathered.

A plan depends on the step and the window, not on the layer: it is made once per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from gpuworker.kernels.batch import AttentionBatch

__all__ = ["AttentionPlan", "Group", "plan_attention"]

_Int64Array = npt.NDArray[np.int64]

# Keys gathered at a time. What is gathered is read again at once, so it should still be in
# the second-level cache; measured best between 0.5 and 2 MiB on a machine with 2 MiB per core.
_GROUP_BYTES = 1 << 20
_QUERY_PIECE = 256


@dataclass(frozen=True, slots=True)
class Group:
    """Attention of B rows with Q queries each over K keys each.

    The key slots of a row never belong to another request: padding repeats its own last token.
    """

    tokens: slice | torch.Tensor
    """Which of the step's tokens are the B * Q queries: a range, or int64 indices."""
    num_rows: int
    num_queries: int
    num_keys: int
    slots: slice | torch.Tensor
    """Cache slots of the B * K keys: a range, or int64 indices."""
    mask: torch.Tensor | None
    """Added to scores [B, heads, Q, K], broadcast: 0 or -inf; None where nothing is masked."""
    is_causal: bool
    """Query i sees keys 0 to i; then Q = K and mask is None."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The groups of a step; each token is in exactly one of them."""

    groups: tuple[Group, ...]
    num_tokens: int


def plan_attention(
    batch: AttentionBatch, *, sliding_window: int | None, token_bytes: int, dtype: torch.dtype
) -> AttentionPlan:
    """Plan a step; token_bytes is the size of one token's keys, dtype that of the masks."""
    return _Planner(batch, sliding_window, token_bytes, dtype).plan()


class _Planner:
    def __init__(
        self, batch: AttentionBatch, window: int | None, token_bytes: int, dtype: torch.dtype
    ) -> None:
        self._block_size = batch.block_size
        self._table = batch.block_table.cpu().numpy().astype(np.int64)
        self._device = batch.block_table.device
        self._query_lens = batch.query_lens
        self._seq_lens = batch.seq_lens
        self._window = window
        self._token_bytes = token_bytes
        self._dtype = dtype

    def plan(self) -> AttentionPlan:
        groups: list[Group] = []
        decode_rows: list[int] = []
        starts: list[int] = []
        start = 0
        for row, query_len in enumerate(self._query_lens):
            starts.append(start)
            if query_len == 1:
                decode_rows.append(row)
            else:
                groups.extend(self._long_query(row, start))
            start += query_len
        first_tokens = np.asarray(starts, dtype=np.int64)
        for rows in self._decode_groups(decode_rows):
            groups.append(self._decode(rows, first_tokens[rows]))
        return AttentionPlan(tuple(groups), start)

    def _decode_groups(self, rows: list[int]) -> list[_Int64Array]:
        """Cut the decode rows, shortest first, where the gathered keys would get too large."""
        lengths = [self._num_keys(self._seq_lens[row]) for row in rows]
        order = sorted(range(len(rows)), key=lengths.__getitem__)
        cuts = [0]
        for count, index in enumerate(order):
            width = count + 1 - cuts[-1]
            if width > 1 and width * lengths[index] * self._token_bytes > _GROUP_BYTES:
                cuts.append(count)
        cuts.append(len(order))
        ordered = np.asarray([rows[index] for index in order], dtype=np.int64)
        return [ordered[a:b] for a, b in pairwise(cuts) if b > a]

    def _num_keys(self, seq_len: int) -> int:
        return seq_len if self._window is None else min(seq_len, self._window)

    def _decode(self, rows: _Int64Array, tokens: _Int64Array) -> Group:
        ends = np.asarray([self._seq_lens[row] for row in rows], dtype=np.int64)
        begins = ends - [self._num_keys(int(end)) for end in ends]
        lengths = ends - begins
        num_keys = int(lengths.max())
        steps = np.arange(num_keys)
        mask = None
        if int(lengths.min()) < num_keys:
            bias = np.where(steps < lengths[:, None], 0.0, -np.inf).astype(np.float32)
            mask = self._tensor(bias).to(self._dtype)[:, None, None]
        positions = np.minimum(begins[:, None] + steps, ends[:, None] - 1)
        return Group(
            tokens=self._range(tokens),
            num_rows=len(rows),
            num_queries=1,
            num_keys=num_keys,
            slots=self._slots(rows[:, None], positions),
            mask=mask,
            is_causal=False,
        )

    def _long_query(self, row: int, start: int) -> list[Group]:
        query_len, seq_len = self._query_lens[row], self._seq_lens[row]
        window = self._window
        context = seq_len - query_len
        if context == 0 and (window is None or seq_len <= window):
            return [self._piece(row, start, 0, seq_len, 0, seq_len, None, True)]
        groups = []
        for offset in range(0, query_len, _QUERY_PIECE):
            begin = context + offset
            end = min(begin + _QUERY_PIECE, seq_len)
            first_key = 0 if window is None else max(begin - window + 1, 0)
            keys = torch.arange(first_key, end, device=self._device)
            queries = torch.arange(begin, end, device=self._device)[:, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            mask.masked_fill_(hidden, float("-inf"))
            groups.append(
                self._piece(row, start + offset, begin, end, first_key, end, mask[None, None])
            )
        return groups

    def _piece(
        self,
        row: int,
        token: int,
        begin: int,
        end: int,
        first_key: int,
        end_key: int,
        mask: torch.Tensor | None,
        is_causal: bool = False,
    ) -> Group:
        return Group(
            tokens=slice(token, token + end - begin),
            num_rows=1,
            num_queries=end - begin,
            num_keys=end_key - first_key,
            slots=self._slots(np.int64(row), np.arange(first_key, end_key)),
            mask=mask,
            is_causal=is_causal,
        )

    def _slots(self, rows: _Int64Array | np.int64, positions: _Int64Array) -> slice | torch.Tensor:
        blocks = self._table[rows, positions // self._block_size]
        slots = (blocks * self._block_size + positions % self._block_size).reshape(-1)
        return self._range(slots)

    def _range(self, indices: _Int64Array) -> slice | torch.Tensor:
        """Return consecutive indices as a slice."""
        first, last = int(indices[0]), int(indices[-1])
        if last - first == indices.size - 1 and bool((np.diff(indices) == 1).all()):
            return slice(first, last + 1)
        return self._tensor(indices)

    def _tensor(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
