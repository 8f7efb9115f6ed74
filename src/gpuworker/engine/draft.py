"""Layer 5. A step being put together, and what is remembered of it while it is in flight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gpuworker.engine.requests import LiveRequest
from gpuworker.messages import ExecuteModel
from gpuworker.step import NewRequest, StepRow, pack_step

__all__ = ["InFlight", "Row", "StepDraft"]


class Row(NamedTuple):
    """What a step does for a request."""

    request: LiveRequest
    slot: int
    num_computed: int
    num_scheduled: int
    table_version: int
    """Of the block table that the row writes to."""
    samples: bool
    new: bool
    """Whether the step is the first that the worker hears of the request."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """A step that was sent; rows in its order."""

    step_id: int
    rows: list[Row]
    ended: list[LiveRequest]


class StepDraft:
    """Rows under a budget of tokens."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: list[Row] = []
        self._wire_rows: list[StepRow] = []
        self._scheduled: set[LiveRequest] = set()
        self._new_requests: list[NewRequest] = []
        self._token_ids: list[int] = []

    def __contains__(self, request: object) -> bool:
        return request in self._scheduled

    def introduce(self, request: LiveRequest, slot: int) -> None:
        """Tell the worker of a request and its known tokens; its row follows."""
        self._new_requests.append(
            NewRequest(
                request_id=request.request_id,
                slot=slot,
                num_prompt_tokens=request.num_prompt,
                num_output_tokens=len(request.tokens) - request.num_prompt,
                sampling=request.sampling,
            )
        )
        self._token_ids += request.tokens

    def add(
        self, request: LiveRequest, count: int, new_block_ids: list[int], *, flags: int, new: bool
    ) -> None:
        """Schedule count tokens of a request and advance its counters by them."""
        assert request.slot is not None
        samples = request.num_computed + count == request.num_total
        row = Row(
            request=request,
            slot=request.slot,
            num_computed=request.num_computed,
            num_scheduled=count,
            table_version=request.table_version,
            samples=samples,
            new=new,
        )
        self.rows.append(row)
        self._wire_rows.append(StepRow(row.slot, count, row.num_computed, new_block_ids, flags))
        self._scheduled.add(request)
        self.budget -= count
        request.num_computed += count
        request.num_pending += samples

    def message(self, step_id: int, kv_epoch: int, ended: list[LiveRequest]) -> ExecuteModel:
        """Pack the step for the wire."""
        return ExecuteModel(
            step_id=step_id,
            kv_epoch=kv_epoch,
            num_rows=len(self.rows),
            num_block_ids=sum(len(row.new_block_ids) for row in self._wire_rows),
            num_token_ids=len(self._token_ids),
            new_requests=tuple(self._new_requests),
            finished=tuple(request.request_id for request in ended),
            buffer=pack_step(self._wire_rows, self._token_ids),
        )
