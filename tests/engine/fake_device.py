"""A worker without a model that computes through its block tables and forgives nothing.

The next token of a request is a hash of everything that is read from a simulated paged cache
through the request's own block table. Each cache entry chains the one before it, also read
from the cache. So a wrong block, a stale prefix or a wrong num_computed gives other tokens or
raises ContractViolation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from gpuworker import messages as m
from gpuworker.errors import Busy, InvalidRequest, StaleKVEpoch, StepAborted, WorkerError
from gpuworker.step import (
    RESUMED,
    Logprobs,
    NewRequest,
    Refusal,
    StepTables,
    pack_sampled,
    unpack_step,
)

_MASK = (1 << 61) - 1
VOCAB_SIZE = 97


class ContractViolation(AssertionError):
    """The scheduler did something that a worker need not survive."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ContractViolation(message)


def _entry(before: int, token: int, position: int) -> int:
    return hash((before, token, position)) & _MASK


def _next_token(entries: list[int]) -> int:
    return (hash(tuple(entries)) & _MASK) % VOCAB_SIZE


def reference_tokens(prompt: tuple[int, ...], count: int) -> list[int]:
    """Compute what the fake generates for a prompt, without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        entries: list[int] = []
        for position, token in enumerate(tokens):
            entries.append(_entry(entries[-1] if entries else 7, token, position))
        tokens.append(_next_token(entries))
    return tokens[len(prompt) :]


@dataclass
class _Known:
    """What the worker knows of a request."""

    request_id: str
    tokens: list[int]
    num_logprobs: int | None
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    needs_resume: bool = False


class FakeDevice:
    """The step contract, enforced. Synchronous; FakeWorker puts a mailbox around it."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        depth: int = 2,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.limits = m.Limits(
            block_size=block_size,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_blocks=num_blocks,
            max_logprobs=20,
            window=4,
            kv_epoch=0,
            next_step_id=0,
            live_requests=(),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=eos_token_ids,
        )
        self.epoch = 0
        self.num_stale = 0
        self.aborted_after: int | None = None
        self.num_aborted = 0
        self.slots: dict[int, _Known] = {}
        self.log: list[m.ExecuteModel] = []
        self.refuse: set[str] = set()
        self.fail_at: dict[int, WorkerError] = {}  # by number of the step, from 0
        self._depth = depth
        self._last_step_id = -1
        self._num_shadowed = 0  # steps sent before the scheduler could learn of a fault
        self._cache: dict[int, int] = {}

    def current_limits(self) -> m.Limits:
        return msgspec.structs.replace(
            self.limits,
            kv_epoch=self.epoch,
            next_step_id=self._last_step_id + 1,
            live_requests=tuple(known.request_id for known in self.slots.values()),
        )

    def new_epoch(self) -> int:
        self.epoch += 1
        self._cache.clear()
        for known in self.slots.values():
            known.needs_resume = True
        return self.epoch

    def execute(self, step: m.ExecuteModel) -> m.StepOutput:
        """Run a step or raise; a raise changes nothing but the log, and aborts what follows."""
        self.log.append(step)
        if self.aborted_after is not None:
            self.num_aborted += 1
            raise StepAborted(f"step {self.aborted_after} did not run")
        try:
            return self._execute(step)
        except Busy:
            raise  # it was not even accepted
        except WorkerError:
            self.aborted_after = step.step_id
            raise

    def _execute(self, step: m.ExecuteModel) -> m.StepOutput:
        require(step.step_id > self._last_step_id, f"step id {step.step_id} again")
        shadowed = self._num_shadowed > 0
        self._num_shadowed -= shadowed
        if step.kv_epoch != self.epoch:
            self.num_stale += 1
            raise StaleKVEpoch(f"the step names KV epoch {step.kv_epoch}, it is {self.epoch}")
        if len(self.log) - 1 in self.fail_at:
            self._num_shadowed = self._depth - 1
            raise self.fail_at.pop(len(self.log) - 1)
        tables = unpack_step(step.buffer, step.num_rows, step.num_block_ids, step.num_token_ids)
        self._check_limits(tables)
        self._finish(step.finished)
        refusals = self._add(step.new_requests, tables.token_ids, shadowed)
        runs = self._bind_rows(step, tables, refusals, shadowed)
        self._write(runs)
        self._last_step_id = step.step_id
        return self._sample(step, tables, runs, refusals)

    def _check_limits(self, tables: StepTables) -> None:
        limits = self.limits
        slots = tables.slots.tolist()
        require(len(set(slots)) == len(slots), f"two rows for one slot: {slots}")
        require(all(0 <= slot < limits.max_num_seqs for slot in slots), f"slots {slots}")
        total = int(tables.num_scheduled.sum())
        require(total <= limits.max_num_batched_tokens, f"{total} tokens in one step")
        require(bool((tables.num_scheduled >= 1).all()), "a row schedules nothing")
        blocks = tables.block_ids
        if blocks.size:
            require(blocks.min() >= 1 and blocks.max() < limits.num_blocks, f"blocks {blocks}")

    def _finish(self, finished: tuple[str, ...]) -> None:
        for request_id in finished:
            slots = [s for s, known in self.slots.items() if known.request_id == request_id]
            require(bool(slots), f"finished an unknown request {request_id}")
            for slot in slots:
                del self.slots[slot]

    def _add(
        self, new_requests: tuple[NewRequest, ...], token_ids: Any, shadowed: bool
    ) -> list[Refusal]:
        refusals: list[Refusal] = []
        first = 0
        for new in new_requests:
            count = new.num_prompt_tokens + new.num_output_tokens
            tokens: list[int] = token_ids[first : first + count].tolist()
            first += count
            ids = {known.request_id for known in self.slots.values()}
            taken = new.slot in self.slots or new.request_id in ids
            require(not taken or shadowed, f"{new.request_id} binds a slot or id in use")
            require(0 <= new.slot < self.limits.max_num_seqs, f"slot {new.slot}")
            if taken or new.request_id in self.refuse:
                refusals.append(_refusal(new.request_id, "not this one"))
                self._num_shadowed = self._depth - 1
            else:
                self.slots[new.slot] = _Known(new.request_id, tokens, new.sampling.logprobs)
        require(first == len(token_ids), "token ids of nobody")
        return refusals

    def _bind_rows(
        self,
        step: m.ExecuteModel,
        tables: StepTables,
        refusals: list[Refusal],
        shadowed: bool,
    ) -> list[tuple[_Known, int] | None]:
        """Check each row and extend its table; None for a refused row."""
        new_slots = {new.slot: new.request_id for new in step.new_requests}
        refused = {refusal.request_id for refusal in refusals}
        runs: list[tuple[_Known, int] | None] = []
        first = 0
        for slot, count, computed, num_new, flags in zip(
            *(column.tolist() for column in tables[:5]), strict=True
        ):
            blocks: list[int] = tables.block_ids[first : first + num_new].tolist()
            first += num_new
            known = self.slots.get(slot)
            if new_slots.get(slot) in refused:
                runs.append(None)
                continue
            fault = self._row_fault(known, slot in new_slots, count, computed, blocks, flags)
            if fault:
                require(shadowed, f"step {step.step_id}, slot {slot}: {fault}")
                refusals.append(_refusal(known.request_id if known else "", fault))
                runs.append(None)
                continue
            assert known is not None
            known.blocks = blocks if flags & RESUMED else known.blocks + blocks
            known.num_computed = computed + count
            known.needs_resume = False
            runs.append((known, computed))
        missing = set(new_slots) - set(tables.slots.tolist())
        require(not missing, f"new requests without a row: {missing}")
        return runs

    def _row_fault(
        self,
        known: _Known | None,
        new: bool,
        count: int,
        computed: int,
        blocks: list[int],
        flags: int,
    ) -> str:
        if known is None:
            return "the slot is not bound"
        if flags not in (0, RESUMED) or (new and flags):
            return f"flags {flags}"
        resumed = bool(flags & RESUMED)
        if known.needs_resume and not resumed:
            return "must be resumed after a new epoch"
        if not new and not resumed and computed != known.num_computed:
            return f"num_computed {computed}, it is {known.num_computed}"
        if computed + count > len(known.tokens):
            return f"{computed} + {count} tokens of {len(known.tokens)}"
        table = blocks if resumed else known.blocks + blocks
        if len(set(table)) != len(table):
            return f"a block twice in {table}"
        size = self.limits.block_size
        if len(table) != -(-(computed + count) // size):
            return f"{len(table)} blocks for {computed + count} tokens"
        if len(table) * size > self.limits.max_model_len + size - 1:
            return "the block table is too long"
        return ""

    def _write(self, runs: list[tuple[_Known, int] | None]) -> None:
        """Compute the rows one position after the other, then check who wrote where."""
        size = self.limits.block_size
        writers: dict[int, str] = {}
        for known, computed in filter(None, runs):
            for position in range(computed, known.num_computed):
                before = self._read(known, position - 1) if position else 7
                block = known.blocks[position // size]
                writers.setdefault(block, known.request_id)
                require(writers[block] == known.request_id, f"two requests write block {block}")
                slot = block * size + position % size
                self._cache[slot] = _entry(before, known.tokens[position], position)
        for known, _ in filter(None, runs):
            for block in known.blocks:
                writer = writers.get(block, known.request_id)
                require(writer == known.request_id, f"block {block} is written while shared")

    def _read(self, known: _Known, position: int) -> int:
        size = self.limits.block_size
        slot = known.blocks[position // size] * size + position % size
        require(slot in self._cache, f"{known.request_id} reads unwritten cache slot {slot}")
        return self._cache[slot]

    def _sample(
        self,
        step: m.ExecuteModel,
        tables: StepTables,
        runs: list[tuple[_Known, int] | None],
        refusals: list[Refusal],
    ) -> m.StepOutput:
        counts = np.zeros(step.num_rows, np.int32)
        tokens: list[int] = []
        asked: list[int | None] = []
        for row, run in enumerate(runs):
            if run is None or run[0].num_computed < len(run[0].tokens):
                continue
            known = run[0]
            entries = [self._read(known, position) for position in range(known.num_computed)]
            token = _next_token(entries)
            known.tokens.append(token)
            require(len(known.tokens) <= self.limits.max_model_len, "longer than max_model_len")
            counts[row] = 1
            tokens.append(token)
            asked.append(known.num_logprobs)
        return m.StepOutput(
            step_id=step.step_id,
            kv_epoch=self.epoch,
            num_rows=step.num_rows,
            step_s=0.0,
            buffer=pack_sampled(counts, np.array(tokens, np.int32)),
            logprobs=_logprobs(tokens, asked),
            refusals=tuple(refusals),
        )


def _refusal(request_id: str, message: str) -> Refusal:
    return Refusal(request_id=request_id, code=InvalidRequest.code, message=message)


def _logprobs(tokens: list[int], asked: list[int | None]) -> Logprobs | None:
    wanted = [count for count in asked if count is not None]
    if not wanted:
        return None
    columns = 1 + max(wanted)
    ids = np.full((len(tokens), columns), -1, np.int32)
    for row, (token, count) in enumerate(zip(tokens, asked, strict=True)):
        if count is not None:
            ids[row, : count + 1] = [(token + column) % VOCAB_SIZE for column in range(count + 1)]
    values = -ids.astype(np.float32)
    return Logprobs(
        num_columns=columns,
        token_ids=ids.data.cast("B"),
        values=values.data.cast("B"),
        ranks=np.ones(len(tokens), np.int32).data.cast("B"),
    )
