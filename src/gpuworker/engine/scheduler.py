"""Layer 5. From requests to steps and from outputs to tokens. No I/O, no clock."""

from __future__ import annotations

from collections import deque

from gpuworker.engine.batcher import Batcher
from gpuworker.engine.blocks import BlockPoolStatistics
from gpuworker.engine.draft import InFlight, Row, StepDraft
from gpuworker.engine.limits import SchedulerLimits, SchedulerStatistics
from gpuworker.engine.requests import (
    Delta,
    GenerationRequest,
    LiveRequest,
    Stage,
    own_copy,
    token_logprobs,
)
from gpuworker.engine.slots import SlotBook
from gpuworker.errors import (
    Busy,
    ClientError,
    InvalidRequest,
    ProtocolError,
    StaleKVEpoch,
    StepAborted,
    StepFailed,
    WorkerError,
    error_class,
)
from gpuworker.messages import ExecuteModel, StepOutput
from gpuworker.step import unpack_sampled

__all__ = ["Scheduler"]


class Scheduler:
    """Decides every step of one worker.

    Call schedule while it returns steps; give every step back in the order of scheduling, by
    complete or by withdraw. Up to limits.depth steps are in flight, so a step is put together
    before the tokens of the one ahead are known; that works because the worker keeps the
    tokens. A request that ends by a stop token leaves a void row in the step behind it.

    A step that did not run (withdraw) makes those behind it doubtful. Nothing is scheduled
    until all have come back; then every request is computed again from what the worker knows.
    """

    def __init__(
        self, limits: SchedulerLimits, *, kv_epoch: int = 0, first_step_id: int = 0
    ) -> None:
        """Begin with nothing; raises InvalidRequest when there is no usable block.

        The first step id must be above those that the worker has seen.
        """
        self.limits = limits
        self._epoch = kv_epoch
        self._live: dict[str, LiveRequest] = {}  # in order of arrival
        self._slots = SlotBook(limits.max_num_seqs)
        self._batcher = Batcher(limits, self._slots)
        self._in_flight: deque[InFlight] = deque()
        self._next_step_id = first_step_id
        self._lost_step_id: int | None = None  # the first step that did not run
        self._last_doubtful_step_id = (
            first_step_id - 1
        )  # up to here, steps may name what the worker lacks
        self._num_arrivals = 0
        self._num_steps = 0

    # -- requests ----------------------------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        """Queue a request; raises InvalidRequest when it can never be computed."""
        if request.request_id in self._live:
            raise InvalidRequest(
                f"request {request.request_id} is still running; choose another id"
            )
        self._num_arrivals += 1
        live = LiveRequest(request, self.limits, arrival=self._num_arrivals)
        self._live[live.request_id] = live
        self._batcher.enqueue(live)

    def abort(self, request_id: str) -> list[Delta]:
        """End a request now; an unknown or finished id changes nothing."""
        request = self._live.get(request_id)
        if request is None:
            return []
        self._finish(request)
        return [Delta(request_id, finish_reason="abort")]

    def fail_all(self, error: WorkerError | ClientError) -> list[Delta]:
        """End every request with an error."""
        return [self._refuse(request, error) for request in list(self._live.values())]

    # -- steps -------------------------------------------------------------------------------

    def schedule(self) -> ExecuteModel | None:
        """Put the next step together; None when there is nothing to do or to wait for first.

        A step without rows tells the worker which requests ended.
        """
        if len(self._in_flight) >= self.limits.depth:
            return None
        if self._lost_step_id is not None:
            if self._in_flight:
                return None
            self._recover()
        ended = self._slots.send_ended(with_company=bool(self._live))
        draft = StepDraft(self.limits.max_num_batched_tokens)
        self._batcher.fill(draft)
        if not draft.rows and not ended:
            return None
        step = draft.message(self._next_step_id, self._epoch, ended)
        self._in_flight.append(InFlight(step.step_id, draft.rows, ended))
        self._next_step_id += 1
        return step

    def complete(self, step: ExecuteModel, output: StepOutput) -> list[Delta]:
        """Take over what a step computed; raises ProtocolError when the output contradicts it."""
        flight = self._land(step)
        if output.num_rows != len(flight.rows):
            raise ProtocolError(
                f"step {step.step_id} has {len(flight.rows)} rows, its output {output.num_rows}"
            )
        self._num_steps += 1
        sampled = unpack_sampled(output.buffer, output.num_rows)
        refusals = {refusal.request_id: refusal for refusal in output.refusals}
        self._slots.note_ended(flight.ended)
        deltas: list[Delta] = []
        first = 0
        for row, count in zip(flight.rows, sampled.num_sampled.tolist(), strict=True):
            refusal = refusals.get(row.request.request_id)
            if row.new and refusal is None:
                self._slots.note_bound(row.slot, row.request)
            elif row.new and self._lost_step_id is None:
                # Steps in flight may hold further rows of a request the worker never took.
                self._last_doubtful_step_id = self._next_step_id - 1
                self._slots.take_back(row.slot, row.request)
            if row.request.stage is not Stage.FINISHED:
                if refusal is None:
                    token_ids: list[int] = sampled.token_ids[first : first + count].tolist()
                    deltas += self._take_row(row, token_ids, output, first)
                elif self._lost_step_id is None:
                    error = error_class(refusal.code)(refusal.message)
                    deltas.append(self._refuse(row.request, error))
            first += count
        return deltas

    def withdraw(self, step: ExecuteModel, error: WorkerError) -> list[Delta]:
        """Take back a step that did not run; the worker is as before it.

        StepFailed ends the requests of its rows. StaleKVEpoch and Busy end none, and neither
        does StepAborted or a ProtocolError that may only follow from an earlier step's fate.
        Anything else ends every request.
        """
        flight = self._land(step)
        consequence = step.step_id <= self._last_doubtful_step_id
        if self._lost_step_id is None:
            self._lost_step_id = step.step_id
        self._last_doubtful_step_id = self._next_step_id - 1
        if isinstance(error, StepFailed):
            rows = [row for row in flight.rows if row.request.stage is not Stage.FINISHED]
            return [self._refuse(row.request, error) for row in rows]
        if isinstance(error, (StaleKVEpoch, Busy)):
            return []
        if consequence and isinstance(error, (StepAborted, ProtocolError)):
            return []
        return self.fail_all(error)

    def new_epoch(self, kv_epoch: int) -> None:
        """Forget all cached KV; every running request waits to be computed again.

        Raises InvalidRequest while steps are in flight.
        """
        if self._in_flight:
            raise InvalidRequest(
                f"{len(self._in_flight)} steps are in flight; a new epoch needs them back first"
            )
        self._epoch = kv_epoch
        self._recover()

    # -- views -------------------------------------------------------------------------------

    @property
    def kv_epoch(self) -> int:
        """The epoch that steps name."""
        return self._epoch

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and not yet back."""
        return len(self._in_flight)

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def statistics(self) -> SchedulerStatistics:
        """Return the counters."""
        pool, batcher = self._batcher.pool, self._batcher
        return SchedulerStatistics(
            num_running=batcher.num_running,
            num_waiting=batcher.num_waiting,
            num_steps=self._num_steps,
            num_preemptions=batcher.num_preemptions,
            num_prefix_queries=batcher.num_prefix_queries,
            num_prefix_hits=batcher.num_prefix_hits,
            kv_usage=1.0 - pool.num_free / pool.num_usable,
        )

    def block_statistics(self) -> BlockPoolStatistics:
        """Return what the block pool holds."""
        return self._batcher.pool.statistics()

    # -- taking a step back --------------------------------------------------------------------

    def _land(self, step: ExecuteModel) -> InFlight:
        flight = self._in_flight.popleft()
        assert flight.step_id == step.step_id, "steps come back in the order of scheduling"
        return flight

    def _take_row(
        self, row: Row, token_ids: list[int], output: StepOutput, first: int
    ) -> list[Delta]:
        """Record what a row computed, and its token if it sampled one."""
        request = row.request
        if self._lost_step_id is None:
            if len(token_ids) != row.samples:
                raise ProtocolError(
                    f"step {output.step_id}: request {request.request_id} sampled "
                    f"{len(token_ids)} tokens instead of {int(row.samples)}"
                )
            self._batcher.confirm(row)
        if not token_ids:
            return []
        request.num_pending -= 1
        reason = request.append(token_ids)
        logprobs = output.logprobs
        cut = (
            token_logprobs(logprobs, first, len(token_ids))
            if logprobs is not None and request.sampling.logprobs is not None
            else ()
        )
        if reason is not None:
            self._finish(request)
        return [Delta(request.request_id, tuple(token_ids), cut, reason)]

    def _finish(self, request: LiveRequest) -> None:
        self._batcher.drop(request)
        del self._live[request.request_id]
        if request.slot is not None:
            self._slots.end(request)

    def _refuse(self, request: LiveRequest, error: WorkerError | ClientError) -> Delta:
        self._finish(request)
        return Delta(request.request_id, finish_reason="refused", error=own_copy(error))

    def _recover(self) -> None:
        """Begin again from what the worker is known to know; nothing is in flight."""
        self._lost_step_id = None
        self._batcher.restart(self._live.values())
        self._slots.restore(self._live.values())
