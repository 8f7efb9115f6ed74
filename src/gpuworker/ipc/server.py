"""Layer 0. A worker's endpoint: bytes in, submit, bytes out; whatever comes, it goes on."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import zmq

from gpuworker.errors import (
    ConfigError,
    InvalidRequest,
    MalformedMessage,
    UnsupportedVersion,
    WorkerError,
)
from gpuworker.events import EventSource
from gpuworker.ipc.answers import body_of, reply_of, unexpected
from gpuworker.ipc.curve import ServerKeys, authenticating
from gpuworker.ipc.endpoint import check_endpoint, events_endpoint, ipc_path
from gpuworker.ipc.epoch_file import EpochFile, epoch_path
from gpuworker.ipc.lane import DirectWorker, RingLane
from gpuworker.ipc.ledger import NUM_REPLAYS
from gpuworker.ipc.lock import owned
from gpuworker.ipc.loop_socket import LoopSocket
from gpuworker.ipc.publisher import Publisher
from gpuworker.ipc.ring_memory import can_have_rings
from gpuworker.ipc.sender import Letter, Sender
from gpuworker.ipc.served import SubmitWorker
from gpuworker.ipc.session import Call, Session, SessionBook
from gpuworker.ipc.sockets import configure_server
from gpuworker.ipc.wire import (
    MAX_BODY_BYTES,
    VERSION,
    Kind,
    ReplyHeader,
    RequestHeader,
    decode_request,
    decode_request_header,
    failure_of,
    reply_header,
)
from gpuworker.messages import (
    Cancel,
    Cancelled,
    Closed,
    DropRequests,
    EndSession,
    ExecuteModel,
    GetHealth,
    HealthReport,
    Hello,
    OpenRing,
    Reply,
    Request,
    RingOpened,
    SessionEnded,
    Welcome,
)

__all__ = ["FEATURES", "Server", "ServerStatistics", "SubmitWorker", "serve"]

FEATURES = ("replay", "cancel", "deadline", "ring")
"""What minor versions may add to; a name that is here stays."""
_log = logging.getLogger(__name__)

_OWED_PATIENCE_S = 1.0
_LOG_INTERVAL_S = 1.0
"""Malformed messages are logged at most this often; all are counted."""


class ServerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """What went over the socket since the start."""

    num_requests: int
    num_replies: int
    num_malformed: int
    num_undeliverable: int
    """Replies whose client had gone or did not read."""


class Server:
    """Serves one worker on one endpoint.

    It decodes and submits in the order of arrival, and sends each answer as soon as it is
    there. Bytes that are no message are counted and, when they say whom to answer, answered;
    they never end it. The endpoint is locked while it is served. Who may say what is
    SessionBook's affair.
    """

    def __init__(
        self,
        worker: SubmitWorker,
        endpoint: str,
        *,
        epoch_file: Path | None = None,
        keys: ServerKeys | None = None,
        events: EventSource | None = None,
        direct: DirectWorker | None = None,
    ) -> None:
        """Check the endpoint; raises ConfigError. Nothing is bound yet.

        keys encrypt the connection and let only those in whose keys they list; without, tcp
        takes loopback addresses only. events, of the worker, are published beside the
        endpoint. direct is the worker when its device thread may read rings. epoch_file
        remembers the highest session epoch across restarts; None chooses a place by the
        endpoint, see epoch_path.
        """
        self._worker = worker
        self._keys = keys
        self._endpoint = check_endpoint(endpoint, encrypted=keys is not None)
        self._epoch_file = epoch_file if epoch_file is not None else epoch_path(endpoint)
        self._boot_id = secrets.token_hex(8)
        self._source = events
        self._direct = direct
        self._lane: RingLane | None = None
        self._events = ""  # where they are published
        self._book = SessionBook(EpochFile(None), worker.config.limits.window)
        self._recording = asyncio.Lock()
        self._greetings: set[asyncio.Task[None]] = set()
        self._sender: Sender  # from run on, when the socket is there
        self._num_pending = 0
        self._next_log_s = 0.0
        self._num_requests = 0
        self._num_malformed = 0

    @property
    def boot_id(self) -> str:
        """Name of this start of the worker, 16 hex digits; every reply carries it."""
        return self._boot_id

    @property
    def epoch(self) -> int:
        """Epoch of the present session; 0 without one, and before run."""
        return self._book.epoch

    def statistics(self) -> ServerStatistics:
        """Return the counters of a server that runs or has run."""
        return ServerStatistics(
            num_requests=self._num_requests,
            num_replies=self._sender.num_sent,
            num_malformed=self._num_malformed,
            num_undeliverable=self._sender.num_undeliverable,
        )

    async def run(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Bind and serve until the reply to Shutdown was sent, until finish, or until cancelled.

        After Shutdown the requests that were accepted before still get their answers. on_ready
        gets the endpoint as bound, with the port that the system chose. Raises ConfigError when
        another worker lives on the endpoint or it cannot be bound.
        """
        async with AsyncExitStack() as stack:
            stack.enter_context(owned(ipc_path(self._endpoint)))
            context = stack.enter_context(zmq.Context())
            await stack.enter_async_context(authenticating(context, self._keys))
            self._book = SessionBook(EpochFile(self._epoch_file), self._worker.config.limits.window)
            socket = stack.enter_context(context.socket(zmq.ROUTER))
            configure_server(socket, self._endpoint, self._keys)
            try:
                socket.bind(self._endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot bind {self._endpoint}: {error.strerror}") from error
            if self._source is not None:
                publisher = Publisher(self._source, self._boot_id)
                at = events_endpoint(self._endpoint)
                self._events = publisher.start(context, at, self._keys)
                stack.callback(publisher.stop)
                stack.push_async_callback(_stop, asyncio.create_task(publisher.run()))
            wire = LoopSocket(socket, self._receive)
            self._sender = Sender(wire, self._header)
            stack.push_async_callback(_stop, asyncio.create_task(self._sender.run()))
            stack.push_async_callback(lambda: _stop(*self._greetings))
            stack.callback(self._end_lane)
            stack.callback(wire.stop)
            wire.start()
            if on_ready is not None:
                on_ready(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0"))
            await self._sender.closing.wait()
            wire.stop()
            await self._answer_owed()

    def finish(self) -> None:
        """Take in nothing more; run returns when what was accepted has been answered."""
        self._sender.closing.set()

    def _receive(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        self._accept(peer, rest)

    def _accept(self, peer: bytes, frames: list[bytes], lane: RingLane | None = None) -> None:
        try:
            header = decode_request_header(frames)
        except MalformedMessage as error:
            self._count_malformed(peer, error)
            if isinstance(error, UnsupportedVersion):
                self._answer(peer, 0, 0, failure_of(error), lane)
            return  # otherwise nobody can be answered
        self._num_requests += 1
        try:
            self._take(peer, header, decode_request(frames), lane)
        except WorkerError as error:
            if isinstance(error, MalformedMessage):
                self._count_malformed(peer, error)
            self._answer(peer, header.corr, 0, failure_of(error), lane)
        except Exception as error:  # a fault of our own: its sender learns of it, we serve on
            _log.exception("a message of peer %s met a fault of ours", peer.hex())
            self._answer(peer, header.corr, 0, unexpected(error), lane)

    def _take(
        self, peer: bytes, header: RequestHeader, request: Request[Any], lane: RingLane | None
    ) -> None:
        if isinstance(request, Hello):
            self._greet(peer, header.corr, request)
            return
        if isinstance(request, Cancel):
            outcome = self._book.cancel(peer, request.corr)
            self._answer(peer, header.corr, 0, Cancelled(outcome=outcome), lane)
            return
        if isinstance(request, OpenRing):
            opened = self._open_ring(self._book.owner(peer, header))
            self._answer(peer, header.corr, 0, opened, lane)
            return
        if isinstance(request, EndSession):
            self._book.give_up(self._book.owner(peer, header))
            self._answer(peer, header.corr, 0, SessionEnded(), lane)
            self._end_lane()
            return
        ring = self._lane if lane is None and isinstance(request, ExecuteModel) else None
        if ring is not None and ring.session.peer == peer:
            raise InvalidRequest("this session has a ring; its steps go there, in one order")
        call = self._book.accept(peer, header, type(request))
        if header.seq and not call.seq and call.session is not None:
            body = call.session.ledger.answer_of(header.seq, header.corr)
            if body is not None:
                self._send(Letter(peer, header.corr, header.seq, body), lane)
            return
        reply = self._worker.submit(request, permit=call.permit)
        self._book.begin(call)
        self._num_pending += 1
        reply.add_done_callback(partial(self._finished, call, lane))

    def _finished(self, call: Call, lane: RingLane | None, done: asyncio.Future[Any]) -> None:
        self._num_pending -= 1
        reply = reply_of(done)
        is_last = isinstance(reply, Closed)
        if (stale := self._book.end(call)) is not None:
            reply = failure_of(stale)
        elif isinstance(reply, HealthReport):
            reply = msgspec.structs.replace(
                reply, boot_id=self._boot_id, session=self._book.health(), events=self._events
            )
        body = body_of(reply)
        others: list[int] = []
        if call.seq and call.session is not None:  # before the answer: a lane may go on with it
            others = call.session.ledger.finish(call.seq, body)
        self._send(Letter(call.peer, call.corr, call.seq, body, is_last), lane)
        for corr in others:
            self._send(Letter(call.peer, corr, call.seq, body), lane)

    def _answer(
        self, peer: bytes, corr: int, seq: int, reply: Reply, lane: RingLane | None = None
    ) -> None:
        self._send(Letter(peer, corr, seq, body_of(reply)), lane)

    def _send(self, letter: Letter, lane: RingLane | None) -> None:
        """Send an answer the way that its request came."""
        if lane is None:
            self._sender.send(letter)
            return
        lane.put(letter.corr, letter.seq, letter.body)
        if letter.is_last:
            self._sender.closing.set()

    # -- a ring ------------------------------------------------------------------------------

    def _open_ring(self, session: Session) -> RingOpened:
        if self._direct is None:
            raise InvalidRequest("this worker takes no ring; go on over the socket")
        if session.calls:
            number = len(session.calls)
            raise InvalidRequest(f"{number} requests are unanswered; open a ring before the first")
        self._end_lane()

        def receive(frames: list[bytes]) -> None:
            self._accept(session.peer, frames, lane)

        lane = RingLane(self._direct, self._book, session, self._boot_id, receive)
        self._lane = lane
        self._direct.attach(lane)
        return lane.opened()

    def _end_lane(self) -> None:
        if self._lane is not None:
            self._lane.end()
            self._lane = None

    # -- sessions ----------------------------------------------------------------------------

    def _greet(self, peer: bytes, corr: int, hello: Hello) -> None:
        if not hello.min_version <= VERSION <= hello.max_version:
            raise UnsupportedVersion(
                f"versions {hello.min_version} to {hello.max_version} are not spoken here; "
                f"version {VERSION} is"
            )
        session = self._book.claim(peer, hello)
        self._end_lane()
        task = asyncio.create_task(self._welcome(corr, hello, session), name="gpuworker hello")
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _welcome(self, corr: int, hello: Hello, session: Session) -> None:
        try:
            async with self._recording:  # one writer of the file at a time
                await asyncio.to_thread(self._book.record, session)
            await self._worker.submit(DropRequests())
            health: HealthReport = await self._worker.submit(GetHealth())
            self._book.welcome(session)
        except WorkerError as error:
            self._answer(session.peer, corr, 0, failure_of(error))
            return
        welcome = Welcome(
            version=VERSION,
            boot_id=self._boot_id,
            epoch=session.epoch,
            state=health.state,
            window=self._book.window,
            num_replays=NUM_REPLAYS,
            lease_ms=hello.lease_ms,
            features=self._features(hello),
            max_body_bytes=MAX_BODY_BYTES,
            events=self._events,
        )
        self._answer(session.peer, corr, 0, welcome)

    def _features(self, hello: Hello) -> tuple[str, ...]:
        has_ring = self._direct is not None and can_have_rings()
        has = [f for f in FEATURES if f != "ring" or has_ring]
        return tuple(f for f in has if not hello.features or f in hello.features)

    async def _answer_owed(self) -> None:
        """Wait until what was accepted before Shutdown is answered."""
        with suppress(TimeoutError):  # a worker that does not answer it all must not hold us
            async with asyncio.timeout(_OWED_PATIENCE_S):
                while self._num_pending or self._sender.num_late:
                    self._sender.progress.clear()
                    await self._sender.progress.wait()

    def _header(self, letter: Letter) -> bytes:
        return reply_header(
            ReplyHeader(Kind.REPLY, letter.corr, self._book.epoch, letter.seq, self._boot_id)
        )

    def _count_malformed(self, peer: bytes, error: MalformedMessage) -> None:
        self._num_malformed += 1
        now = asyncio.get_running_loop().time()
        if now >= self._next_log_s:
            self._next_log_s = now + _LOG_INTERVAL_S
            _log.warning(
                "dropped a malformed message of peer %s (%d since the start): %s",
                peer.hex(),
                self._num_malformed,
                error,
            )


async def serve(
    worker: SubmitWorker,
    endpoint: str,
    *,
    keys: ServerKeys | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Serve a worker on an endpoint until it was shut down; see Server.run."""
    await Server(worker, endpoint, keys=keys).run(on_ready)


async def _stop(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
