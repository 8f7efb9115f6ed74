"""Layer 0. An asyncio client: ask and submit as on an embedded worker."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import zmq
import zmq.asyncio

from gpuworker.errors import ConnectionLost, MalformedMessage, RequestTimeout
from gpuworker.ipc.endpoint import check_peer
from gpuworker.ipc.monitor import EVENTS, event_of
from gpuworker.ipc.sockets import RETRY_S, configure_client
from gpuworker.ipc.wire import Kind, decode_header, decode_reply, encode_request, error_of
from gpuworker.messages import Failure, ReplyT, Request

__all__ = ["CONNECT_TIMEOUT_S", "RemoteWorker", "connect"]

CONNECT_TIMEOUT_S = 10.0
_READY = zmq.Event.HANDSHAKE_SUCCEEDED
_LOST = zmq.Event.DISCONNECTED
_RETRIED = zmq.Event.CONNECT_RETRIED


class RemoteWorker:
    """A worker at the other end of a socket; made by connect.

    Replies are matched by number, so any number of requests may be under way. When the worker
    goes away every pending request fails with ConnectionLost: its outcome is unknown. A lost
    connection stays lost, because who answers next may be another worker: connect again.
    """

    def __init__(self, socket: zmq.asyncio.Socket, endpoint: str, timeout_s: float | None) -> None:
        self._socket = socket
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._corr = itertools.count(1)
        self._pending: dict[int, tuple[type[Request[Any]], asyncio.Future[Any]]] = {}
        self._ready = asyncio.Event()

    async def ask(self, request: Request[ReplyT], *, timeout_s: float | None = None) -> ReplyT:
        """Send a request and return its reply, or raise the error it was answered with.

        timeout_s (else that of connect, else none) raises RequestTimeout. Cancelling abandons
        the reply; the worker still carries the request out.
        """
        reply = self.submit(request)
        limit_s = timeout_s if timeout_s is not None else self._timeout_s
        try:
            done, _ = await asyncio.wait([reply], timeout=limit_s)
        finally:
            if not reply.done():
                reply.cancel()
        if not done:
            raise RequestTimeout(
                f"no reply to {type(request).__name__} within {limit_s:g} s; its outcome is unknown"
            )
        return reply.result()

    def submit(self, request: Request[ReplyT]) -> asyncio.Future[ReplyT]:
        """Send a request at once, in order; the future is what ask would return or raise.

        Raises ConnectionLost while no worker is connected; nothing was sent then.
        """
        if not self._ready.is_set():
            raise ConnectionLost(f"no worker is connected at {self._endpoint}; nothing was sent")
        corr = next(self._corr)
        frames = encode_request(corr, request)
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._pending[corr] = (type(request), reply)
        reply.add_done_callback(lambda _: self._pending.pop(corr, None))
        # zmq.asyncio returns a future; its stubs say awaitable. Sends keep their order.
        sent = cast("asyncio.Future[Any]", self._socket.send_multipart(frames))
        sent.add_done_callback(lambda done: _fail_unsent(done, reply))
        # What nobody waits for any more must not go out later, to another worker perhaps.
        reply.add_done_callback(lambda _: sent.cancel())
        return cast("asyncio.Future[ReplyT]", reply)

    async def _read(self) -> None:
        # Cancelled only when the client closes: a message could be lost otherwise.
        while True:
            frames = await self._socket.recv_multipart()
            try:
                corr = decode_header(frames, Kind.REPLY)
            except MalformedMessage as error:
                # Nobody can tell whose reply this was, so nobody may wait for it.
                self._fail_pending(f"{self._endpoint} answers what cannot be read: {error}")
                continue
            message, reply = self._pending.get(corr, (None, None))
            if message is None or reply is None or reply.done():
                continue  # abandoned
            try:
                answer = decode_reply(message, frames[1])
            except MalformedMessage as error:
                reply.set_exception(
                    ConnectionLost(
                        f"the reply to {message.__name__} cannot be read: {error}; its outcome is "
                        "unknown"
                    )
                )
                continue
            if isinstance(answer, Failure):
                reply.set_exception(error_of(answer))
            else:
                reply.set_result(answer)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        self._socket.connect(self._endpoint)
        while (event := event_of(await monitor.recv_multipart())) != _READY:
            if event == _RETRIED:
                self._socket.disconnect(self._endpoint)
                await asyncio.sleep(RETRY_S)
                self._socket.connect(self._endpoint)
        self._ready.set()
        while event_of(await monitor.recv_multipart()) != _LOST:
            pass
        self._ready.clear()
        await self._catch_up()
        self._fail_pending(f"the worker at {self._endpoint} went away")
        self._socket.disconnect(self._endpoint)  # forgets what was not sent

    async def _catch_up(self) -> None:
        """Let the reader take in the replies that came before the connection ended."""
        readable = True
        while readable:
            readable = bool(cast("int", self._socket.get(zmq.EVENTS)) & zmq.POLLIN)
            await asyncio.sleep(0)

    def _fail_pending(self, reason: str) -> None:
        for message, reply in list(self._pending.values()):
            if not reply.done():
                reply.set_exception(
                    ConnectionLost(f"{reason}; the outcome of {message.__name__} is unknown")
                )
                reply.exception()  # seen: nobody may be waiting for it


def _fail_unsent(sent: asyncio.Future[Any], reply: asyncio.Future[Any]) -> None:
    if not sent.cancelled() and (error := sent.exception()) is not None and not reply.done():
        reply.set_exception(ConnectionLost(f"nothing was sent, the worker does not read: {error}"))


@asynccontextmanager
async def connect(
    endpoint: str,
    *,
    timeout_s: float | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> AsyncIterator[RemoteWorker]:
    """Connect to a worker's endpoint.

    timeout_s limits each ask. Raises ConfigError for an endpoint that cannot be, ConnectionLost
    when no worker answers there within connect_timeout_s.
    """
    check_peer(endpoint)
    with zmq.asyncio.Context() as context:
        socket = context.socket(zmq.DEALER)
        configure_client(socket, endpoint)
        monitor = socket.get_monitor_socket(EVENTS)
        worker = RemoteWorker(socket, endpoint, timeout_s)
        tasks = [
            asyncio.create_task(worker._watch(monitor), name="gpuworker monitor"),
            asyncio.create_task(worker._read(), name="gpuworker replies"),
        ]
        try:
            try:
                async with asyncio.timeout(connect_timeout_s):
                    await worker._ready.wait()
            except TimeoutError as error:
                raise ConnectionLost(
                    f"no worker answers at {endpoint} within {connect_timeout_s:g} s; is one "
                    "running? gpuworker serve starts one"
                ) from error
            yield worker
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            worker._ready.clear()
            worker._fail_pending(f"the connection to {endpoint} was closed")
            socket.disable_monitor()
            monitor.close(linger=0)  # term would wait for it
            socket.close(linger=0)
