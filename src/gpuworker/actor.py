"""Layer 4. The actor: one mailbox, one consumer, one device thread.

Steps pipeline, moves drain. A message means what it means when its turn comes; what it means
depends on the order of arrival and never on timing. GetStatus does not queue.
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

from gpuworker.config import WorkerConfig
from gpuworker.device.thread import DeviceThread
from gpuworker.errors import (
    IllegalMessage,
    MailboxFull,
    WorkerClosed,
    WorkerError,
    WorkerFaulted,
)
from gpuworker.lifecycle import Lifecycle, State
from gpuworker.messages import (
    GetStatus,
    Health,
    Reply,
    ReplyT,
    Request,
    Shutdown,
    Status,
    message_tag,
)
from gpuworker.runtime import Runtime, create_runtime
from gpuworker.states import TABLES

__all__ = ["ActorStatistics", "GPUWorker"]


class ActorStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What went through the mailbox since the start."""

    num_answered: int
    num_refused: int
    num_queued: int
    num_in_flight: int


class _Envelope:
    """A request that waits for its turn, and what its sender waits for."""

    __slots__ = ("finished", "reply", "request", "scope", "since")

    def __init__(self, request: Request[Any]) -> None:
        self.request = request
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

    def submit(self, request: Request[ReplyT]) -> asyncio.Future[ReplyT]:
        """Send a request without waiting; the future is what ask would return or raise.

        Raises MailboxFull or WorkerClosed at once. Cancelling the future withdraws a message
        whose turn has not come, and cancels and undoes a move under way.
        """
        reply, envelope = self._send(request)
        if envelope is not None:
            reply.add_done_callback(
                lambda future: envelope.scope.cancel() if future.cancelled() else None
            )
        return cast("asyncio.Future[ReplyT]", reply)

    def statistics(self) -> ActorStatistics:
        """Return the mailbox's counters."""
        return ActorStatistics(
            num_answered=self._num_answered,
            num_refused=self._num_refused,
            num_queued=len(self._backlog),
            num_in_flight=self._num_in_flight,
        )

    # -- sending -----------------------------------------------------------------------------

    def _send(self, request: Request[Any]) -> tuple[asyncio.Future[Any], _Envelope | None]:
        if self._lifecycle.state is State.CLOSED:
            raise _closed()
        if type(request) is GetStatus:
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            answer.set_result(self._status())
            return answer, None
        self._notice_fault()
        waiting = len(self._backlog) + self._num_in_flight
        if waiting >= self._config.supervision.mailbox_limit and type(request) is not Shutdown:
            self._num_refused += 1
            raise MailboxFull(
                f"{waiting} messages wait, the limit is "
                f"{self._config.supervision.mailbox_limit}; try again after a reply"
            )
        if not self._backlog and self._moving is None:
            start = self._lifecycle.live.get(type(request))
            if start is not None:  # nothing is ahead of it, and it moves nothing
                return self._start(start, request), None
        envelope = _Envelope(request)
        self._backlog.append(envelope)
        self._wake.set()
        return envelope.reply, envelope

    def _start(
        self, start: Callable[[Any, Any], asyncio.Future[Any]], request: Request[Any]
    ) -> asyncio.Future[Any]:
        try:
            reply = start(self._runtime, request)
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
        if self._runtime.progress.fault is not None:
            self._lifecycle.fault()

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
        if not envelope.reply.cancelled():
            self._notice_fault()
            try:
                self._lifecycle.check(message)
            except IllegalMessage as error:
                self._num_refused += 1
                envelope.settle(None, error)
            else:
                start = self._lifecycle.live.get(message)
                if start is None:
                    await self._move(envelope)
                else:  # not awaited: what is in place pipelines
                    self._start(start, envelope.request).add_done_callback(envelope.settle_from)
        envelope.finished.set()

    async def _move(self, envelope: _Envelope) -> None:
        envelope.since = time.monotonic()
        self._moving = envelope
        try:
            with envelope.scope:
                await self._device.drain()  # the steps ahead of it finish first
                self._notice_fault()
                envelope.settle(await self._lifecycle.move(envelope.request), None)
                self._last_error = ""
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

    def _status(self) -> Status:
        runtime, progress, now = self._runtime, self._runtime.progress, time.monotonic()
        self._notice_fault()
        running = progress.running
        running_s = max(now - progress.running_since, 0.0) if running is not None else 0.0
        health: Health = "ok"
        if self._lifecycle.state is State.FAULTED:
            health = "faulted"
        elif running_s > self._config.supervision.step_limit_s:
            health = "stalled"
        moving = self._moving
        last_step_at = progress.last_step_at
        return Status(
            state=self._lifecycle.state.value,
            health=health,
            weights=runtime.weights_truth(),
            asleep=runtime.asleep(),
            memory=runtime.memory(),
            process_bytes=runtime.process_bytes(),
            kv_epoch=runtime.kv_epoch(),
            weight_version=runtime.weight_version(),
            num_requests=runtime.num_requests(),
            num_queued=len(self._backlog) + max(self._num_in_flight - (running is not None), 0),
            num_steps=progress.num_steps,
            running_step_id=running,
            running_step_s=running_s,
            moving=message_tag(type(moving.request).__name__) if moving is not None else "",
            moving_s=now - moving.since if moving is not None else 0.0,
            last_step_s=None if last_step_at is None else now - last_step_at,
            last_error=progress.last_error or self._last_error,
        )
