"""Layer 1. What of a step can run: every check, before anything changes.

A fault of the step as a whole raises. A fault of one request becomes a Refusal and the others
run: the scheduler learns the name of the request, its neighbours notice nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuworker.config import LimitsConfig
from gpuworker.errors import InvalidRequest
from gpuworker.messages import ExecuteModel
from gpuworker.runner.block_check import block_faults
from gpuworker.runner.params import check_sampling
from gpuworker.runner.requests import RequestTable
from gpuworker.step import RESUMED, Int32Array, NewRequest, Refusal, StepTables, unpack_step

__all__ = ["PlannedRows", "StepLimits", "StepPlan", "plan_step"]

BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What a step is checked against."""

    limits: LimitsConfig
    max_model_len: int
    block_size: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The rows that run; columns [R] as in the step."""

    rows: NDArray[np.intp]
    """Index of each in the step."""
    slots: Int32Array
    num_scheduled: Int32Array
    num_computed: Int32Array
    samples: BoolArray
    """Whether the row computes the last known token, so that the next one is chosen."""
    new_blocks: tuple[tuple[int, Int32Array, bool], ...]
    """(slot, block ids, whether they replace the table) of the rows that bring blocks."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What a step will do, in this order: finish, admit, compute."""

    num_rows: int
    finished: tuple[str, ...]
    admitted: tuple[tuple[NewRequest, Int32Array], ...]
    rows: PlannedRows
    refusals: tuple[Refusal, ...]
    changed_slots: Int32Array
    """Slots whose request or block table changes before the forward pass."""


def plan_step(step: ExecuteModel, table: RequestTable, limits: StepLimits) -> StepPlan:
    """Check a step against the live requests; changes nothing.

    Raises InvalidRequest when the step as a whole cannot be meant.
    """
    tables = unpack_step(step.buffer, step.num_rows, step.num_block_ids, step.num_token_ids)
    _check_step(step, tables, limits)
    return _Planner(step, tables, table, limits).plan()


def _check_step(step: ExecuteModel, tables: StepTables, limits: StepLimits) -> None:
    max_num_seqs = limits.limits.max_num_seqs
    if step.num_rows > max_num_seqs:
        raise InvalidRequest(f"step has {step.num_rows} rows; max_num_seqs is {max_num_seqs}")
    slots = tables.slots
    outside = slots[(slots < 0) | (slots >= max_num_seqs)]
    if outside.size:
        raise InvalidRequest(f"slot {outside[0]} is outside [0, max_num_seqs={max_num_seqs})")
    for new in step.new_requests:
        if not 0 <= new.slot < max_num_seqs:
            raise InvalidRequest(
                f"slot {new.slot} of new request {new.request_id!r} is outside "
                f"[0, max_num_seqs={max_num_seqs})"
            )
    if slots.size:
        repeated = np.flatnonzero(np.bincount(slots) > 1)
        if repeated.size:
            raise InvalidRequest(f"slot {repeated[0]} has several rows; a step has one per slot")
        if int(tables.num_new_blocks.min()) < 0:
            raise InvalidRequest(
                f"a row brings {tables.num_new_blocks.min()} new blocks; the minimum is 0"
            )
    total = int(np.maximum(tables.num_scheduled, 0).sum(dtype=np.int64))
    if total > limits.limits.max_num_batched_tokens:
        raise InvalidRequest(
            f"step schedules {total} tokens; max_num_batched_tokens is "
            f"{limits.limits.max_num_batched_tokens}"
        )
    announced = sum(new.num_prompt_tokens + new.num_output_tokens for new in step.new_requests)
    if announced != step.num_token_ids:
        raise InvalidRequest(
            f"new requests announce {announced} known tokens; the step carries {step.num_token_ids}"
        )


class _Planner:
    """Follows a step through the table without changing it."""

    def __init__(
        self, step: ExecuteModel, tables: StepTables, table: RequestTable, limits: StepLimits
    ) -> None:
        self._step = step
        self._tables = tables
        self._table = table
        self._limits = limits
        self._refusals: list[Refusal] = []
        self._changed: list[int] = []
        # The table as it will be when the rows are computed.
        self._live = table.live.copy()
        self._names = {slot: request_id for request_id, slot in table.slot_of.items()}
        self._num_tokens = table.num_tokens.copy()
        self._num_blocks = table.num_blocks.copy()
        self._is_new = np.zeros_like(self._live)
        self._contested = np.zeros_like(self._live)

    def plan(self) -> StepPlan:
        finished = self._finish()
        admitted = self._admit()
        rows = self._rows()
        self._changed.extend(slot for slot, _, _ in rows.new_blocks)
        return StepPlan(
            num_rows=self._step.num_rows,
            finished=finished,
            admitted=admitted,
            rows=rows,
            refusals=tuple(self._refusals),
            changed_slots=np.unique(np.asarray(self._changed, np.int32)),
        )

    def _refuse(self, request_id: str, message: str) -> None:
        self._refusals.append(
            Refusal(request_id=request_id, code=InvalidRequest.code, message=message)
        )

    def _finish(self) -> tuple[str, ...]:
        finished: list[str] = []
        for request_id in self._step.finished:
            slot = self._table.slot_of.get(request_id)
            if slot is None or not self._live[slot]:
                self._refuse(request_id, f"finished request {request_id!r} is not live")
                continue
            self._live[slot] = False
            self._num_blocks[slot] = 0
            del self._names[slot]
            self._changed.append(slot)
            finished.append(request_id)
        return tuple(finished)

    def _admit(self) -> tuple[tuple[NewRequest, Int32Array], ...]:
        admitted: list[tuple[NewRequest, Int32Array]] = []
        if not self._step.new_requests:
            return ()
        live_ids = set(self._names.values())
        claims = Counter(new.slot for new in self._step.new_requests)
        end = 0
        for new in self._step.new_requests:
            start, end = end, end + new.num_prompt_tokens + new.num_output_tokens
            tokens = self._tables.token_ids[start:end]
            fault = self._new_fault(new, tokens, live_ids, claims[new.slot])
            if fault is not None:
                self._contested[new.slot] = True
                self._refuse(new.request_id, fault)
                continue
            self._live[new.slot] = self._is_new[new.slot] = True
            self._num_tokens[new.slot] = tokens.size
            self._num_blocks[new.slot] = 0
            self._names[new.slot] = new.request_id
            live_ids.add(new.request_id)
            self._changed.append(new.slot)
            admitted.append((new, tokens))
        return tuple(admitted)

    def _new_fault(
        self, new: NewRequest, tokens: Int32Array, live_ids: set[str], num_claims: int
    ) -> str | None:
        if new.request_id in live_ids:
            return f"request {new.request_id!r} is still live; finish it first"
        if num_claims > 1:
            return f"slot {new.slot} is given to {num_claims} new requests of this step"
        if self._live[new.slot]:
            return f"slot {new.slot} is taken by request {self._names[new.slot]!r}"
        if new.num_prompt_tokens < 1:
            return "the prompt is empty; give at least one token"
        if tokens.size > self._limits.max_model_len:
            return (
                f"{tokens.size} known tokens are more than max_model_len "
                f"{self._limits.max_model_len}"
            )
        vocab_size = self._table.vocab_size
        for token in (int(tokens.min()), int(tokens.max())):
            if not 0 <= token < vocab_size:
                return f"token id {token} is outside the vocabulary [0, {vocab_size})"
        try:
            check_sampling(
                new.sampling,
                vocab_size=vocab_size,
                max_logprobs=self._limits.limits.max_logprobs,
            )
        except InvalidRequest as error:
            return error.message
        return None

    def _rows(self) -> PlannedRows:
        tables = self._tables
        slots = tables.slots
        known = self._num_tokens[slots]
        # 64 bits: the columns are the sender's numbers, and sums of them must not wrap.
        ends = tables.num_computed.astype(np.int64) + tables.num_scheduled
        replaces = ((tables.flags & RESUMED) != 0) | self._is_new[slots]
        held = np.where(replaces, 0, self._num_blocks[slots])
        block_ends = tables.num_new_blocks.cumsum(dtype=np.int64)
        block_ids = [
            tables.block_ids[end - count : end]
            for end, count in zip(block_ends.tolist(), tables.num_new_blocks.tolist(), strict=True)
        ]
        refused = self._contested[slots]
        for faulty, message in self._row_checks(known, ends, replaces, held, block_ids):
            if not faulty.any():
                continue
            for row in np.flatnonzero(faulty & ~refused).tolist():
                self._refuse(self._names.get(int(slots[row]), ""), message(row))
            refused = refused | faulty
        rows = np.flatnonzero(~refused)
        return PlannedRows(
            rows=rows,
            slots=slots[rows],
            num_scheduled=tables.num_scheduled[rows],
            num_computed=tables.num_computed[rows],
            samples=(ends == known)[rows],
            new_blocks=tuple(
                (int(slots[row]), block_ids[row], bool(replaces[row]))
                for row in rows.tolist()
                if replaces[row] or block_ids[row].size
            ),
        )

    def _row_checks(
        self,
        known: Int32Array,
        ends: NDArray[np.int64],
        replaces: BoolArray,
        held: Int32Array,
        block_ids: list[Int32Array],
    ) -> list[tuple[BoolArray, Callable[[int], str]]]:
        """Return which rows have each fault, and its text; the first fault of a row counts."""
        tables, limits = self._tables, self._limits
        slots, computed, scheduled = tables.slots, tables.num_computed, tables.num_scheduled
        expected = self._table.num_computed[slots]
        max_len = limits.max_model_len
        num_blocks = held.astype(np.int64) + tables.num_new_blocks
        max_blocks = -(-max_len // limits.block_size)
        block_fault = block_faults(slots, self._table.blocks, held, block_ids, limits.num_blocks)
        return [
            (~self._live[slots], lambda i: f"slot {slots[i]} has no live request"),
            (
                (tables.flags & ~RESUMED) != 0,
                lambda i: f"flags {tables.flags[i]} are unknown; only RESUMED ({RESUMED}) is",
            ),
            (
                scheduled < 1,
                lambda i: f"{scheduled[i]} tokens are scheduled; leave the row out instead",
            ),
            (
                ~replaces & (computed != expected),
                lambda i: (
                    f"num_computed is {computed[i]}; the worker has computed {expected[i]} tokens "
                    "of this request (RESUMED replaces its blocks)"
                ),
            ),
            (
                (computed < 0) | (computed >= known),
                lambda i: f"num_computed is {computed[i]}; it must be in [0, {known[i]})",
            ),
            (
                ends > max_len,
                lambda i: f"the row ends at token {ends[i]}; max_model_len is {max_len}",
            ),
            (
                ends > known,
                lambda i: f"the row ends at token {ends[i]}; only {known[i]} are known",
            ),
            (
                (ends == known) & (known >= max_len),
                lambda i: (
                    f"the sequence has {known[i]} tokens and max_model_len is {max_len}; "
                    "no further token can be sampled"
                ),
            ),
            (
                num_blocks > max_blocks,
                lambda i: (
                    f"the block table would hold {num_blocks[i]} blocks; max_model_len {max_len} "
                    f"needs at most {max_blocks}"
                ),
            ),
            (
                num_blocks * limits.block_size < ends,
                lambda i: (
                    f"the row ends at token {ends[i]}; its {num_blocks[i]} blocks of "
                    f"{limits.block_size} hold {num_blocks[i] * limits.block_size}"
                ),
            ),
            (
                np.asarray([fault is not None for fault in block_fault], np.bool_),
                lambda i: f"{block_fault[i]}",
            ),
        ]
