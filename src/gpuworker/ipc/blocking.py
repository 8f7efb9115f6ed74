"""Layer 0. A client for code without an event loop."""

from __future__ import annotations

import itertools
import math
import time
from types import TracebackType
from typing import Any, Generic, Self, cast

import zmq

from gpuworker.errors import (
    ClientError,
    ConnectionLost,
    MalformedMessage,
    RequestTimeout,
    WorkerError,
)
from gpuworker.ipc.endpoint import check_peer
from gpuworker.ipc.monitor import EVENTS, event_of
from gpuworker.ipc.sockets import RETRY_S, configure_client
from gpuworker.ipc.wire import Kind, decode_header, decode_reply, encode_request, error_of
from gpuworker.messages import Failure, Reply, ReplyT, Request

__all__ = ["BlockingClient", "PendingReply"]

_CONNECT_TIMEOUT_S = 10.0


class PendingReply(Generic[ReplyT]):
    """The reply of a submitted request, which may not have come yet."""

    def __init__(self, client: BlockingClient, corr: int, message: type[Request[Any]]) -> None:
        self._client = client
        self._corr = corr
        self._message = message
        self._answer: Reply | WorkerError | ClientError | None = None

    def result(self, timeout_s: float | None = None) -> ReplyT:
        """Wait for the reply and return it, or raise the error that the worker answered.

        timeout_s None takes the client's. Raises RequestTimeout (it may be asked for again) and
        ConnectionLost.
        """
        self._client._wait_for(self, timeout_s)
        if isinstance(self._answer, (WorkerError, ClientError)):
            raise self._answer
        return cast("ReplyT", self._answer)


class BlockingClient:
    """Talks to a worker; one thread uses it. A context manager.

    Raises ConfigError for an endpoint that cannot be and ConnectionLost when no worker answers
    there within connect_timeout_s. timeout_s limits each reply; None waits for ever. A lost
    connection stays lost, because who answers next may be another worker: make a new client.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float | None = None,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    ) -> None:
        self._endpoint = check_peer(endpoint)
        self._timeout_s = timeout_s
        self._corr = itertools.count(1)
        self._pending: dict[int, PendingReply[Any]] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure_client(self._socket, endpoint)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._connected = self._connect(time.monotonic() + connect_timeout_s)
        if not self._connected:
            self.close()
            raise ConnectionLost(
                f"no worker answers at {endpoint} within {connect_timeout_s:g} s; is one running? "
                "gpuworker serve starts one"
            )

    def ask(self, request: Request[ReplyT], *, timeout_s: float | None = None) -> ReplyT:
        """Send a request and return its reply, or raise the error it was answered with."""
        return self.submit(request).result(timeout_s)

    def submit(self, request: Request[ReplyT]) -> PendingReply[ReplyT]:
        """Send a request at once, in order.

        Raises ConnectionLost while no worker is connected, or when it does not take the request
        within a second; nothing was sent then.
        """
        self._take_what_came()
        self._notice()
        if not self._connected:
            raise ConnectionLost(f"no worker is connected at {self._endpoint}; nothing was sent")
        corr = next(self._corr)
        try:
            self._socket.send_multipart(encode_request(corr, request))
        except zmq.Again as error:
            raise ConnectionLost(
                f"the worker at {self._endpoint} does not read; nothing was sent"
            ) from error
        pending: PendingReply[ReplyT] = PendingReply(self, corr, type(request))
        self._pending[corr] = pending
        return pending

    def close(self) -> None:
        """Close the connection; replies that have not come are lost. Idempotent."""
        if not self._socket.closed:
            self._connected = False
            self._lose(f"the connection to {self._endpoint} was closed")
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
            self._socket.close(linger=0)
            self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _wait_for(self, pending: PendingReply[Any], timeout_s: float | None) -> None:
        limit_s = timeout_s if timeout_s is not None else self._timeout_s
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while pending._answer is None:
            left_ms = None if deadline is None else _ms_until(deadline)
            events = dict(self._poller.poll(left_ms))
            if not events:
                raise RequestTimeout(
                    f"no reply to {pending._message.__name__} within {limit_s:g} s; its outcome "
                    "is unknown"
                )
            if self._socket in events:
                self._take(self._socket.recv_multipart())
            else:
                self._notice()

    def _connect(self, deadline: float) -> bool:
        self._socket.connect(self._endpoint)
        while self._monitor.poll(_ms_until(deadline)):
            event = event_of(self._monitor.recv_multipart())
            if event == zmq.Event.HANDSHAKE_SUCCEEDED:
                return True
            if event == zmq.Event.CONNECT_RETRIED:
                self._socket.disconnect(self._endpoint)
                time.sleep(RETRY_S)
                self._socket.connect(self._endpoint)
        return False

    def _notice(self) -> None:
        """Take in what the monitor has to say about the connection; lost is lost."""
        while self._connected and _is_readable(self._monitor):
            if event_of(self._monitor.recv_multipart()) == zmq.Event.DISCONNECTED:
                self._connected = False
                self._take_what_came()
                self._lose(f"the worker at {self._endpoint} went away")
                self._socket.disconnect(self._endpoint)  # forgets what was not sent

    def _take_what_came(self) -> None:
        """Take in the replies that are there, so that they do not pile up."""
        while not self._socket.closed and _is_readable(self._socket):
            self._take(self._socket.recv_multipart())

    def _take(self, frames: list[bytes]) -> None:
        try:
            corr = decode_header(frames, Kind.REPLY)
        except MalformedMessage as error:
            # Nobody can tell whose reply this was, so nobody may wait for it.
            self._lose(f"{self._endpoint} answers what cannot be read: {error}")
            return
        pending = self._pending.pop(corr, None)
        if pending is None:
            return
        try:
            answer = decode_reply(pending._message, frames[1])
        except MalformedMessage as error:
            pending._answer = ConnectionLost(
                f"the reply to {pending._message.__name__} cannot be read: {error}; its outcome "
                "is unknown"
            )
            return
        pending._answer = error_of(answer) if isinstance(answer, Failure) else answer

    def _lose(self, reason: str) -> None:
        for pending in self._pending.values():
            pending._answer = ConnectionLost(
                f"{reason}; the outcome of {pending._message.__name__} is unknown"
            )
        self._pending.clear()


def _ms_until(deadline: float) -> int:
    return math.ceil(max(deadline - time.monotonic(), 0.0) * 1000)


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(cast("int", socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
