"""Layer 0. Listen to a worker's events; whatever arrives, it is not trusted."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import NamedTuple, Self, get_args

import msgspec
import zmq
import zmq.asyncio

from gpuworker.errors import ConfigError, ConnectionLost, MalformedMessage
from gpuworker.events import TOPIC_OF, Event, Topic, decode_event
from gpuworker.ipc.client import CONNECT_TIMEOUT_S, connect
from gpuworker.ipc.curve import ClientKeys
from gpuworker.ipc.endpoint import events_peer
from gpuworker.ipc.monitor import EVENTS, event_of
from gpuworker.ipc.sockets import configure_subscriber
from gpuworker.ipc.wire import EventHeader, decode_event_header
from gpuworker.messages import GetHealth, HealthReport

__all__ = [
    "Follower",
    "Gap",
    "Heard",
    "Inbox",
    "Subscription",
    "check_topics",
    "events_of",
    "watch",
]

_NUM_FRAMES = 3


class Heard(NamedTuple):
    """An event, and where it stands among those of its topic."""

    event: Event
    seq: int
    is_snapshot: bool
    """Whether it says how things were when we subscribed."""


class Gap(NamedTuple):
    """Events were missed; ask for health to know how things are."""

    topic: str
    num_missed: int


class Subscription:
    """Turns frames into events and gaps; no I/O."""

    def __init__(self, boot_id: str) -> None:
        """Expect the events of one start of a worker."""
        self._boot_id = boot_id
        self._seqs: dict[str, int] = {}
        self.num_malformed = 0

    def take(self, frames: list[bytes]) -> list[Heard | Gap]:
        """Return what a message says; nothing for one that is malformed, which is counted.

        Raises ConnectionLost when another worker speaks.
        """
        try:
            header, event = _decode(frames)
        except (MalformedMessage, msgspec.DecodeError, RecursionError):
            self.num_malformed += 1
            return []
        if header.boot_id != self._boot_id:
            raise ConnectionLost(
                f"the worker was {self._boot_id} and is {header.boot_id} now; connect again"
            )
        topic = TOPIC_OF[type(event)]
        heard = Heard(event, header.seq, header.is_snapshot)
        before = self._seqs.get(topic)
        self._seqs[topic] = max(header.seq, before or 0)
        if before is None:
            return [heard]
        # A snapshot, which somebody else may have asked for, has the last event's number.
        missed = header.seq - before - (not header.is_snapshot)
        return [Gap(topic, missed), heard] if missed > 0 else [heard]


class Inbox:
    """What was heard and not handed out yet, and why nothing more can come; no I/O."""

    def __init__(self, subscription: Subscription, endpoint: str) -> None:
        self._subscription = subscription
        self._endpoint = endpoint
        self._items: deque[Heard | Gap] = deque()
        self._lost = ""

    @property
    def num_malformed(self) -> int:
        """Messages that were no events and were skipped."""
        return self._subscription.num_malformed

    def take(self, frames: list[bytes]) -> None:
        """Take in a message."""
        try:
            self._items.extend(self._subscription.take(frames))
        except ConnectionLost as error:
            self._lost = str(error)

    def notice(self, monitor_frames: list[bytes]) -> None:
        """Take in what the monitor says."""
        if event_of(monitor_frames) != zmq.Event.HANDSHAKE_SUCCEEDED:
            self._lost = f"the worker at {self._endpoint} went away"

    def pop(self) -> Heard | Gap | None:
        """Return the next item, None when it must be waited for; then raises ConnectionLost."""
        if self._items:
            return self._items.popleft()
        if self._lost:
            raise ConnectionLost(self._lost)
        return None


class Follower:
    """What a connected socket hears, as an async iterator; belongs to one event loop.

    A wait may be cancelled, by asyncio.timeout for example, and begun again: nothing is lost.
    Once it has raised ConnectionLost it always will.
    """

    def __init__(
        self, socket: zmq.asyncio.Socket, monitor: zmq.asyncio.Socket, inbox: Inbox
    ) -> None:
        self._socket, self._monitor, self._inbox = socket, monitor, inbox
        self._poller = zmq.asyncio.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    @property
    def num_malformed(self) -> int:
        """Messages that were no events and were skipped."""
        return self._inbox.num_malformed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Heard | Gap:
        """Wait for the next item; raises ConnectionLost."""
        while (item := self._inbox.pop()) is None:
            ready = dict(await self._poller.poll())
            # Received without waiting, so that no cancellation can come between.
            if self._socket in ready:
                self._inbox.take(await self._socket.recv_multipart(zmq.NOBLOCK))
            elif self._monitor in ready:
                self._inbox.notice(await self._monitor.recv_multipart(zmq.NOBLOCK))
        return item


@asynccontextmanager
async def watch(
    endpoint: str,
    topics: Collection[Topic] = (),
    *,
    keys: ClientKeys | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> AsyncIterator[Follower]:
    """Listen to the events of the worker at an endpoint; without topics, to all.

    The iterator begins with a snapshot of each topic, before which an event may come that has
    just happened. It raises ConnectionLost when the worker goes away. Raises ConfigError for a
    worker that publishes none, for an unknown topic, and like connect.
    """
    check_topics(topics)
    async with connect(
        endpoint, observe=True, keys=keys, connect_timeout_s=connect_timeout_s
    ) as worker:
        health = await worker.ask(GetHealth())
    at = events_of(health, endpoint)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        configure_subscriber(socket, at, keys)
        monitor = socket.get_monitor_socket(EVENTS)
        for prefix in topics or ("",):
            socket.subscribe(prefix)
        socket.connect(at)
        try:
            yield Follower(socket, monitor, Inbox(Subscription(health.boot_id), endpoint))
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)


def check_topics(topics: Collection[Topic]) -> None:
    """Raise ConfigError when there is no such topic."""
    for topic in topics:
        if topic not in get_args(Topic):
            raise ConfigError(
                f"there is no topic {topic!r}; choose of {', '.join(get_args(Topic))}"
            )


def events_of(health: HealthReport, endpoint: str) -> str:
    """Return where a worker's events are; raises ConfigError when it publishes none."""
    if not health.events:
        raise ConfigError(f"the worker at {endpoint} publishes no events")
    return events_peer(endpoint, health.events)


def _decode(frames: list[bytes]) -> tuple[EventHeader, Event]:
    if len(frames) != _NUM_FRAMES:
        raise MalformedMessage(f"an event has {_NUM_FRAMES} frames, this one has {len(frames)}")
    topic, header, body = frames
    event = decode_event(body)
    if topic != TOPIC_OF[type(event)].encode():
        raise MalformedMessage(f"{type(event).__name__} under the topic {topic[:16]!r}")
    return decode_event_header(header), event
