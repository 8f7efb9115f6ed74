"""Layer 1. From the logits of a step to its tokens: which formula for which row, in which order.

    raw logits -> log-probabilities are kept -> allowed ids -> bad sequences and early stop
    tokens -> logit bias -> penalties -> greedy rows: argmax
    -> temperature -> min_p -> top_k -> top_p -> draw

A row is only touched by what its own request asks for, so a batch gives each request the
token that it would get alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.kernels import sampling as ops
from gpuworker.kernels.noise import noise_keys, vocabulary_hash
from gpuworker.runner.logprobs import RawLogits
from gpuworker.runner.params import Feature
from gpuworker.runner.requests import RequestTable
from gpuworker.runner.shaping import SeenTokens, Shaping
from gpuworker.step import Int32Array, Logprobs

__all__ = ["Sampled", "Sampler"]

# The nucleus is looked for among this many best tokens before the vocabulary is sorted. On a CPU
# that is a tenth of the time, and a nucleus is rarely larger.
_NUCLEUS_CANDIDATES = 256

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token per row."""

    tokens: NDArray[np.int64]
    logprobs: Logprobs | None


class Sampler:
    """Chooses the next token of requests in a table; keeps nothing between calls but constants."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._hashes = vocabulary_hash(vocab_size, device)

    def sample(self, logits: torch.Tensor, table: RequestTable, slots: Int32Array) -> Sampled:
        """Choose a token for each of the requests slots [N] from float32 logits [N, vocab].

        The logits are overwritten. The table is only read.
        """
        features = table.features[slots]
        active = int(np.bitwise_or.reduce(features))
        if not active:
            return Sampled(ops.argmax(logits).cpu().numpy(), None)
        raw = RawLogits(logits, table.num_logprobs[slots]) if active & Feature.LOGPROBS else None
        self._shape(logits, table, slots, features)
        tokens = ops.argmax(logits).cpu().numpy()
        if active & Feature.RANDOM:
            random_rows = np.flatnonzero(features & Feature.RANDOM)
            tokens[random_rows] = self._draw(logits, random_rows, table, slots)
        return Sampled(tokens, raw.report(tokens) if raw is not None else None)

    # -- logit edits

    def _shape(
        self, logits: torch.Tensor, table: RequestTable, slots: Int32Array, features: Int32Array
    ) -> None:
        """Apply what changes the best token, over all rows at once where the edit is sparse."""

        def rows_with(feature: Feature) -> list[tuple[int, Shaping]]:
            found = []
            for row in np.flatnonzero(features & feature).tolist():
                shaping = table.request(int(slots[row])).shaping
                assert shaping is not None
                found.append((row, shaping))
            return found

        for row, shaping in rows_with(Feature.ALLOWED):
            ops.keep_only_(logits[row], self._tensor(shaping.allowed))
        forbidden = [
            (row, shaping.forbidden(table.output(int(slots[row])), self._vocab_size))
            for row, shaping in rows_with(Feature.FORBIDDEN)
        ]
        if any(ids for _, ids in forbidden):
            rows = np.repeat([row for row, _ in forbidden], [len(ids) for _, ids in forbidden])
            flat = np.asarray([token for _, ids in forbidden for token in ids], np.int64)
            ops.forbid_(logits, self._tensor(rows), self._tensor(flat))
        if biased := rows_with(Feature.BIAS):
            ops.add_bias_(
                logits,
                self._tensor(np.repeat([r for r, _ in biased], [s.bias.size for _, s in biased])),
                self._tensor(np.concatenate([shaping.bias_ids for _, shaping in biased])),
                self._tensor(np.concatenate([shaping.bias for _, shaping in biased])),
            )
        if penalized := rows_with(Feature.PENALTIES):
            self._penalize(logits, penalized)

    def _penalize(self, logits: torch.Tensor, penalized: list[tuple[int, Shaping]]) -> None:
        seen: list[SeenTokens] = []
        for _, shaping in penalized:
            assert shaping.seen is not None
            seen.append(shaping.seen)
        sizes = [tokens.ids.size for tokens in seen]
        params = [shaping.params for _, shaping in penalized]

        def per_token(values: list[float]) -> torch.Tensor:
            return self._tensor(np.repeat(np.asarray(values, np.float32), sizes))

        ops.apply_penalties_(
            logits,
            self._tensor(np.repeat([row for row, _ in penalized], sizes)),
            self._tensor(np.concatenate([tokens.ids for tokens in seen])),
            self._tensor(np.concatenate([tokens.output_counts for tokens in seen])),
            repetition=per_token([p.repetition_penalty for p in params]),
            frequency=per_token([p.frequency_penalty for p in params]),
            presence=per_token([p.presence_penalty for p in params]),
        )

    # -- draws

    def _draw(
        self, logits: torch.Tensor, rows: Rows, table: RequestTable, slots: Int32Array
    ) -> NDArray[np.int64]:
        """Draw tokens for rows, each by the cheapest way that its filters permit."""
        row_slots = slots[rows]
        features = table.features[row_slots]
        num_output = table.num_tokens[row_slots] - table.num_prompt[row_slots]
        keys = noise_keys(table.seed[row_slots], num_output)
        has_top_k = (features & Feature.TOP_K) != 0
        has_top_p = (features & Feature.TOP_P) != 0
        tokens = np.empty(rows.size, np.int64)
        for members, draw in (
            (has_top_k, self._draw_top_k),
            (~has_top_k & has_top_p, self._draw_nucleus),
            (~has_top_k & ~has_top_p, self._draw_plain),
        ):
            group = np.flatnonzero(members)
            if group.size:
                group_logits = logits
                if group.size < logits.shape[0]:
                    group_logits = logits.index_select(0, self._tensor(rows[group]))
                chosen = draw(group_logits, self._tensor(keys[group]), table, row_slots[group])
                tokens[group] = chosen.cpu().numpy()
        return tokens

    def _draw_plain(
        self, logits: torch.Tensor, keys: torch.Tensor, table: RequestTable, slots: Int32Array
    ) -> torch.Tensor:
        return ops.draw(self._scaled(logits, table, slots), self._hashes, keys)

    def _draw_top_k(
        self, logits: torch.Tensor, keys: torch.Tensor, table: RequestTable, slots: Int32Array
    ) -> torch.Tensor:
        values, ids = ops.top_candidates(logits, table.top_k[slots])
        values = self._scaled(values, table, slots)
        top_p = self._tensor(table.top_p[slots])
        values.masked_fill_(~ops.nucleus(values, top_p), float("-inf"))
        return ops.draw_from_candidates(values, ids, self._hashes, keys)

    def _draw_nucleus(
        self, logits: torch.Tensor, keys: torch.Tensor, table: RequestTable, slots: Int32Array
    ) -> torch.Tensor:
        scaled = self._scaled(logits, table, slots)
        top_p = self._tensor(table.top_p[slots])
        total = scaled.exp().sum(dim=-1, dtype=torch.float64)
        width = min(_NUCLEUS_CANDIDATES, self._vocab_size)
        values, ids = ops.top_candidates(scaled, np.full(slots.size, width, np.int32))
        values, ids = values[:, :width], ids[:, :width]
        keep = ops.nucleus(values, top_p, total)
        tokens = ops.draw_from_candidates(
            values.masked_fill(~keep, float("-inf")), ids, self._hashes, keys
        )
        # Where even the last candidate is inside, the nucleus may go on behind it.
        for row in keep[:, -1].nonzero()[:, 0].tolist():
            one = slice(row, row + 1)
            ops.keep_nucleus_(scaled[one], top_p[one], total[one])
            tokens[one] = ops.draw(scaled[one], self._hashes, keys[one])
        return tokens

    def _scaled(self, logits: torch.Tensor, table: RequestTable, slots: Int32Array) -> torch.Tensor:
        scaled = ops.scale_(logits, self._tensor(table.temperature[slots]))
        if (table.min_p[slots] > 0.0).any():
            ops.keep_probable_(scaled, self._tensor(table.min_p[slots]))
        return scaled

    def _tensor(self, array: NDArray[np.generic]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)
