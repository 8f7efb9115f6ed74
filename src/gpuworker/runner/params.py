"""Layer 1. What is a valid SamplingParams, and what a slot keeps of it."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

from gpuworker.errors import InvalidRequest
from gpuworker.step import SamplingParams

__all__ = ["GREEDY_BELOW", "Feature", "check_sampling", "features_of", "normalized_top_k"]

GREEDY_BELOW = 1e-5
_FLOAT32_MAX = 3.4028234663852886e38


class Feature(enum.IntFlag):
    """What a request needs beyond the argmax of its raw logits."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    ALLOWED = 16
    FORBIDDEN = 32
    """Bad sequences, or stop tokens before min_tokens."""
    BIAS = 64
    PENALTIES = 128
    LOGPROBS = 256


def normalized_top_k(params: SamplingParams, vocab_size: int) -> int:
    """Return k, or 0 where top_k keeps the whole vocabulary."""
    return params.top_k if 0 < params.top_k < vocab_size else 0


def features_of(params: SamplingParams, vocab_size: int) -> Feature:
    """Return the features that change a token or report about it.

    top_k = 1 and a temperature below GREEDY_BELOW are the argmax: the filters that only shrink
    the choice around the best token are dropped with them.
    """
    top_k = normalized_top_k(params, vocab_size)
    used = Feature(0)
    if params.temperature >= GREEDY_BELOW and top_k != 1:
        used |= Feature.RANDOM
        used |= Feature.TOP_K if top_k else Feature(0)
        used |= Feature.TOP_P if params.top_p < 1.0 else Feature(0)
        used |= Feature.MIN_P if params.min_p > 0.0 else Feature(0)
    if params.allowed_token_ids:
        used |= Feature.ALLOWED
    if params.bad_token_ids or (params.min_tokens and params.stop_token_ids):
        used |= Feature.FORBIDDEN
    if params.logit_bias:
        used |= Feature.BIAS
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        used |= Feature.PENALTIES
    if params.logprobs is not None:
        used |= Feature.LOGPROBS
    return used


def check_sampling(params: SamplingParams, *, vocab_size: int, max_logprobs: int) -> None:
    """Raise InvalidRequest that names the first field out of its range, value and limit."""
    _require_range("temperature", params.temperature, 0.0, _FLOAT32_MAX)
    _require(params.top_k >= -1, f"top_k is {params.top_k}; use -1 or 0 for off, or at least 1")
    _require(0.0 < params.top_p <= 1.0, f"top_p is {params.top_p}; it must be in (0, 1]")
    _require_range("min_p", params.min_p, 0.0, 1.0)
    if params.seed is not None:
        _require(0 <= params.seed < 2**64, f"seed is {params.seed}; it must be in [0, 2^64)")
    penalty = params.repetition_penalty
    _require(
        0.0 < penalty <= _FLOAT32_MAX,
        f"repetition_penalty is {penalty}; it must be a positive number",
    )
    _require_range("presence_penalty", params.presence_penalty, -2.0, 2.0)
    _require_range("frequency_penalty", params.frequency_penalty, -2.0, 2.0)
    _require(params.min_tokens >= 0, f"min_tokens is {params.min_tokens}; it must be at least 0")
    if params.logprobs is not None:
        _require(
            0 <= params.logprobs <= max_logprobs,
            f"logprobs is {params.logprobs}; it must be in [0, max_logprobs={max_logprobs}]",
        )
    for value in params.logit_bias.values():
        _require(
            math.isfinite(value) and abs(value) <= _FLOAT32_MAX,
            f"logit_bias holds {value}; a bias must be finite in float32",
        )
    _require(
        all(params.bad_token_ids), "bad_token_ids holds an empty sequence; leave it out instead"
    )
    _require_ids("logit_bias", params.logit_bias, vocab_size)
    _require_ids("allowed_token_ids", params.allowed_token_ids, vocab_size)
    _require_ids("stop_token_ids", params.stop_token_ids, vocab_size)
    for sequence in params.bad_token_ids:
        _require_ids("bad_token_ids", sequence, vocab_size)


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InvalidRequest(message)


def _require_range(name: str, value: float, low: float, high: float) -> None:
    # NaN compares false and is refused.
    _require(low <= value <= high, f"{name} is {value}; it must be in [{low:g}, {high:g}]")


def _require_ids(name: str, ids: Iterable[int], vocab_size: int) -> None:
    for token_id in ids:
        _require(
            0 <= token_id < vocab_size,
            f"{name} holds token id {token_id}; the vocabulary is [0, {vocab_size})",
        )
