"""Layer 5. Whether an answer is the one that was recorded, and the first thing that is not."""

from __future__ import annotations

from typing import Any, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuworker import messages as m
from gpuworker.messages import Failure, Reply
from gpuworker.step import Logprobs, Refusal, unpack_sampled

__all__ = ["LOGPROB_TOLERANCE", "Mismatch", "compare_replies", "decode_reply"]

LOGPROB_TOLERANCE = 1e-3
"""Absolute, in nats. The same machine, threads and versions give the same bits."""

_COMPARED: dict[type[Reply], tuple[str, ...]] = {
    m.ModelLoaded: (
        "architecture",
        "num_parameters",
        "dtype",
        "max_model_len",
        "vocab_size",
        "eos_token_ids",
    ),
    m.KVCacheSpec: ("block_size", "dtype", "block_bytes", "layers"),
    m.MaxModelLenUpdated: ("max_model_len",),
    m.KVCacheAllocated: ("num_blocks", "block_size", "kv_epoch"),
    m.ServingStarted: ("kv_epoch", "max_num_seqs", "max_num_batched_tokens"),
    m.Limits: (
        "max_model_len",
        "vocab_size",
        "eos_token_ids",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_logprobs",
        "block_size",
        "num_blocks",
        "kv_epoch",
        "next_step_id",
        "live_requests",
    ),
    m.StepsResumed: ("next_step_id",),
    m.RequestsDropped: ("num_dropped",),
    m.DummyBatchExecuted: ("num_tokens",),
    m.Asleep: ("level", "kv_epoch"),
    m.PoolsResumed: ("resumed", "asleep", "weights", "kv_epoch"),
    m.Awake: ("resumed", "kv_epoch"),
    m.WeightsReloaded: ("weight_version", "kv_epoch"),
}
"""Fields that do not depend on time or memory; of the others only the type counts."""
_decoder: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(
    Union[tuple({*m.REPLY_OF.values(), Failure})]  # noqa: UP007  # not with |
)


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """The first thing in which two answers differ."""

    what: str
    expected: str
    """As recorded."""
    got: str
    row: int | None = None
    """Of the step, where it is a matter of one row."""


def decode_reply(body: bytes) -> Reply:
    """Decode any reply; raises msgspec.DecodeError."""
    return _decoder.decode(body)


def compare_replies(expected: Reply, got: Reply, *, tolerance: float) -> Mismatch | None:
    """Return the first difference, or None when both say the same.

    Steps: ids, epoch, who was refused and with which code, how many tokens per row and which;
    log-probabilities within the tolerance, and with 0 bit by bit. Failures: their code.
    Everything else: the type, and the fields that depend neither on time nor on the memory of
    the machine.
    """
    if isinstance(expected, Failure) and isinstance(got, Failure) and expected.code == got.code:
        return None
    if type(expected) is not type(got) or isinstance(expected, Failure):
        return Mismatch(what="answer", expected=_summary(expected), got=_summary(got))
    if isinstance(expected, m.StepOutput) and isinstance(got, m.StepOutput):
        return (
            _compare_fields(expected, got, ("step_id", "kv_epoch", "num_rows"))
            or _compare_refusals(expected.refusals, got.refusals)
            or _compare_rows(expected, got, tolerance)
        )
    return _compare_fields(expected, got, _COMPARED.get(type(expected), ()))


def _compare_fields(expected: Reply, got: Reply, fields: tuple[str, ...]) -> Mismatch | None:
    for field in fields:
        old, new = getattr(expected, field), getattr(got, field)
        if old != new:
            return Mismatch(what=field, expected=str(old), got=str(new))
    return None


def _compare_refusals(expected: tuple[Refusal, ...], got: tuple[Refusal, ...]) -> Mismatch | None:
    old, new = (
        [f"{refusal.request_id}: {refusal.code}" for refusal in refusals]  # the rest is prose
        for refusals in (expected, got)
    )
    if old == new:
        return None
    return Mismatch(
        what="refusals", expected=", ".join(old) or "none", got=", ".join(new) or "none"
    )


def _compare_rows(expected: m.StepOutput, got: m.StepOutput, tolerance: float) -> Mismatch | None:
    old = unpack_sampled(expected.buffer, expected.num_rows)
    new = unpack_sampled(got.buffer, got.num_rows)
    rows = np.arange(expected.num_rows)
    sampling_rows = np.repeat(rows, old.num_sampled)
    return (
        _first("num_sampled", rows, old.num_sampled, new.num_sampled)
        or _first("token", sampling_rows, old.token_ids, new.token_ids)
        or _compare_logprobs(expected.logprobs, got.logprobs, sampling_rows, tolerance)
    )


def _compare_logprobs(
    expected: Logprobs | None, got: Logprobs | None, rows: NDArray[np.intp], tolerance: float
) -> Mismatch | None:
    if expected is None or got is None or expected.num_columns != got.num_columns:
        old_columns, new_columns = (
            str(logprobs.num_columns) if logprobs is not None else "none"
            for logprobs in (expected, got)
        )
        if old_columns == new_columns:
            return None
        return Mismatch(what="num_columns of logprobs", expected=old_columns, got=new_columns)
    shape = (rows.size, expected.num_columns)
    old_values, new_values = (
        np.frombuffer(logprobs.values, "<f4").reshape(shape) for logprobs in (expected, got)
    )
    old_ids, new_ids = (
        np.frombuffer(logprobs.token_ids, "<i4").reshape(shape) for logprobs in (expected, got)
    )
    alike = old_values == new_values
    with np.errstate(invalid="ignore"):  # infinities and NaN are themselves, and near nothing
        alike |= np.abs(old_values - new_values) <= tolerance
    alike |= np.isnan(old_values) & np.isnan(new_values)
    swapped = _may_swap(old_values, tolerance) if tolerance else np.zeros(shape, np.bool_)
    mismatch = _first("logprob", rows, old_values, new_values, alike) or _first(
        "top token", rows, old_ids, new_ids, (old_ids == new_ids) | swapped
    )
    if mismatch is None and not tolerance:
        old_ranks, new_ranks = (np.frombuffer(part.ranks, "<i4") for part in (expected, got))
        mismatch = _first("rank", rows, old_ranks, new_ranks)
    return mismatch


def _may_swap(values: NDArray[np.float32], tolerance: float) -> NDArray[np.bool_]:
    """Say which top tokens are so close to a neighbour, or to those left out, that they swap."""
    may = np.zeros(values.shape, np.bool_)
    with np.errstate(invalid="ignore"):
        near = np.abs(np.diff(values[:, 1:])) <= 2 * tolerance
    may[:, 1:-1] |= near
    may[:, 2:] |= near
    may[:, -1] = values.shape[1] > 1  # the best of those that are not reported may come in
    return may


def _first(
    what: str,
    rows: NDArray[np.intp],
    old: NDArray[Any],
    new: NDArray[Any],
    alike: NDArray[np.bool_] | None = None,
) -> Mismatch | None:
    """Name the first place where two arrays, one line per sampled token, are not alike."""
    places = np.argwhere(~(old == new if alike is None else alike))
    if not places.size:
        return None
    place = tuple(int(index) for index in places[0])
    return Mismatch(
        what=what, row=int(rows[place[0]]), expected=str(old[place]), got=str(new[place])
    )


def _summary(reply: Reply) -> str:
    if isinstance(reply, Failure):
        return f"{reply.code}: {reply.message}"
    return m.message_tag(type(reply).__name__)
