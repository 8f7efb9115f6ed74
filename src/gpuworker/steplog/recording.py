"""Layer 5. A worker whose every request and answer goes to a step log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, cast

import msgspec

from gpuworker.config import WorkerConfig
from gpuworker.errors import WorkerError
from gpuworker.messages import ExecuteModel, Failure, Reply, ReplyT, Request
from gpuworker.permit import Permit
from gpuworker.steplog.records import End, EpochChange, LoggedReply, LoggedRequest
from gpuworker.steplog.writer import LogWriter

__all__ = ["RecordingStatistics", "RecordingWorker", "failure_of"]

_MAX_REASON = 1000
_encoder = msgspec.msgpack.Encoder()


class RecordedWorker(Protocol):
    """What is needed of the worker behind."""

    @property
    def config(self) -> WorkerConfig:
        """The configuration the worker was given."""

    def submit(self, request: Request[Any], *, permit: Permit | None = None) -> asyncio.Future[Any]:
        """Accept a request without waiting, in order; may raise a WorkerError at once."""


class RecordingStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How much was recorded."""

    num_requests: int
    num_replies: int
    num_bytes: int
    """Of the log."""
    stopped: str
    """Why recording was given up; empty while it goes on."""


class RecordingWorker:
    """Passes everything on to a worker and writes it down.

    A request is recorded when the worker has accepted it, its answer when it lands and before
    anybody else learns of it; what the worker refuses at once, MailboxFull for example, was
    never there. Whatever happens to the log, the worker is none the wiser.
    """

    def __init__(
        self, worker: RecordedWorker, log: LogWriter, *, epoch: Callable[[], int] = int
    ) -> None:
        """Record to a log that has begun; epoch tells whose session it is, 0 for nobody's."""
        self._worker = worker
        self._log = log
        self._epoch_now = epoch
        self._epoch = 0
        self._num_requests = 0
        self._num_replies = 0
        self._num_steps = 0
        self._started = time.monotonic()

    @property
    def config(self) -> WorkerConfig:
        """The configuration of the worker."""
        return self._worker.config

    def submit(
        self, request: Request[ReplyT], *, permit: Permit | None = None
    ) -> asyncio.Future[ReplyT]:
        """Send a request without waiting, as the worker's own submit."""
        reply = self._worker.submit(request, permit=permit)
        if not self._log.is_stopped:
            self._record(request, reply)
        return cast("asyncio.Future[ReplyT]", reply)

    async def ask(self, request: Request[ReplyT]) -> ReplyT:
        """Send a request and return its reply, or raise what it was answered with.

        Cancelling this withdraws the request like cancelling the future of submit: it does not
        wait until a move under way is undone.
        """
        return await self.submit(request)

    def statistics(self) -> RecordingStatistics:
        """Return how much was recorded, and whether it goes on."""
        log = self._log.statistics()
        return RecordingStatistics(
            num_requests=self._num_requests,
            num_replies=self._num_replies,
            num_bytes=log.num_bytes,
            stopped=log.stopped,
        )

    def finish(self) -> None:
        """Note that the log ends in order; nothing may be recorded after it."""
        self._log.append(
            End(
                num_requests=self._num_requests,
                num_replies=self._num_replies,
                offset_s=time.monotonic() - self._started,
            )
        )

    def _record(self, request: Request[Any], reply: asyncio.Future[Any]) -> None:
        now = time.monotonic()
        try:
            body = _encoder.encode(request)
        except (TypeError, ValueError, OverflowError) as error:  # accepted here, but no message
            self._log.give_up(f"{type(request).__name__} cannot be encoded: {error}")
            return
        epoch = self._epoch_now()
        if epoch != self._epoch:
            self._epoch = epoch
            self._num_steps = 0
            self._log.append(EpochChange(epoch=epoch, offset_s=now - self._started))
        is_step = isinstance(request, ExecuteModel)
        self._num_steps += is_step
        index = self._num_requests
        self._num_requests += 1
        self._log.append(
            LoggedRequest(
                index=index,
                body=body,
                epoch=epoch,
                seq=self._num_steps if is_step else 0,
                offset_s=now - self._started,
            )
        )
        reply.add_done_callback(partial(self._landed, index, now))

    def _landed(self, index: int, since: float, reply: asyncio.Future[Any]) -> None:
        if self._log.is_stopped:
            return
        duration_s = time.monotonic() - since
        self._log.append(LoggedReply(index=index, body=_body(reply), duration_s=duration_s))
        self._num_replies += 1


def failure_of(error: BaseException) -> Failure:
    """Turn an error into the answer that travels."""
    known = error if isinstance(error, WorkerError) else None
    text = known.message if known is not None else f"{type(error).__name__}: {error}"
    return Failure(
        code=known.code if known is not None else WorkerError.code,
        # A path in a message may hold bytes that are no text.
        message=text.encode("utf-8", "backslashreplace").decode()[:_MAX_REASON],
        state=known.state if known is not None else "",
        accepted=known.accepted if known is not None else (),
        retryable=known is not None and known.retryable,
    )


def _body(done: asyncio.Future[Any]) -> bytes:
    if done.cancelled():
        return b""
    error = done.exception()
    reply: Reply = done.result() if error is None else failure_of(error)
    return _encoder.encode(reply)
