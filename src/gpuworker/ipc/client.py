"""Layer 0. An asyncio client: ask and submit as on an embedded worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import zmq
import zmq.asyncio

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
from gpuworker.ipc.loop_socket import LoopSocket
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

__all__ = ["CONNECT_TIMEOUT_S", "RemoteWorker", "connect"]

CONNECT_TIMEOUT_S = 10.0
_LEAVE_TIMEOUT_S = 1.0
_RENEWALS = 3
"""Messages per lease of a session that is otherwise silent."""
_READY = zmq.Event.HANDSHAKE_SUCCEEDED
_LOST = zmq.Event.DISCONNECTED
_RETRIED = zmq.Event.CONNECT_RETRIED


class RemoteWorker:
    """A worker at the other end of a socket; made by connect.

    Replies are matched by number, so any number of requests may be under way. When the worker
    goes away every pending request fails with ConnectionLost: its outcome is unknown. A lost
    connection stays lost, because who answers next may be another worker: connect again.
    """

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, timeout_s: float | None) -> None:
        self._socket = socket
        self._wire = LoopSocket(socket, self._take)
        self._endpoint = endpoint
        self._timeout_s = timeout_s
        self._conversation: Conversation[asyncio.Future[Any]] = Conversation(endpoint)
        self._corr_of: dict[asyncio.Future[Any], int] = {}
        self._ready = asyncio.Event()
        self._hint = NOBODY
        self._welcome: Welcome | None = None
        self._rings: ClientRings | None = None

    @property
    def welcome(self) -> Welcome | None:
        """What the worker said to our hello; None for an observer, which says none."""
        return self._welcome

    async def ask(self, request: Request[ReplyT], *, timeout_s: float | None = None) -> ReplyT:
        """Send a request and return its reply, or raise the error it was answered with.

        timeout_s (else that of connect, else none) raises RequestTimeout; the worker does not
        start what it cannot start within that time. Cancelling withdraws a request whose turn
        has not come; what has started is carried out.
        """
        limit_s = timeout_s if timeout_s is not None else self._timeout_s
        reply = self.submit(request, budget_s=limit_s)
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

    def submit(
        self, request: Request[ReplyT], *, budget_s: float | None = None
    ) -> asyncio.Future[ReplyT]:
        """Send a request at once, in order; the future is what ask would return or raise.

        A request whose turn comes later than budget_s after its arrival is not started and
        fails with DeadlineExceeded. Cancelling the future withdraws what has not started; see
        cancel for how that went. Raises ConnectionLost while no worker is connected; nothing
        was sent then.
        """
        if not self._ready.is_set():
            raise ConnectionLost(f"no worker is connected at {self._endpoint}; nothing was sent")
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        corr, frames = self._conversation.request(request, reply, budget_s)
        self._corr_of[reply] = corr
        reply.add_done_callback(self._settled)
        if self._rings is None or type(request) in BESIDE_RING:
            self._wire.send(frames)  # its queue has no limit
        else:
            self._push(self._rings, corr, frames)
        return cast("asyncio.Future[ReplyT]", reply)

    async def cancel(self, reply: asyncio.Future[Any]) -> Cancelled:
        """Withdraw a request by its future, and say how far it had come.

        One that was withdrawn fails with RequestCancelled, and steps behind it with
        StepAborted; one that has started goes on.
        """
        corr = self._corr_of.get(reply)
        return Cancelled(outcome="unknown") if corr is None else await self.ask(Cancel(corr=corr))

    def _use_ring(self, rings: ClientRings) -> None:
        self._rings = rings
        loop = asyncio.get_running_loop()
        loop.add_reader(rings.reply_bell.descriptor, self._take_from_ring, rings)

    def _push(self, rings: ClientRings, corr: int, frames: list[bytes]) -> None:
        try:
            if not rings.send(frames):
                raise ConnectionLost(
                    f"the worker at {self._endpoint} does not read; nothing was sent"
                )
        except (MalformedMessage, ConnectionLost):
            self._conversation.unsent(corr)
            raise

    def _take_from_ring(self, rings: ClientRings) -> None:
        is_alive = rings.reply_bell.drain()
        try:
            while (record := rings.replies.pop()) is not None:
                self._take([*record])
        except MalformedMessage as error:
            self._fail_pending(f"the ring of {self._endpoint} cannot be read: {error}")
            is_alive = False
        if not is_alive:
            self._leave_ring()
            self._ready.clear()
            self._fail_pending(f"the ring of {self._endpoint} was closed")

    def _leave_ring(self) -> None:
        if self._rings is not None:
            asyncio.get_running_loop().remove_reader(self._rings.reply_bell.descriptor)
            self._rings.close()
            self._rings = None

    def _settled(self, reply: asyncio.Future[Any]) -> None:
        corr = self._corr_of.pop(reply)
        if reply.cancelled() and self._ready.is_set():
            self.submit(Cancel(corr=corr)).add_done_callback(_look_away)

    async def _begin(self, epoch: int | None, client: str, lease_s: float | None) -> None:
        """Say hello; without an epoch, with the next one after those that the worker has seen."""
        if epoch is None:
            session = (await self.ask(GetHealth())).session
            epoch = (session.highest_epoch if session is not None else 0) + 1
        request = hello(epoch, client, lease_s)
        welcome = await self.ask(request)
        self._conversation.begin(request, welcome)
        self._welcome = welcome

    async def _renew(self, lease_s: float) -> None:
        while True:
            await asyncio.sleep(lease_s / _RENEWALS)
            if self._ready.is_set():
                self.submit(GetHealth()).add_done_callback(_look_away)

    async def _end(self) -> None:
        """Give the session up, so that nobody thinks we are still there."""
        with suppress(WorkerError, ClientError):  # it is gone, or somebody else's
            await self.ask(EndSession(), timeout_s=_LEAVE_TIMEOUT_S)

    def _take(self, frames: list[bytes]) -> None:
        try:
            came = self._conversation.reply(frames)
        except WorkerError as error:
            # Unreadable, or word of a loss: nobody can tell whose reply it was, so nobody waits.
            self._fail_pending(f"the replies of {self._endpoint} cannot be followed: {error}")
            return
        if came is not None:
            _settle(*came)

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        self._socket.connect(self._endpoint)
        while (event := event_of(await monitor.recv_multipart())) != _READY:
            self._hint = WHY_NOT.get(event, self._hint)
            if event == _RETRIED:
                self._socket.disconnect(self._endpoint)
                await asyncio.sleep(RETRY_S)
                self._socket.connect(self._endpoint)
        self._ready.set()
        while event_of(await monitor.recv_multipart()) != _LOST:
            pass
        self._ready.clear()
        self._wire.catch_up()  # replies that came before the connection ended count
        self._fail_pending(f"the worker at {self._endpoint} went away")
        self._socket.disconnect(self._endpoint)  # forgets what was not sent

    def _fail_pending(self, reason: str) -> None:
        for reply, error in self._conversation.lose(reason):
            if not reply.done():
                reply.set_exception(error)
                reply.exception()  # seen: nobody may be waiting for it


def _settle(reply: asyncio.Future[Any], answer: Reply | WorkerError | ClientError) -> None:
    if reply.done():
        return  # abandoned
    if isinstance(answer, (WorkerError, ClientError)):
        reply.set_exception(answer)
    else:
        reply.set_result(answer)


def _look_away(reply: asyncio.Future[Any]) -> None:
    if not reply.cancelled():
        reply.exception()


@asynccontextmanager
async def connect(
    endpoint: str,
    *,
    epoch: int | None = None,
    client: str = "",
    observe: bool = False,
    lease_s: float | None = None,
    ring: bool = False,
    keys: ClientKeys | None = None,
    timeout_s: float | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> AsyncIterator[RemoteWorker]:
    """Connect to a worker's endpoint, as its scheduler or, with observe, as one who only asks.

    A scheduler says hello with its epoch and thereby takes the worker over from any earlier
    one; it raises Fenced unless the epoch is above all before. Take the epoch from whatever
    decides who may schedule; None takes the next one, for programs that need no such thing. An
    observer may ask for health, status, limits and the KV cache's spec.

    lease_s: silence after which the worker ends the session; it is renewed in the background.
    ring: exchange messages through shared memory, on the same machine; ConfigError where that
    cannot be.
    keys: for an encrypted endpoint; one with other keys looks like one where nobody answers.
    timeout_s limits each ask. Raises ConfigError for an endpoint that cannot be, ConnectionLost
    when no worker answers there within connect_timeout_s. (A hello waits for the step or move
    that runs; connect_timeout_s does not count that.)
    """
    check_peer(endpoint, encrypted=keys is not None)
    if observe and (epoch is not None or lease_s is not None or ring):
        raise ConfigError("an observer has no session, so neither epoch, lease nor ring")
    with zmq.asyncio.Context() as context:
        socket = zmq.Socket(context, zmq.DEALER)
        configure_client(socket, endpoint, keys)
        socket.setsockopt(zmq.SNDHWM, 0)  # submit cannot wait, and its callers wait for replies
        monitor = cast("zmq.asyncio.Socket", socket.get_monitor_socket(EVENTS))
        worker = RemoteWorker(socket, endpoint, timeout_s)
        tasks = [asyncio.create_task(worker._watch(monitor), name="gpuworker monitor")]
        worker._wire.start()
        try:
            try:
                async with asyncio.timeout(connect_timeout_s):
                    await worker._ready.wait()
            except TimeoutError as error:
                raise ConnectionLost(
                    f"no worker answers at {endpoint} within {connect_timeout_s:g} s; "
                    f"{worker._hint}"
                ) from error
            if observe:
                yield worker
                return
            await worker._begin(epoch, client, lease_s)
            if ring:
                worker._use_ring(ClientRings.open(await worker.ask(OpenRing())))
            if lease_s is not None:
                tasks.append(asyncio.create_task(worker._renew(lease_s), name="gpuworker lease"))
            try:
                yield worker
            finally:
                if worker._ready.is_set():
                    await worker._end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            worker._wire.stop()
            worker._leave_ring()
            worker._ready.clear()
            worker._fail_pending(f"the connection to {endpoint} was closed")
            socket.disable_monitor()
            monitor.close(linger=0)  # term would wait for it
            socket.close(linger=0)
