"""Layer 0. A client for code without an event loop."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Generic, Self, cast

import zmq

from gpuworker.errors import (
    ClientError,
    ConfigError,
    ConnectionLost,
    MalformedMessage,
    RequestTimeout,
    WorkerError,
)
from gpuworker.ipc.conversation import BESIDE_RING, Conversation, hello
from gpuworker.ipc.curve import ClientKeys
from gpuworker.ipc.endpoint import check_peer
from gpuworker.ipc.monitor import EVENTS, NOBODY, WHY_NOT, event_of
from gpuworker.ipc.ring_memory import ClientRings
from gpuworker.ipc.sockets import RETRY_S, configure_client
from gpuworker.messages import (
    Cancel,
    Cancelled,
    EndSession,
    GetHealth,
    OpenRing,
    Reply,
    ReplyT,
    Request,
    Welcome,
)

__all__ = ["BlockingClient", "PendingReply"]

_CONNECT_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 1.0
_SPIN_S = 200e-6


class PendingReply(Generic[ReplyT]):
    """The reply of a submitted request, which may not have come yet."""

    def __init__(self, client: BlockingClient, message: type[Request[Any]]) -> None:
        self._client = client
        self._corr = 0
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

    As a scheduler it says hello with its epoch and thereby takes the worker over from any
    earlier one; Fenced unless the epoch is above all before, None takes the next one. With
    observe it says none, and may only ask for health, status, limits and the KV cache's spec.

    Raises ConfigError for an endpoint that cannot be and ConnectionLost when no worker answers
    there within connect_timeout_s. keys are for an encrypted endpoint; one with other keys
    looks like one where nobody answers. timeout_s limits each reply; None waits for ever. lease_s:
    silence after which the worker ends the session; nothing renews it but what is sent. ring
    exchanges messages through shared memory, on the same machine; ConfigError where that cannot
    be. A lost connection stays lost, because who answers next may be another worker: make a new
    client.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        epoch: int | None = None,
        client: str = "",
        observe: bool = False,
        lease_s: float | None = None,
        ring: bool = False,
        keys: ClientKeys | None = None,
        timeout_s: float | None = None,
        connect_timeout_s: float = _CONNECT_TIMEOUT_S,
    ) -> None:
        self._endpoint = check_peer(endpoint, encrypted=keys is not None)
        if observe and (epoch is not None or lease_s is not None or ring):
            raise ConfigError("an observer has no session, so neither epoch, lease nor ring")
        self._timeout_s = timeout_s
        self._conversation: Conversation[PendingReply[Any]] = Conversation(endpoint)
        self._welcome: Welcome | None = None
        self._rings: ClientRings | None = None
        self._hint = NOBODY
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure_client(self._socket, endpoint, keys)
        self._monitor = self._socket.get_monitor_socket(EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._connected = self._connect(time.monotonic() + connect_timeout_s)
        try:
            if not self._connected:
                raise ConnectionLost(
                    f"no worker answers at {endpoint} within {connect_timeout_s:g} s; {self._hint}"
                )
            if not observe:
                self._begin(epoch, client, lease_s)
            if ring:
                self._rings = ClientRings.open(self.ask(OpenRing()))
                self._poller.register(self._rings.reply_bell.descriptor, zmq.POLLIN)
        except BaseException:
            self._disconnect()
            raise

    @property
    def welcome(self) -> Welcome | None:
        """What the worker said to our hello; None for an observer, which says none."""
        return self._welcome

    def ask(self, request: Request[ReplyT], *, timeout_s: float | None = None) -> ReplyT:
        """Send a request and return its reply, or raise the error it was answered with.

        The worker does not start what it cannot start within timeout_s.
        """
        limit_s = timeout_s if timeout_s is not None else self._timeout_s
        return self.submit(request, budget_s=limit_s).result(limit_s)

    def submit(
        self, request: Request[ReplyT], *, budget_s: float | None = None
    ) -> PendingReply[ReplyT]:
        """Send a request at once, in order.

        A request whose turn comes later than budget_s after its arrival is not started and
        fails with DeadlineExceeded. Raises ConnectionLost while no worker is connected, or when
        it does not take the request within a second; nothing was sent then.
        """
        rings = self._rings if type(request) not in BESIDE_RING else None
        if rings is None:
            self._take_what_came()
            self._notice()
        else:  # the end of the worker is the end of its ring, too
            self._take_from_ring(rings)
        if not self._connected:
            raise ConnectionLost(f"no worker is connected at {self._endpoint}; nothing was sent")
        pending: PendingReply[ReplyT] = PendingReply(self, type(request))
        pending._corr, frames = self._conversation.request(request, pending, budget_s)
        try:
            is_sent = self._send(frames) if rings is None else rings.send(frames)
        except MalformedMessage:
            self._conversation.unsent(pending._corr)
            raise
        if not is_sent:
            self._conversation.unsent(pending._corr)
            raise ConnectionLost(f"the worker at {self._endpoint} does not read; nothing was sent")
        return pending

    def _send(self, frames: list[bytes]) -> bool:
        try:
            self._socket.send_multipart(frames)
        except zmq.Again:
            return False
        return True

    def cancel(self, pending: PendingReply[Any]) -> Cancelled:
        """Withdraw a request, and say how far it had come.

        One that was withdrawn fails with RequestCancelled, and steps behind it with
        StepAborted; one that has started goes on.
        """
        return self.ask(Cancel(corr=pending._corr))

    def close(self) -> None:
        """End the session and the connection; replies that have not come are lost. Idempotent."""
        if self._welcome is not None and not self._socket.closed:
            with suppress(WorkerError, ClientError):  # it is gone, or somebody else's
                self.ask(EndSession(), timeout_s=_LEAVE_TIMEOUT_S)
        self._disconnect()

    def _disconnect(self) -> None:
        if not self._socket.closed:
            self._connected = False
            self._lose(f"the connection to {self._endpoint} was closed")
            if self._rings is not None:
                self._leave_ring(self._rings)
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
        if self._rings is not None and pending._answer is None:
            self._spin(self._rings, pending)
        while pending._answer is None:
            left_ms = None if deadline is None else _ms_until(deadline)
            events = dict(self._poller.poll(left_ms))
            if not events:
                raise RequestTimeout(
                    f"no reply to {pending._message.__name__} within {limit_s:g} s; its outcome "
                    "is unknown"
                )
            if self._rings is not None and self._rings.reply_bell.descriptor in events:
                self._take_from_ring(self._rings)
            elif self._socket in events:
                self._take(self._socket.recv_multipart())
            else:
                self._notice()

    def _begin(self, epoch: int | None, client: str, lease_s: float | None) -> None:
        if epoch is None:
            session = self.ask(GetHealth()).session
            epoch = (session.highest_epoch if session is not None else 0) + 1
        request = hello(epoch, client, lease_s)
        welcome = self.ask(request)
        self._conversation.begin(request, welcome)
        self._welcome = welcome

    def _spin(self, rings: ClientRings, pending: PendingReply[Any]) -> None:
        """Look for replies for a short time before sleeping; no other thread needs the time."""
        replies, until = rings.replies, time.perf_counter() + _SPIN_S
        while pending._answer is None and time.perf_counter() < until:
            if not replies.is_empty():
                self._take_replies(rings)

    def _take_from_ring(self, rings: ClientRings) -> None:
        is_alive = rings.reply_bell.drain()
        self._take_replies(rings)
        if not is_alive:
            self._give_ring_up(rings, "was closed")

    def _take_replies(self, rings: ClientRings) -> None:
        try:
            while (record := rings.replies.pop()) is not None:
                self._take([*record])
        except MalformedMessage as error:
            self._give_ring_up(rings, f"cannot be read: {error}")

    def _give_ring_up(self, rings: ClientRings, reason: str) -> None:
        if self._rings is rings:
            self._leave_ring(rings)
            self._lose(f"the ring of {self._endpoint} {reason}")
            self._connected = False

    def _leave_ring(self, rings: ClientRings) -> None:
        self._poller.unregister(rings.reply_bell.descriptor)
        rings.close()
        self._rings = None

    def _connect(self, deadline: float) -> bool:
        self._socket.connect(self._endpoint)
        while self._monitor.poll(_ms_until(deadline)):
            event = event_of(self._monitor.recv_multipart())
            self._hint = WHY_NOT.get(event, self._hint)
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
        if self._rings is not None:
            self._take_from_ring(self._rings)

    def _take(self, frames: list[bytes]) -> None:
        try:
            came = self._conversation.reply(frames)
        except WorkerError as error:
            # Unreadable, or word of a loss: nobody can tell whose reply it was, so nobody waits.
            self._lose(f"the replies of {self._endpoint} cannot be followed: {error}")
            return
        if came is not None:
            came[0]._answer = came[1]

    def _lose(self, reason: str) -> None:
        for pending, error in self._conversation.lose(reason):
            pending._answer = error


def _ms_until(deadline: float) -> int:
    return math.ceil(max(deadline - time.monotonic(), 0.0) * 1000)


def _is_readable(socket: zmq.Socket[bytes]) -> bool:
    return bool(cast("int", socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)
