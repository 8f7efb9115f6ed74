"""Layer 0. The worker's end of a ring: steps straight on the device thread, the rest in order.

A hand-over between threads takes longer than everything else that happens to a step on its way,
so the device thread itself reads the ring when it has nothing to do. What is no step, and steps
at a time when a move is under way or messages wait, it hands to the event loop, where they go
the way of all messages; it takes steps itself again when all of those are answered. So the order
is the same as on the socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from gpuworker.errors import InvalidRequest, MalformedMessage, WorkerError
from gpuworker.ipc.answers import body_of, unexpected
from gpuworker.ipc.ring_memory import WorkerRings
from gpuworker.ipc.session import Session, SessionBook
from gpuworker.ipc.wire import (
    Kind,
    ReplyHeader,
    RequestHeader,
    decode_request,
    decode_request_header,
    failure_of,
    reply_header,
)
from gpuworker.messages import ExecuteModel, Reply, RingOpened, StepOutput
from gpuworker.permit import Permit

__all__ = ["DirectWorker", "RingLane"]

_log = logging.getLogger(__name__)


class DirectWorker(Protocol):
    """A worker whose device thread reads rings."""

    def attach(self, lane: RingLane) -> None:
        """Let the device thread look at a lane whenever it has nothing to do. Event loop."""

    def takes_steps(self) -> bool:
        """Say whether a step may run now, ahead of nothing. Device thread."""

    def run_step(self, step: ExecuteModel, permit: Permit) -> StepOutput:
        """Run a step; raises WorkerError. Device thread."""


class RingLane:
    """Serves one session's ring. Methods belong to the device thread but where they say so."""

    def __init__(
        self,
        worker: DirectWorker,
        book: SessionBook,
        session: Session,
        boot_id: str,
        receive: Callable[[list[bytes]], None],
    ) -> None:
        """Make the memory; raises InvalidRequest. receive takes a message in on the event loop."""
        self.session = session
        self._worker = worker
        self._book = book
        self._boot_id = boot_id
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._rings = WorkerRings()
        self._num_forwarded = 0  # counted by the device thread
        self._num_answered = 0  # of these; counted by the event loop
        self._is_over = False

    @property
    def is_over(self) -> bool:
        """Whether nothing is taken in any more. Any thread."""
        return self._is_over

    @property
    def descriptor(self) -> int:
        """What becomes readable when a record comes."""
        return self._rings.request_bell.descriptor

    def opened(self) -> RingOpened:
        """Say what the client opens. Event loop."""
        return self._rings.opened()

    def end(self) -> None:
        """Take in nothing more; the device thread lets go of the memory. Any thread."""
        self._is_over = True

    def put(self, corr: int, seq: int, body: bytes) -> None:
        """Answer a message that was handed to the event loop. Event loop."""
        self._push(corr, seq, body)
        self._num_answered += 1  # last: from here on the device thread may answer steps itself

    def is_empty(self) -> bool:
        """Say whether there is nothing to take, after hearing the bell out."""
        if not self._rings.request_bell.drain():
            self.end()  # the client has gone
        return self._rings.requests.is_empty()

    def take(self) -> bool:
        """Take in one record, if there is one, and say whether there was."""
        try:
            record = self._rings.requests.pop()
        except MalformedMessage as error:
            _log.warning("a ring is given up: %s", error)
            self.end()
            return False
        if record is None:
            return False
        try:
            self._handle([*record])
        except Exception:  # a fault of our own: this ring is given up, the worker serves on
            _log.exception("a ring met a fault of ours and is given up")
            self.end()
        return True

    def _handle(self, frames: list[bytes]) -> None:
        self._rings.keep_own()
        try:
            header = decode_request_header(frames)
        except MalformedMessage as error:  # nobody can be answered
            _log.warning("a ring is given up: %s", error)
            self.end()
            return
        if self._num_forwarded != self._num_answered or not self._worker.takes_steps():
            self._forward(frames)
            return
        try:
            request = decode_request(frames)
        except WorkerError:
            self._forward(frames)  # its answer is made there
            return
        if isinstance(request, ExecuteModel):
            self._run(header, request)
        else:
            self._forward(frames)

    def close(self) -> None:
        """Let go of the memory."""
        self._rings.close()

    def _forward(self, frames: list[bytes]) -> None:
        self._num_forwarded += 1
        self._loop.call_soon_threadsafe(self._receive, frames)

    def _run(self, header: RequestHeader, step: ExecuteModel) -> None:
        ledger = self.session.ledger
        try:
            self._book.check(self.session, header)
            if header.seq == 0:
                raise InvalidRequest("a step needs a number in its header, from 1 on; this has 0")
            is_new = ledger.check(header.seq)
        except WorkerError as error:
            self._push(header.corr, 0, body_of(failure_of(error)))
            return
        if not is_new:
            answer = ledger.answer_of(header.seq, header.corr)
            assert answer is not None, "nothing else runs on this thread"
            self._push(header.corr, header.seq, answer)
            return
        ledger.begin(header.seq)
        body = body_of(self._compute(header, step))
        ledger.finish(header.seq, body)
        self._push(header.corr, header.seq, body)

    def _compute(self, header: RequestHeader, step: ExecuteModel) -> Reply:
        try:
            permit = Permit(header.budget_us / 1e6 if header.budget_us else None)
            output = self._worker.run_step(step, permit)
            stale = self._book.successor_of(self.session)
        except WorkerError as error:
            return failure_of(error)
        except Exception as error:  # a fault of our own: its sender learns of it, we serve on
            _log.exception("step %d met a fault of ours", step.step_id)
            return unexpected(error)
        return output if stale is None else failure_of(stale)

    def _push(self, corr: int, seq: int, body: bytes) -> None:
        if self._is_over:
            return
        header = ReplyHeader(Kind.REPLY, corr, self.session.epoch, seq, self._boot_id)
        try:
            has_room = self._rings.replies.push(reply_header(header), body)
        except MalformedMessage as error:  # too large, or the client's counter is nonsense
            _log.warning("a ring is given up: %s", error)
            has_room = False
        if has_room:
            self._rings.reply_bell.ring()
        else:
            self.end()  # its client does not read, and is told by the end of the ring
