"""Layer 1. How one request changes its logits before a token is chosen.

Everything that does not depend on the tokens is prepared once, on admission; what depends on
them is kept up to date token by token.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuworker.runner.params import Feature
from gpuworker.step import Int32Array, SamplingParams

__all__ = ["SeenTokens", "Shaping"]

Int64Array = NDArray[np.int64]


class SeenTokens:
    """The distinct tokens of a request and how often each is in the output; for penalties."""

    def __init__(self, prompt: Int32Array, output: Int32Array) -> None:
        distinct = np.unique(np.concatenate([prompt, output]))
        self._index = {token: index for index, token in enumerate(distinct.tolist())}
        self._ids = distinct.astype(np.int64)
        self._counts = np.zeros(distinct.size, np.float32)
        self._size = distinct.size
        for token in output.tolist():
            self._counts[self._index[token]] += 1.0

    @property
    def ids(self) -> Int64Array:
        """int64 [M] distinct token ids of prompt and output."""
        return self._ids[: self._size]

    @property
    def output_counts(self) -> NDArray[np.float32]:
        """float32 [M] occurrences in the output."""
        return self._counts[: self._size]

    def append(self, token: int) -> None:
        """Count one more output token."""
        index = self._index.setdefault(token, self._size)
        if index == self._size:
            if index == self._ids.size:
                self._ids = np.concatenate([self._ids, np.zeros(index + 16, np.int64)])
                self._counts = np.concatenate([self._counts, np.zeros(index + 16, np.float32)])
            self._ids[index] = token
            self._counts[index] = 0.0
            self._size += 1
        self._counts[index] += 1.0


class Shaping:
    """The logit edits of one request.

    params were checked; prompt and output are the tokens known on admission.
    """

    def __init__(
        self, params: SamplingParams, features: Feature, prompt: Int32Array, output: Int32Array
    ) -> None:
        self.params = params
        self.allowed = np.unique(np.asarray(params.allowed_token_ids, np.int64))
        self.bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self.bias = np.fromiter(params.logit_bias.values(), np.float32)
        self.seen = SeenTokens(prompt, output) if features & Feature.PENALTIES else None
        self._bad = [(np.asarray(ids[:-1], np.int32), ids[-1]) for ids in params.bad_token_ids]

    def forbidden(self, output: Int32Array, vocab_size: int) -> list[int]:
        """Return the ids that may not follow output, in ascending order.

        They are the last ids of bad sequences whose beginning ends the output, and the stop
        tokens before min_tokens. If they leave no token that is allowed, none is forbidden: a
        request that contradicts itself still gets an allowed token.
        """
        forbidden = {
            last
            for prefix, last in self._bad
            if prefix.size <= output.size
            and np.array_equal(output[output.size - prefix.size :], prefix)
        }
        if output.size < self.params.min_tokens:
            forbidden.update(self.params.stop_token_ids)
        if self.allowed.size:
            leaves_none = forbidden.issuperset(self.allowed.tolist())
        else:
            leaves_none = len(forbidden) == vocab_size
        return [] if leaves_none else sorted(forbidden)
