"""Layer 0. A worker's endpoint: bytes in, submit, bytes out; whatever comes, it goes on."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec
import zmq
import zmq.asyncio

from gpuworker.errors import ConfigError, MalformedMessage, WorkerClosed, WorkerError
from gpuworker.ipc.endpoint import check_endpoint, ipc_path, prepare_directory
from gpuworker.ipc.sockets import configure
from gpuworker.ipc.wire import (
    Kind,
    decode_header,
    decode_request,
    encode_reply,
    failure_of,
)
from gpuworker.messages import Closed, Failure, Reply, Request

__all__ = ["Server", "ServerStatistics", "SubmitWorker", "serve"]

_log = logging.getLogger(__name__)

_SEND_PATIENCE_S = 1.0
_SEND_RETRY_S = 0.002
_MAX_LOGGED = 20
"""Malformed messages that are logged; after that they are only counted."""


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

        on_ready gets the endpoint as bound, with the port that the system chose. Raises
        ConfigError when another worker lives on the endpoint or it cannot be bound.
        """
        with _locked(ipc_path(self._endpoint)), zmq.asyncio.Context() as context:
            socket = context.socket(zmq.ROUTER)
            configure(socket)
            try:
                socket.bind(self._endpoint)
            except zmq.ZMQError as error:
                raise ConfigError(f"cannot bind {self._endpoint}: {error.strerror}") from error
            tasks = [
                asyncio.create_task(self._read(socket), name="gpuworker reader"),
                asyncio.create_task(self._send(socket), name="gpuworker sender"),
            ]
            try:
                if on_ready is not None:
                    on_ready(bytes(socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0"))
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                socket.close()
            for task in done:
                task.result()  # a fault of ours must not look like an orderly end

    async def _read(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, *frames = await socket.recv_multipart()
            try:
                corr = decode_header(frames, Kind.REQUEST)
            except MalformedMessage as error:
                self._count_malformed(error)  # nobody to answer
                continue
            self._num_requests += 1
            try:
                reply = self._worker.submit(decode_request(frames[1]))
            except WorkerError as error:
                if isinstance(error, MalformedMessage):
                    self._count_malformed(error)
                reply = asyncio.get_running_loop().create_future()
                reply.set_exception(error)
            reply.add_done_callback(partial(self._finished, peer, corr))

    def _finished(self, peer: bytes, corr: int, done: asyncio.Future[Any]) -> None:
        self._outbox.put_nowait((peer, corr, done))

    async def _send(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            peer, corr, done = await self._outbox.get()
            reply = _reply(done)
            try:
                frames = encode_reply(corr, reply)
            except MalformedMessage as error:
                frames = encode_reply(corr, failure_of(error))
            if await self._deliver(socket, [peer, *frames]):
                self._num_replies += 1
            else:
                self._num_undeliverable += 1
            if isinstance(reply, Closed):
                return

    async def _deliver(self, socket: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
        deadline = asyncio.get_running_loop().time() + _SEND_PATIENCE_S
        while True:
            try:
                await socket.send_multipart(frames, flags=zmq.NOBLOCK)
            except zmq.Again:
                # Its queue is full. A client that does not read loses replies, not the worker.
                if asyncio.get_running_loop().time() > deadline:
                    return False
                await asyncio.sleep(_SEND_RETRY_S)
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                return False
            else:
                return True

    def _count_malformed(self, error: MalformedMessage) -> None:
        self._num_malformed += 1
        if self._num_malformed <= _MAX_LOGGED:
            _log.warning("dropped a malformed message: %s", error)


async def serve(
    worker: SubmitWorker, endpoint: str, *, on_ready: Callable[[str], None] | None = None
) -> None:
    """Serve a worker on an endpoint until it was shut down; see Server.run."""
    await Server(worker, endpoint).run(on_ready)


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
    return Failure(code=WorkerError.code, message=f"{type(error).__name__}: {error}")


@contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Own a socket file: a second bind would succeed silently and steal the connections."""
    if path is None:
        yield
        return
    created = prepare_directory(path)
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"a worker lives on ipc://{path}; stop it, or use another path"
            ) from error
        try:
            yield
        finally:
            path.unlink(missing_ok=True)
            Path(f"{path}.lock").unlink(missing_ok=True)
            if created:
                with suppress(OSError):  # somebody else uses it by now
                    path.parent.rmdir()
    finally:
        os.close(lock)
