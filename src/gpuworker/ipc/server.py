"""Layer 0. A worker's endpoint: bytes in, submit, bytes out; whatever comes, it goes on."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from gpuworker.errors import ConfigError, MalformedMessage, WorkerClosed, WorkerError
from gpuworker.ipc.endpoint import check_endpoint, ipc_path
from gpuworker.ipc.lock import owned
from gpuworker.ipc.sockets import configure_server
from gpuworker.ipc.wire import (
    Kind,
    decode_header,
    decode_request,
    encode_reply,
    failure_of,
)
from gpuworker.messages import Closed, Reply, Request

__all__ = ["Server", "ServerStatistics", "SubmitWorker", "serve"]

_log = logging.getLogger(__name__)

_SEND_PATIENCE_S = 1.0
_SEND_RETRY_S = 0.002
_BURST = 16
"""Messages that are read before the others on the event loop get their turn."""
_LOG_INTERVAL_S = 1.0
"""Malformed messages are logged at most this often; all are counted."""


class SubmitWorker(Protocol):
    """What a server needs of a worker."""

    def submit(self, request: Request[Any]) -> asyncio.Future[Any]:
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

    One task reads, decodes and submits in the order of arrival; one task encodes and sends.
    Bytes that are no message are counted and, when they say whom to answer, answered; they
    never end the loop. The endpoint is locked while it is served.
    """

    def __init__(self, worker: SubmitWorker, endpoint: str) -> None:
        """Check the endpoint; raises ConfigError. Nothing is bound yet."""
        self._worker = worker
        self._endpoint = check_endpoint(endpoint)
        self._outbox: asyncio.Queue[tuple[bytes, int, asyncio.Future[Any]]] = asyncio.Queue()
        self._num_owed = 0
        self._slow_peers: set[bytes] = set()
        self._next_log_s = 0.0
        self._num_requests = 0
        self._num_replies = 0
        self._num_malformed = 0
        self._num_undeliverable = 0

    def statistics(self) -> ServerStatistics:
        """Return the counters."""
        return ServerStatistics(
            num_requests=self._num_requests,
            num_replies=self._num_replies,
            num_malformed=self._num_malformed,
            num_undeliverable=self._num_undeliverable,
        )

    async def run(self, on_ready: Callable[[str], None] | None = None) -> None:
        """Bind and serve until the reply to Shutdown was sent, or until cancelled.

        After Shutdown the requests that were accepted before still get their answers. on_ready
        gets the endpoint as bound, with the port that the system chose. Raises ConfigError when
        another worker lives on the endpoint or it cannot be bound.
        """
        with owned(ipc_path(self._endpoint)), zmq.asyncio.Context() as context:
            socket = context.socket(zmq.ROUTER)
            configure_server(socket, self._endpoint)
            try:
                socket.bind(self._endpoint)
            except zmq.ZMQError as error:
                socket.close(linger=0)
                raise ConfigError(f"cannot bind {self._endpoint}: {error.strerror}") from error
            tasks = [
                asyncio.create_task(self._read(socket), name="gpuworker reader"),
                asyncio.create_task(self._send(socket), name="gpuworker sender"),
            ]
            try:
                if on_ready is not None:
                    on_ready(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0"))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                await _stop(tasks)
                for task in done:
                    task.result()  # a fault of ours must not look like an orderly end
                await self._send_owed(socket)
            finally:
                await _stop(tasks)
                socket.close()

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            for _ in range(_BURST):
                peer, *frames = await socket.recv_multipart()
                self._accept(peer, frames)
            # While messages are waiting recv does not suspend: a flood would starve the sender.
            await asyncio.sleep(0)

    def _accept(self, peer: bytes, frames: list[bytes]) -> None:
        try:
            corr = decode_header(frames, Kind.REQUEST)
        except MalformedMessage as error:
            self._count_malformed(peer, error)  # nobody to answer
            return
        self._num_requests += 1
        self._num_owed += 1
        try:
            reply = self._worker.submit(decode_request(frames[1]))
        except WorkerError as error:
            if isinstance(error, MalformedMessage):
                self._count_malformed(peer, error)
            reply = asyncio.get_running_loop().create_future()
            reply.set_exception(error)
        reply.add_done_callback(partial(self._finished, peer, corr))

    def _finished(self, peer: bytes, corr: int, done: asyncio.Future[Any]) -> None:
        self._outbox.put_nowait((peer, corr, done))

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while not isinstance(await self._send_next(socket), Closed):
            pass

    async def _send_owed(self, socket: zmq.asyncio.Socket) -> None:
        """Send the answers to what waited behind Shutdown."""
        with suppress(TimeoutError):  # a worker that does not answer it all must not hold us
            async with asyncio.timeout(_SEND_PATIENCE_S):
                while self._num_owed:
                    await self._send_next(socket)

    async def _send_next(self, socket: zmq.asyncio.Socket) -> Reply:
        peer, corr, done = await self._outbox.get()
        self._num_owed -= 1
        reply = _reply(done)
        try:
            frames = encode_reply(corr, reply)
        except MalformedMessage as error:
            frames = encode_reply(corr, failure_of(error))
        if await self._deliver(socket, peer, frames):
            self._num_replies += 1
        else:
            self._num_undeliverable += 1
        return reply

    async def _deliver(
        self, socket: zmq.asyncio.Socket, peer: bytes, frames: Sequence[bytes]
    ) -> bool:
        """Send a reply; say whether its client took it.

        A client that does not read holds the others up once, until patience ends; from then on
        it loses every reply that does not fit into its queue at once.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + (0.0 if peer in self._slow_peers else _SEND_PATIENCE_S)
        while True:
            try:
                await socket.send_multipart([peer, *frames], flags=zmq.NOBLOCK)
            except zmq.Again:
                if clock() >= deadline:
                    self._slow_peers.add(peer)
                    return False
                await asyncio.sleep(_SEND_RETRY_S)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                self._slow_peers.discard(peer)
                return False
            else:
                self._slow_peers.discard(peer)
                return True

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
    worker: SubmitWorker, endpoint: str, *, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve a worker on an endpoint until it was shut down; see Server.run."""
    await Server(worker, endpoint).run(on_ready)


async def _stop(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


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
    return failure_of(WorkerError(f"{type(error).__name__}: {error}"))
