"""Layer 0. The payload of a step: what is scheduled, and what came out.

A step is a struct of arrays. Its integers travel in one packed little-endian int32 buffer:

    slots[R]  num_scheduled[R]  num_computed[R]  num_new_blocks[R]  flags[R]
    block_ids[B]  token_ids[T]

R rows, B new block ids (row by row), T known token ids of the new requests (request by
request). A *slot* is the scheduler's short name of a live request, in [0, max_num_seqs); it is
bound by NewRequest and free again once the request's id was sent as finished.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpuworker.errors import InvalidRequest

__all__ = [
    "RESUMED",
    "Int32Array",
    "Logprobs",
    "NewRequest",
    "Refusal",
    "RequestId",
    "SampledTokens",
    "SamplingParams",
    "StepRow",
    "StepTables",
    "pack_sampled",
    "pack_step",
    "unpack_sampled",
    "unpack_step",
]

Int32Array = NDArray[np.int32]
_WIRE_INT = np.dtype("<i4")
_COLUMNS = 5

RequestId = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

RESUMED = 1
"""Row flag: the row's block ids replace the request's block table instead of extending it."""


class SamplingParams(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """How a request's next token is chosen.

    Checked by the worker when the request is new; a value out of range refuses that request
    and no other.
    """

    temperature: float = 1.0
    """0 (and anything below 1e-5) is greedy."""
    top_k: int = 0
    """0 or -1 is off; a value above the vocabulary size means the vocabulary size."""
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    """With a seed the tokens do not depend on the other requests of the batch."""
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] = ()
    """Empty allows every token."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not appear in the output."""
    min_tokens: int = 0
    """No stop token before this many output tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Only used by min_tokens; the scheduler decides when a request ends."""
    logprobs: int | None = None
    """Number of most likely tokens reported beside the chosen one; None reports nothing."""


class NewRequest(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """A request the worker has not seen; its known tokens are in the step's buffer."""

    request_id: RequestId
    slot: Count
    num_prompt_tokens: Count
    num_output_tokens: Count = 0
    """Tokens generated elsewhere before; they follow the prompt in the buffer."""
    sampling: SamplingParams = SamplingParams()


class Refusal(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """One request the step did not run, and why; the other rows ran."""

    request_id: str
    code: str
    message: str


class Logprobs(
    msgspec.Struct, frozen=True, kw_only=True, array_like=True, forbid_unknown_fields=True
):
    """Log-probabilities of the sampled tokens, row-major over (sampled token, column).

    Column 0 is the sampled token, the others the most likely ones in descending order.
    Columns that a request did not ask for hold token id -1. Values are float32 log-softmax of
    the raw logits; a rank is 1 + the number of tokens with a greater logit.
    """

    num_columns: Count
    token_ids: memoryview
    """int32 [num_sampled, num_columns]."""
    values: memoryview
    """float32 [num_sampled, num_columns]."""
    ranks: memoryview
    """int32 [num_sampled]: rank of the sampled token."""


class StepRow(NamedTuple):
    """One scheduled request, in the scheduler's words."""

    slot: int
    num_scheduled: int
    num_computed: int
    new_block_ids: Sequence[int] = ()
    flags: int = 0


class StepTables(NamedTuple):
    """The columns of a step: views into its buffer."""

    slots: Int32Array
    num_scheduled: Int32Array
    num_computed: Int32Array
    num_new_blocks: Int32Array
    flags: Int32Array
    block_ids: Int32Array
    token_ids: Int32Array


class SampledTokens(NamedTuple):
    """num_sampled per row of the step, and all sampled token ids in row order."""

    num_sampled: Int32Array
    token_ids: Int32Array


def pack_step(rows: Sequence[StepRow], token_ids: Iterable[int] | Int32Array = ()) -> memoryview:
    """Pack rows and the known tokens of new requests into one int32 buffer."""
    num_rows = len(rows)
    block_ids = [block for row in rows for block in row.new_block_ids]
    tokens = token_ids if isinstance(token_ids, np.ndarray) else np.fromiter(token_ids, _WIRE_INT)
    buffer = np.empty(num_rows * _COLUMNS + len(block_ids) + tokens.size, _WIRE_INT)
    head = buffer[: num_rows * _COLUMNS].reshape(_COLUMNS, num_rows)
    for index, row in enumerate(rows):
        head[:, index] = (
            row.slot,
            row.num_scheduled,
            row.num_computed,
            len(row.new_block_ids),
            row.flags,
        )
    blocks_end = head.size + len(block_ids)
    buffer[head.size : blocks_end] = block_ids
    buffer[blocks_end:] = tokens
    return buffer.data.cast("B")


def unpack_step(
    buffer: memoryview | bytes, num_rows: int, num_block_ids: int, num_token_ids: int
) -> StepTables:
    """View the columns of a packed step; raises InvalidRequest when the sizes disagree."""
    expected = (num_rows * _COLUMNS + num_block_ids + num_token_ids) * _WIRE_INT.itemsize
    size = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
    if size != expected:
        raise InvalidRequest(
            f"step buffer has {size} bytes; {num_rows} rows, {num_block_ids} block ids and "
            f"{num_token_ids} token ids need {expected}"
        )
    flat: Int32Array = np.frombuffer(buffer, _WIRE_INT)
    columns = flat[: num_rows * _COLUMNS].reshape(_COLUMNS, num_rows)
    tail = flat[num_rows * _COLUMNS :]
    if num_rows and int(columns[3].sum(dtype=np.int64)) != num_block_ids:
        raise InvalidRequest(
            f"rows announce {int(columns[3].sum(dtype=np.int64))} new block ids; "
            f"the step carries {num_block_ids}"
        )
    slots, num_scheduled, num_computed, num_new_blocks, flags = columns
    return StepTables(
        slots,
        num_scheduled,
        num_computed,
        num_new_blocks,
        flags,
        tail[:num_block_ids],
        tail[num_block_ids:],
    )


def pack_sampled(num_sampled: Int32Array, token_ids: Int32Array) -> memoryview:
    """Pack per-row counts and the sampled token ids into one int32 buffer."""
    return np.concatenate([num_sampled, token_ids]).astype(_WIRE_INT).data.cast("B")


def unpack_sampled(buffer: memoryview | bytes, num_rows: int) -> SampledTokens:
    """View the sampled tokens of a step's buffer; raises InvalidRequest on a wrong size."""
    size = buffer.nbytes if isinstance(buffer, memoryview) else len(buffer)
    if size % _WIRE_INT.itemsize or size < num_rows * _WIRE_INT.itemsize:
        raise InvalidRequest(f"output buffer has {size} bytes; too few for {num_rows} rows")
    flat: Int32Array = np.frombuffer(buffer, _WIRE_INT)
    counts, tokens = flat[:num_rows], flat[num_rows:]
    if int(counts.sum(dtype=np.int64)) != tokens.size:
        raise InvalidRequest(
            f"output announces {int(counts.sum(dtype=np.int64))} tokens and carries {tokens.size}"
        )
    return SampledTokens(counts, tokens)
