"""Layer 0. A client for code without an event loop."""

from __future__ import annotations

import itertools
import math
import time
from types import TracebackType
from typing import Any, Generic, Self, cast

import zmq

from gpuworker.errors import ClientError, ConnectionLost, RequestTimeout, WorkerError
from gpuworker.ipc.endpoint import check_endpoint
from gpuworker.ipc.monitor import EVENTS, is_lost, is_ready
from gpuworker.ipc.sockets import configure
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
    there within connect_timeout_s. timeout_s limits each reply; None waits for ever.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        timeout_s: float | None = None,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    ) -> None:
        self._endpoint = check_endpoint(endpoint)
        self._timeout_s = timeout_s
        self._corr = itertools.count(1)
        self._pending: dict[int, PendingReply[Any]] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)
        self._connected = False
        if self._monitor.poll(round(connect_timeout_s * 1000)):
            self._notice()
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

        Raises ConnectionLost while no worker is connected; nothing was sent then.
        """
        self._notice()
        if not self._connected:
            raise ConnectionLost(f"no worker is connected at {self._endpoint}; nothing was sent")
        corr = next(self._corr)
        frames = encode_request(corr, request)
        pending: PendingReply[ReplyT] = PendingReply(self, corr, type(request))
        self._pending[corr] = pending
        self._socket.send_multipart(frames)
        return pending

    def close(self) -> None:
        """Close the connection; replies that have not come are lost. Idempotent."""
        self._pending.clear()
        if not self._socket.closed:
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

    def _notice(self) -> None:
        """Take in what the monitor has to say about the connection."""
        while self._monitor.poll(0):
            frames = self._monitor.recv_multipart()
            if is_ready(frames):
                self._connected = True
            elif is_lost(frames):
                self._connected = False
                self._lose()

    def _take(self, frames: list[bytes]) -> None:
        pending = self._pending.pop(decode_header(frames, Kind.REPLY), None)
        if pending is not None:
            answer = decode_reply(pending._message, frames[1])
            pending._answer = error_of(answer) if isinstance(answer, Failure) else answer

    def _lose(self) -> None:
        for pending in self._pending.values():
            pending._answer = ConnectionLost(
                f"the worker at {self._endpoint} went away; the outcome of "
                f"{pending._message.__name__} is unknown"
            )
        self._pending.clear()


def _ms_until(deadline: float) -> int:
    return math.ceil(max(deadline - time.monotonic(), 0.0) * 1000)
