"""Layer 4. The actor: one mailbox, one consumer, one device thread.

Steps pipeline, moves drain. A message means what it means when its turn comes; what it means
depends on the order of arrival and never on timing. GetStatus and GetHealth do not queue.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, cast

import anyio
import msgspec

from gpuworker.announcer import Announcer
from gpuworker.config import WorkerConfig
from gpuworker.device.thread import DeviceThread, Lane, Pending
from gpuworker.errors import (
    DeadlineExceeded,
    DeviceFault,
    IllegalMessage,
    MailboxFull,
    RequestCancelled,
    SessionError,
    WorkerClosed,
    WorkerError,
    WorkerFaulted,
)
from gpuworker.lifecycle import Lifecycle, Start, State
from gpuworker.messages import (
    DropRequests,
    ExecuteModel,
    GetHealth,
    GetStatus,
    Reply,
    ReplyT,
    Request,
    Shutdown,
    StepOutput,
    message_tag,
)
from gpuworker.permit import Permit
from gpuworker.reports import Activity, Moment, activity_of, health_of, status_of
from gpuworker.runtime import Runtime, create_runtime
from gpuworker.states import TABLES

__all__ = ["Activity", "ActorStatistics", "GPUWorker"]

_ALWAYS_ACCEPTED = (Shutdown, DropRequests)
"""What must get through although the mailbox is full."""


class ActorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What went through the mailbox since the start."""

    num_answered: int
    num_refused: int
    num_queued: int
    num_in_flight: int


class _Envelope:
    """A request that waits for its turn, and what its sender waits for."""

    __slots__ = ("finished", "permit", "reply", "request", "scope", "since")

    def __init__(self, request: Request[Any], permit: Permit) -> None:
        self.request = request
        self.permit = permit
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.scope = anyio.CancelScope()
        self.finished = asyncio.Event()
        self.since = 0.0

    def settle_from(self, reply: asyncio.Future[Any]) -> None:
        """Pass on how the work that was started for this request ended."""
        if self.reply.done():
            return
        if reply.cancelled():
            self.reply.cancel()
        elif (error := reply.exception()) is not None:
            self.reply.set_exception(error)
        else:
            self.reply.set_result(reply.result())

    def settle(self, result: Reply | None, error: BaseException | None) -> None:
        if self.reply.done():
            return
        if error is not None:
            self.reply.set_exception(error)
        else:
            self.reply.set_result(result)


def _closed() -> WorkerClosed:
    return WorkerClosed("the worker is closed", state=State.CLOSED.value)


class GPUWorker:
    """One rank of a model, driven by messages.

    Use it as an async context manager: entering starts the device thread, leaving shuts the
    worker down in whatever state it is. It belongs to one event loop (asyncio).
    """

    def __init__(
        self,
        config: WorkerConfig,
        runtime: Callable[[WorkerConfig, DeviceThread], Runtime] = create_runtime,
    ) -> None:
        self._config = config
        self._create_runtime = runtime
        self._device = DeviceThread()
        self._backlog: deque[_Envelope] = deque()
        self._wake = asyncio.Event()
        self._moving: _Envelope | None = None
        self._num_in_flight = 0
        self._num_answered = 0
        self._num_refused = 0
        self._last_error = ""
        self.events = Announcer(self._moment)
        self._loop_lag_s = 0.0
        self._started = time.monotonic()
        self._runtime: Runtime
        self._lifecycle: Lifecycle[Runtime]
        self._consumer: asyncio.Task[None]

    @property
    def config(self) -> WorkerConfig:
        """The configuration the worker was given."""
        return self._config

    @property
    def state(self) -> State:
        """The current state."""
        return self._lifecycle.state

    @property
    def fault(self) -> WorkerFaulted | None:
        """What ended the worker, when it faulted; it stays known after Shutdown."""
        return self._runtime.progress.fault

    async def __aenter__(self) -> Self:
        self._device.start()
        try:
            # On the device thread, because importing torch takes seconds.
            self._runtime = await self._device.run(self._create_runtime, self._config, self._device)
        except BaseException:
            await self._device.stop()
            raise
        self._lifecycle = Lifecycle(TABLES, self._runtime)
        self._consumer = asyncio.create_task(self._consume(), name="gpuworker mailbox")
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._consumer.cancel()
        with anyio.CancelScope(shield=True):
            await asyncio.wait([self._consumer])  # undoes a move under way, answers the queue
            try:
                if not self._device.is_lost:
                    await self._device.run(self._runtime.release_all)
            finally:
                await self._device.stop()
        if not self._consumer.cancelled():
            self._consumer.result()

    async def ask(self, request: Request[ReplyT]) -> ReplyT:
        """Send a request and return its reply, or raise the WorkerError it was answered with.

        1. Messages take effect in the order of arrival.
        2. When this raises, nothing that it started is still happening, except a step that is
           already on the device.
        3. After a failed or cancelled move, state and bytes are as before. (A sleep that was
           cancelled after its memory went back is asleep; GetStatus tells.)
        4. Every accepted message is answered, at the latest with WorkerClosed.

        Deadlines are the caller's: wrap this in anyio.fail_after. A deadline is noticed
        between device calls, because work on the device cannot be interrupted.
        """
        reply, envelope = self._send(request)
        try:
            return cast("ReplyT", await reply)
        except asyncio.CancelledError:
            if envelope is not None:
                envelope.scope.cancel()
                with anyio.CancelScope(shield=True):
                    await envelope.finished.wait()
            raise

    def submit(
        self, request: Request[ReplyT], *, permit: Permit | None = None
    ) -> asyncio.Future[ReplyT]:
        """Send a request without waiting; the future is what ask would return or raise.

        Raises MailboxFull or WorkerClosed at once. Cancelling the future withdraws a message
        whose turn has not come, and cancels and undoes a move under way. A permit gives the
        message a deadline, and its owner the right to revoke it until its turn has come.
        """
        reply, envelope = self._send(request, permit)
        if envelope is not None:
            reply.add_done_callback(
                lambda future: envelope.scope.cancel() if future.cancelled() else None
            )
        return cast("asyncio.Future[ReplyT]", reply)

    def attach(self, lane: Lane) -> None:
        """Let the device thread look at a lane whenever it is idle."""
        self._device.attach(lane)

    def takes_steps(self) -> bool:
        """Say whether a step may run now, ahead of nothing; a move that begins waits for it."""
        is_busy = self._moving is not None or self._backlog or self._runtime.progress.fault
        return self._lifecycle.state is State.SERVING and not is_busy

    def run_step(self, step: ExecuteModel, permit: Permit) -> StepOutput:
        """Run a step that takes_steps has let in. Device thread, as is takes_steps."""
        output = self._runtime.run_step(step, permit)
        return output.result() if isinstance(output, Pending) else output

    def statistics(self) -> ActorStatistics:
        """Return the mailbox's counters."""
        return ActorStatistics(
            num_answered=self._num_answered,
            num_refused=self._num_refused,
            num_queued=len(self._backlog),
            num_in_flight=self._num_in_flight,
        )

    # -- sending -----------------------------------------------------------------------------

    def _send(
        self, request: Request[Any], permit: Permit | None = None
    ) -> tuple[asyncio.Future[Any], _Envelope | None]:
        if self._lifecycle.state is State.CLOSED:
            raise _closed()
        message = type(request)
        if message is GetStatus or message is GetHealth:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            report = status_of if message is GetStatus else health_of
            answer.set_result(report(self._moment()))
            return answer, None
        self._notice_fault()
        waiting = len(self._backlog) + self._num_in_flight
        if waiting >= self._config.supervision.mailbox_limit and message not in _ALWAYS_ACCEPTED:
            self._num_refused += 1
            raise MailboxFull(
                f"{waiting} messages wait, the limit is "
                f"{self._config.supervision.mailbox_limit}; try again after a reply"
            )
        permit = permit if permit is not None else Permit()
        if not self._backlog and self._moving is None:
            start = self._lifecycle.live.get(message)
            if start is not None:  # nothing is ahead of it, and it moves nothing
                return self._start(start, request, permit), None
        envelope = _Envelope(request, permit)
        self._backlog.append(envelope)
        self._wake.set()
        return envelope.reply, envelope

    def _start(self, start: Start, request: Request[Any], permit: Permit) -> asyncio.Future[Any]:
        try:
            reply = start(self._runtime, request, permit)
        except Exception as error:  # refused, or a fault of our own: its sender learns of it
            reply = asyncio.get_running_loop().create_future()
            reply.set_exception(error)
        self._num_in_flight += 1
        reply.add_done_callback(self._landed)
        return reply

    def _landed(self, reply: asyncio.Future[Any]) -> None:
        self._num_in_flight -= 1
        self._num_answered += 1
        self._notice_fault()

    def _notice_fault(self) -> None:
        is_over = self._lifecycle.state in (State.FAULTED, State.CLOSED)
        if self._runtime.progress.fault is not None and not is_over:
            self._lifecycle.fault()
            self.events.look()

    # -- the single consumer -----------------------------------------------------------------

    async def _consume(self) -> None:
        try:
            while self._lifecycle.state is not State.CLOSED:
                while not self._backlog:
                    self._wake.clear()
                    await self._wake.wait()
                await self._deliver(self._backlog.popleft())
        finally:
            self._lifecycle.close()
            while self._backlog:
                envelope = self._backlog.popleft()
                envelope.settle(None, _closed())
                envelope.finished.set()

    async def _deliver(self, envelope: _Envelope) -> None:
        message = type(envelope.request)
        if envelope.reply.cancelled():
            self._refuse(envelope, RequestCancelled("withdrawn before its turn came"))
        else:
            self._notice_fault()
            try:
                self._lifecycle.check(message)
            except IllegalMessage as error:
                self._num_refused += 1
                self._refuse(envelope, error)
            else:
                start = self._lifecycle.live.get(message)
                if start is None:
                    await self._move(envelope)
                else:  # not awaited: what is in place pipelines
                    started = self._start(start, envelope.request, envelope.permit)
                    started.add_done_callback(envelope.settle_from)
        envelope.finished.set()

    def _refuse(self, envelope: _Envelope, error: WorkerError) -> None:
        """Answer what is not carried out; a step in its place behind those ahead of it."""
        if isinstance(envelope.request, ExecuteModel):
            skipped = self._device.submit(self._runtime.skip_step, envelope.request.step_id)
            skipped.add_done_callback(lambda _: envelope.settle(None, error))
        else:
            envelope.settle(None, error)

    async def _move(self, envelope: _Envelope) -> None:
        envelope.since = time.monotonic()
        self._runtime.progress.move_bytes = (0, 0)
        self._moving = envelope
        try:
            with envelope.scope:
                await self._device.drain()  # the steps ahead of it finish first
                self._notice_fault()
                envelope.permit.start()
                envelope.settle(await self._lifecycle.move(envelope.request), None)
                self._last_error = ""
        except (DeadlineExceeded, RequestCancelled, SessionError) as error:
            envelope.settle(None, error)  # it never began
        except WorkerError as error:
            error.state = error.state or self._lifecycle.state.value
            if isinstance(error, WorkerFaulted):
                self._runtime.progress.fault = error
            self._last_error = f"{error.code}: {error.message}"
            envelope.settle(None, error)
        except Exception as error:
            # A fault of our own: the move was undone, the sender learns of it, we serve on.
            self._last_error = f"{type(error).__name__}: {error}"
            envelope.settle(None, error)
        finally:
            self._moving = None
            self._num_answered += 1
            # Withdrawn by its sender, or the worker is being stopped: nobody waits for ever.
            envelope.settle(None, _closed())
            envelope.finished.set()
            self.events.look()

    # -- how it is ---------------------------------------------------------------------------

    def activity(self) -> Activity | None:
        """Say what the device is busy with and since when; None when nothing runs."""
        return activity_of(self._moment())

    def give_up(self, error: DeviceFault) -> None:
        """End the worker from outside, because its device does not come back.

        The state is FAULTED, everything that waits is answered with the error, and the device
        thread is left to itself. GetStatus, GetHealth and Shutdown still work.
        """
        self._runtime.progress.fault = error
        self._device.abandon(error)
        self._notice_fault()

    def note_loop_lag(self, lag_s: float) -> None:
        """Take in how late the event loop was, for GetHealth."""
        self._loop_lag_s = lag_s

    def _moment(self) -> Moment:
        self._notice_fault()
        moving = self._moving
        return Moment(
            state=self._lifecycle.state,
            runtime=self._runtime,
            supervision=self._config.supervision,
            now=time.monotonic(),
            moving=message_tag(type(moving.request).__name__) if moving is not None else "",
            moving_since=moving.since if moving is not None else 0.0,
            num_waiting=len(self._backlog),
            num_in_flight=self._num_in_flight,
            last_error=self._last_error,
            loop_lag_s=self._loop_lag_s,
            started=self._started,
        )
