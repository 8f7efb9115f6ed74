"""Layer 0. A worker's endpoint: bytes in, submit, bytes out; whatever comes, it goes on."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq

from gpuworker.config import WorkerConfig
from gpuworker.errors import (
    ConfigError,
    MalformedMessage,
    UnsupportedVersion,
    WorkerClosed,
    WorkerError,
)
from gpuworker.events import EventSource
from gpuworker.ipc.curve import ServerKeys, authenticating
from gpuworker.ipc.endpoint import check_endpoint, events_endpoint, ipc_path
from gpuworker.ipc.epoch_file import EpochFile, epoch_path
from gpuworker.ipc.ledger import NUM_REPLAYS
from gpuworker.ipc.lock import owned
from gpuworker.ipc.loop_socket import LoopSocket
from gpuworker.ipc.publisher import Publisher
from gpuworker.ipc.sender import Letter, Sender
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
    encode_body,
    failure_of,
    reply_header,
)
from gpuworker.messages import (
    Cancel,
    Cancelled,
    Closed,
    DropRequests,
    EndSession,
    GetHealth,
    HealthReport,
    Hello,
    Reply,
    Request,
    SessionEnded,
    Welcome,
)
from gpuworker.permit import Permit

__all__ = ["FEATURES", "Server", "ServerStatistics", "SubmitWorker", "serve"]

FEATURES = ("replay", "cancel", "deadline")
"""What minor versions may add to; a name that is here stays."""
_log = logging.getLogger(__name__)

_OWED_PATIENCE_S = 1.0
_LOG_INTERVAL_S = 1.0
"""Malformed messages are logged at most this often; all are counted."""


class SubmitWorker(Protocol):
    """What a server needs of a worker."""

    @property
    def config(self) -> WorkerConfig:
        """The configuration the worker was given."""

    def submit(self, request: Request[Any], *, permit: Permit | None = None) -> asyncio.Future[Any]:
        """Accept a request without waiting, in order; may raise a WorkerError at once."""


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
    ) -> None:
        """Check the endpoint; raises ConfigError. Nothing is bound yet.

        keys encrypt the connection and let only those in whose keys they list; without, tcp
        takes loopback addresses only. events, of the worker, are published beside the
        endpoint. epoch_file remembers the highest session epoch across
        restarts; None chooses a place by the endpoint, see epoch_path.
        """
        self._worker = worker
        self._keys = keys
        self._endpoint = check_endpoint(endpoint, encrypted=keys is not None)
        self._epoch_file = epoch_file if epoch_file is not None else epoch_path(endpoint)
        self._boot_id = secrets.token_hex(8)
        self._source = events
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
            stack.push_async_callback(self._end_greetings)
            stack.callback(wire.stop)
            wire.start()
            if on_ready is not None:
                on_ready(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0"))
            await self._sender.closing.wait()
            wire.stop()
            await self._answer_owed()

    async def _end_greetings(self) -> None:
        await _stop(*self._greetings)

    def finish(self) -> None:
        """Take in nothing more; run returns when what was accepted has been answered."""
        self._sender.closing.set()

    def _receive(self, frames: list[bytes]) -> None:
        peer, *rest = frames
        self._accept(peer, rest)

    def _accept(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            header = decode_request_header(frames)
        except MalformedMessage as error:
            self._count_malformed(peer, error)
            if isinstance(error, UnsupportedVersion):
                self._post(peer, 0, 0, failure_of(error))
            return  # otherwise nobody can be answered
        self._num_requests += 1
        try:
            self._take(peer, header, decode_request(frames))
        except WorkerError as error:
            if isinstance(error, MalformedMessage):
                self._count_malformed(peer, error)
            self._post(peer, header.corr, 0, failure_of(error))
        except Exception as error:  # a fault of our own: its sender learns of it, we serve on
            _log.exception("a message of peer %s met a fault of ours", peer.hex())
            self._post(peer, header.corr, 0, _unexpected(error))

    def _take(self, peer: bytes, header: RequestHeader, request: Request[Any]) -> None:
        if isinstance(request, Hello):
            self._greet(peer, header.corr, request)
            return
        if isinstance(request, Cancel):
            outcome = self._book.cancel(peer, request.corr)
            self._post(peer, header.corr, 0, Cancelled(outcome=outcome))
            return
        if isinstance(request, EndSession):
            self._book.give_up(self._book.owner(peer, header))
            self._post(peer, header.corr, 0, SessionEnded())
            return
        call = self._book.accept(peer, header, type(request))
        if header.seq and not call.seq and call.session is not None:
            body = call.session.ledger.answer_of(header.seq, header.corr)
            if body is not None:
                self._sender.send(Letter(peer, header.corr, header.seq, body))
            return
        reply = self._worker.submit(request, permit=call.permit)
        self._book.begin(call)
        self._num_pending += 1
        reply.add_done_callback(partial(self._finished, call))

    def _finished(self, call: Call, done: asyncio.Future[Any]) -> None:
        self._num_pending -= 1
        reply = _reply(done)
        is_last = isinstance(reply, Closed)
        if (stale := self._book.end(call)) is not None:
            reply = failure_of(stale)
        elif isinstance(reply, HealthReport):
            reply = msgspec.structs.replace(
                reply, boot_id=self._boot_id, session=self._book.health(), events=self._events
            )
        body = _body(reply)
        self._sender.send(Letter(call.peer, call.corr, call.seq, body, is_last))
        if call.seq and call.session is not None:
            for corr in call.session.ledger.finish(call.seq, body):
                self._sender.send(Letter(call.peer, corr, call.seq, body))

    def _post(self, peer: bytes, corr: int, seq: int, reply: Reply) -> None:
        self._sender.send(Letter(peer, corr, seq, _body(reply)))

    # -- sessions ----------------------------------------------------------------------------

    def _greet(self, peer: bytes, corr: int, hello: Hello) -> None:
        if not hello.min_version <= VERSION <= hello.max_version:
            raise UnsupportedVersion(
                f"versions {hello.min_version} to {hello.max_version} are not spoken here; "
                f"version {VERSION} is"
            )
        session = self._book.claim(peer, hello)
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
            self._post(session.peer, corr, 0, failure_of(error))
            return
        welcome = Welcome(
            version=VERSION,
            boot_id=self._boot_id,
            epoch=session.epoch,
            state=health.state,
            window=self._book.window,
            num_replays=NUM_REPLAYS,
            lease_ms=hello.lease_ms,
            features=tuple(f for f in FEATURES if not hello.features or f in hello.features),
            max_body_bytes=MAX_BODY_BYTES,
            events=self._events,
        )
        self._post(session.peer, corr, 0, welcome)

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


def _body(reply: Reply) -> bytes:
    try:
        return encode_body(reply)
    except MalformedMessage as error:
        return encode_body(failure_of(error))


def _reply(done: asyncio.Future[Any]) -> Reply:
    if done.cancelled():
        return failure_of(WorkerClosed("the request was withdrawn"))
    error = done.exception()
    if error is None:
        reply: Reply = done.result()
        return reply
    if isinstance(error, WorkerError):
        return failure_of(error)
    _log.error("a request failed unexpectedly", exc_info=error)
    return _unexpected(error)


def _unexpected(error: BaseException) -> Reply:
    return failure_of(WorkerError(f"{type(error).__name__}: {error}"))
