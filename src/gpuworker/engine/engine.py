"""Layer 5. The reference engine: generate tokens on a worker that is only asked and told."""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from enum import Enum
from types import TracebackType
from typing import Literal, Self

import anyio
import anyio.abc
import anyio.lowlevel
import msgspec

from gpuworker.engine.limits import SchedulerLimits, SchedulerStatistics
from gpuworker.engine.requests import (
    Delta,
    FinishReason,
    GenerationRequest,
    TokenLogprobs,
    own_copy,
)
from gpuworker.engine.scheduler import Scheduler
from gpuworker.engine.takeover import end_live_requests, serving_limits
from gpuworker.engine.worker import WorkerLike
from gpuworker.errors import (
    Busy,
    ClientError,
    IllegalMessage,
    StaleKVEpoch,
    WorkerClosed,
    WorkerError,
    WorkerFaulted,
)
from gpuworker.messages import (
    Asleep,
    Awake,
    ExecuteModel,
    GetHealth,
    GetStatus,
    Limits,
    ReloadWeights,
    ResumeSteps,
    Sleep,
    StepOutput,
    WakeUp,
    WeightsReloaded,
)
from gpuworker.step import SamplingParams

__all__ = ["Engine", "GenerationDelta"]

_BUSY_RETRY_S = 0.005
_FATAL = (WorkerFaulted, WorkerClosed, ClientError)
_ASLEEP = object()  # the pause that lasts from sleep to wake_up


class GenerationDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of a generation since the delta before."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token when sampling.logprobs is set."""
    finish_reason: FinishReason | None = None
    """Set in the last delta only."""


class _Phase(Enum):
    NEW = "new"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


class Engine:
    """Generates tokens; one driver task keeps `depth` steps in flight on one worker.

    Use it as an async context manager on a worker that serves (bring_up leads it there).
    Entering asks the worker for its limits and ends the requests it finds there: they belong
    to a scheduler that is gone, since a worker has one at a time. Entering raises
    IllegalMessage when the worker does not serve, InvalidRequest for a depth below 1, and what
    the worker answers; it may be tried again.

    It opens an anyio task group, so the task that enters must be the one that leaves, and
    generators of generate should be closed inside. Leaving aborts what still runs and waits
    until the worker was told. The worker stays as it is.

    A worker error ends the generations it concerns: StepFailed those of the step, a refusal
    its own, any other all of them. After WorkerFaulted, WorkerClosed or a ClientError the
    engine is of no more use and every generate raises that error. A stale KV epoch ends
    nothing: the epoch is read again and everything is computed again.

    Steps that were in flight behind one that did not run were put together on the assumption
    that it had, so the worker aborts them; that ends nobody. (One that it had not even
    accepted, because it was busy, aborts nothing: what runs behind it is delivered, but no
    block of it enters the prefix cache.) No step is sent until all of them are back; then the
    worker is told to resume, and every request that is left is computed again into an empty
    block pool, from the tokens and slots that are known to have reached the worker.
    """

    def __init__(self, worker: WorkerLike, *, depth: int = 2) -> None:
        """Prepare an engine with up to depth steps in flight; nothing is sent yet."""
        self._worker = worker
        self._depth = depth
        self._limits: Limits  # these two from __aenter__ on
        self._scheduler: Scheduler
        self._inboxes: dict[str, asyncio.Queue[Delta]] = {}
        self._flights: deque[tuple[ExecuteModel, asyncio.Future[StepOutput]]] = deque()
        self._wake = asyncio.Event()
        self._landed = asyncio.Event()  # nothing is in flight
        self._landed.set()
        self._driven = asyncio.Event()  # the driver has returned
        self._pauses: set[object] = set()
        self._withdrawn: list[tuple[ExecuteModel, WorkerError]] = []
        self._failure: WorkerError | ClientError | None = None
        self._phase = _Phase.NEW
        self._name = uuid.uuid4().hex[:8]  # engines that follow each other must not share ids
        self._num_generations = 0
        self._tasks: anyio.abc.TaskGroup

    async def __aenter__(self) -> Self:
        if self._phase is not _Phase.NEW:
            raise IllegalMessage(f"the engine is {self._phase.value}; build another one")
        limits = await serving_limits(self._worker)
        scheduler_limits = SchedulerLimits.from_worker(limits, depth=self._depth)
        self._limits = await end_live_requests(self._worker, limits)
        self._scheduler = Scheduler(
            scheduler_limits,
            kv_epoch=self._limits.kv_epoch,
            first_step_id=self._limits.next_step_id,
        )
        self._tasks = anyio.create_task_group()
        await self._tasks.__aenter__()
        self._phase = _Phase.OPEN
        self._tasks.start_soon(self._drive, name="gpuworker engine")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        self._phase = _Phase.CLOSING
        for request_id in list(self._inboxes):
            self._deliver(self._scheduler.abort(request_id))
        self._wake.set()
        try:
            await self._driven.wait()
        finally:
            self._phase = _Phase.CLOSED
            if not self._driven.is_set():  # we are being cancelled ourselves
                self._tasks.cancel_scope.cancel()
            if isinstance(exc_value, Exception):  # not the group's business, and not to be wrapped
                suppressed = await self._tasks.__aexit__(None, None, None)
            else:
                suppressed = await self._tasks.__aexit__(exc_type, exc_value, traceback)
        return suppressed

    @property
    def limits(self) -> Limits:
        """What the worker can take, as it said when the engine was entered.

        Raises WorkerClosed before that.
        """
        self._check_entered()
        return self._limits

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        sampling: SamplingParams | None = None,
        max_tokens: int = 16,
        stop_token_ids: Iterable[int] | None = None,
        request_id: str | None = None,
        cache_salt: str = "",
    ) -> AsyncGenerator[GenerationDelta, None]:
        """Yield tokens as they come; the last delta carries the finish reason.

        stop_token_ids: the first of these ends the generation and is part of it. None means
            the model's own, limits.eos_token_ids; () means none.

        The request begins with the first iteration. Closing the generator or cancelling its
        consumer aborts it. Raises InvalidRequest for what can never be computed, the typed
        error of a refusal, and the worker's errors.
        """
        if self._failure is not None:
            raise own_copy(self._failure)
        if self._phase is not _Phase.OPEN:
            raise WorkerClosed(f"the engine is {self._phase.value}; generate inside its context")
        self._num_generations += 1
        name = f"{self._name}-{self._num_generations}" if request_id is None else request_id
        if stop_token_ids is None:
            stop_token_ids = self._limits.eos_token_ids
        self._scheduler.add(
            GenerationRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt_token_ids),
                sampling=SamplingParams() if sampling is None else sampling,
                max_tokens=max_tokens,
                stop_token_ids=tuple(stop_token_ids),
                cache_salt=cache_salt,
            )
        )
        inbox = self._inboxes[name] = asyncio.Queue()
        self._wake.set()
        try:
            while True:
                delta = await inbox.get()
                if delta.error is not None:
                    raise delta.error
                yield GenerationDelta(
                    token_ids=delta.token_ids,
                    logprobs=delta.logprobs,
                    finish_reason=delta.finish_reason,
                )
                if delta.finish_reason is not None:
                    return
        finally:
            if self._inboxes.get(name) is inbox:
                del self._inboxes[name]
                self._scheduler.abort(name)
                self._wake.set()

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Send no step inside, and none is in flight; generations wait.

        For whatever must not meet a step: sleep, wake, reload. Leaving takes over the worker's
        KV epoch. May be nested.
        """
        self._check_entered()
        pause = object()
        self._pauses.add(pause)
        try:
            await self._wait_until_landed()
            yield
            await self._take_over_epoch()
        finally:
            self._pauses.discard(pause)
            self._wake.set()

    async def sleep(self, level: Literal[1, 2] = 1) -> Asleep:
        """Pause, and let the worker release its memory; generations wait until wake_up.

        When it raises, the engine goes on if the worker still serves.
        """
        async with self.paused(), self._following_sleep():
            return await self._worker.ask(Sleep(level=level))

    async def wake_up(self) -> Awake:
        """Let the worker bring its memory back, and go on with the generations.

        Raises WeightsUndefined after level 2 as long as no weights were loaded; ask the worker
        for that, and then wake up.
        """
        async with self.paused(), self._following_sleep():
            return await self._worker.ask(WakeUp())

    async def reload_weights(self) -> WeightsReloaded:
        """Let the worker read its checkpoint again; generations go on with the new weights."""
        async with self.paused():
            return await self._worker.ask(ReloadWeights())

    def statistics(self) -> SchedulerStatistics:
        """Return the scheduler's counters; raises WorkerClosed before the engine is entered."""
        self._check_entered()
        return self._scheduler.statistics()

    def _check_entered(self) -> None:
        if self._phase is _Phase.NEW:
            raise WorkerClosed("the engine is new; enter its context first")

    # -- the driver --------------------------------------------------------------------------

    async def _drive(self) -> None:
        """Send steps and take them back until the engine closes or its worker is lost."""
        try:
            while True:
                self._wake.clear()
                self._land()
                if not self._flights:
                    self._landed.set()
                    await self._prepare_retry()
                self._send()
                if self._flights and self._flights[0][1].done():
                    await anyio.lowlevel.checkpoint()
                    continue
                if self._phase is _Phase.CLOSING and not self._flights:
                    return
                await self._wake.wait()
        except (WorkerError, ClientError) as error:
            self._fail(error)
        except BaseException:
            self._fail(WorkerClosed("the engine stopped before the generation ended"))
            raise
        finally:
            for _, future in self._flights:  # nobody waits for these any more
                future.add_done_callback(_look_away)
            self._flights.clear()
            self._landed.set()
            self._driven.set()

    def _send(self) -> None:
        while not self._pauses and (step := self._scheduler.schedule()) is not None:
            try:
                future = self._worker.submit(step)
            except (WorkerError, ClientError) as error:  # taken back in its turn
                future = asyncio.get_running_loop().create_future()
                future.set_exception(error)
            future.add_done_callback(lambda _: self._wake.set())
            self._flights.append((step, future))
            self._landed.clear()

    def _land(self) -> None:
        """Take back the steps that are done, in order; raises what ends the engine."""
        while self._flights and self._flights[0][1].done():
            step, future = self._flights.popleft()
            if future.cancelled():
                raise WorkerClosed("the worker dropped a step")
            error = future.exception()
            if error is None:
                self._deliver(self._scheduler.complete(step, future.result()))
            elif isinstance(error, WorkerError) and not isinstance(error, _FATAL):
                self._withdrawn.append((step, error))
                self._deliver(self._scheduler.withdraw(step, error))
            else:
                raise error

    async def _prepare_retry(self) -> None:
        """Remove what kept steps from running, and resume; nothing is in flight."""
        if not self._withdrawn:
            return
        withdrawn, self._withdrawn = self._withdrawn, []
        health = await self._worker.ask(GetHealth())
        if health.aborted_after is not None:
            await self._worker.ask(ResumeSteps(step_id=health.aborted_after))
        for step, error in withdrawn:
            if isinstance(error, Busy):
                await anyio.sleep(_BUSY_RETRY_S)
            elif isinstance(error, StaleKVEpoch):
                await self._follow_epoch(step, error)

    async def _follow_epoch(self, step: ExecuteModel, error: StaleKVEpoch) -> None:
        status = await self._worker.ask(GetStatus())
        if status.kv_epoch == step.kv_epoch:  # the worker contradicts itself
            self._deliver(self._scheduler.fail_all(error))
        elif status.kv_epoch != self._scheduler.kv_epoch:
            self._scheduler.new_epoch(status.kv_epoch)

    async def _take_over_epoch(self) -> None:
        """Ask for the KV epoch while paused; generations are computed again in a new one."""
        status = await self._worker.ask(GetStatus())
        if status.kv_epoch != self._scheduler.kv_epoch:
            self._scheduler.new_epoch(status.kv_epoch)

    @asynccontextmanager
    async def _following_sleep(self) -> AsyncIterator[None]:
        """Stay paused afterwards if the worker sleeps, however the message inside ended."""
        try:
            yield
        finally:
            with anyio.CancelScope(shield=True):  # a cancelled sleep may have happened
                status = await self._worker.ask(GetStatus())
            if status.state == "sleeping":
                self._pauses.add(_ASLEEP)
            else:
                self._pauses.discard(_ASLEEP)

    async def _wait_until_landed(self) -> None:
        while self._flights:
            await self._landed.wait()
        if self._failure is not None:
            raise own_copy(self._failure)

    def _fail(self, error: WorkerError | ClientError) -> None:
        self._failure = error
        self._deliver(self._scheduler.fail_all(error))

    def _deliver(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            inbox = self._inboxes.get(delta.request_id)
            if inbox is not None:
                if delta.finish_reason is not None:
                    del self._inboxes[delta.request_id]
                inbox.put_nowait(delta)


def _look_away(future: asyncio.Future[StepOutput]) -> None:
    if not future.cancelled():
        future.exception()
