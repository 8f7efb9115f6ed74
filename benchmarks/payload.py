"""The step that the benchmarks of the wire send, in our form and in those of peers."""

from __future__ import annotations

import dataclasses
import random

import msgspec

from gpuworker import messages as m
from gpuworker.step import NewRequest, StepRow, pack_step

_PROMPT = 512


class Row(msgspec.Struct, array_like=True, gc=False):
    """A row as a struct."""

    slot: int
    num_scheduled: int
    num_computed: int
    new_block_ids: list[int]


class New(msgspec.Struct, array_like=True, gc=False):
    """A new request as a struct."""

    request_id: str
    slot: int
    token_ids: list[int]


class Structs(msgspec.Struct, array_like=True, gc=False):
    """A step as structs."""

    rows: list[Row]
    new: list[New]


@dataclasses.dataclass
class DataRow:
    """A row as a dataclass."""

    slot: int
    num_scheduled: int
    num_computed: int
    new_block_ids: list[int]


@dataclasses.dataclass
class DataNew:
    """A new request as a dataclass."""

    request_id: str
    slot: int
    token_ids: list[int]


@dataclasses.dataclass
class DataStep:
    """A step as dataclasses."""

    rows: list[DataRow]
    new: list[DataNew]


def make_rows(num_requests: int, num_new: int) -> tuple[list[StepRow], list[New]]:
    """Make rows: one running request in 16 gets a block; the last num_new bring whole prompts."""
    rng = random.Random(num_requests)
    rows = [
        StepRow(slot, 1, rng.randrange(2000), [rng.randrange(9000)] if slot % 16 == 0 else ())
        for slot in range(num_requests - num_new)
    ]
    new = []
    for slot in range(num_requests - num_new, num_requests):
        blocks = [rng.randrange(9000) for _ in range(_PROMPT // 16)]
        rows.append(StepRow(slot, _PROMPT, 0, blocks))
        tokens = [rng.randrange(150_000) for _ in range(_PROMPT)]
        new.append(New(f"request-{slot}", slot, tokens))
    return rows, new


def make_step(
    rows: list[StepRow], new: list[New], step_id: int = 1, kv_epoch: int = 0
) -> m.ExecuteModel:
    """Pack rows and new requests as we send them."""
    return m.ExecuteModel(
        step_id=step_id,
        kv_epoch=kv_epoch,
        num_rows=len(rows),
        num_block_ids=sum(len(row.new_block_ids) for row in rows),
        num_token_ids=sum(len(n.token_ids) for n in new),
        new_requests=tuple(
            NewRequest(request_id=n.request_id, slot=n.slot, num_prompt_tokens=len(n.token_ids))
            for n in new
        ),
        buffer=pack_step(rows, [token for n in new for token in n.token_ids]),
    )


def make_dataclasses(rows: list[StepRow], new: list[New]) -> DataStep:
    """Put the same content into dataclasses, one object per row and request."""
    return DataStep(
        [DataRow(*row[:3], list(row.new_block_ids)) for row in rows],
        [DataNew(n.request_id, n.slot, n.token_ids) for n in new],
    )
