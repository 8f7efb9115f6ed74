"""Layer 0. Listen to a worker's events; whatever arrives, it is not trusted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import NamedTuple, get_args

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
from gpuworker.messages import GetHealth

__all__ = ["Gap", "Heard", "Subscription", "follow", "watch"]

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
        before = self._seqs.get(topic)
        heard = Heard(event, header.seq, header.is_snapshot)
        if before is None or header.is_snapshot:
            self._seqs[topic] = max(header.seq, before or 0)
            return [heard]
        self._seqs[topic] = header.seq
        missed = header.seq - before - 1
        return [Gap(topic, missed), heard] if missed > 0 else [heard]


@asynccontextmanager
async def watch(
    endpoint: str,
    topics: Collection[Topic] = (),
    *,
    keys: ClientKeys | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> AsyncIterator[AsyncIterator[Heard | Gap]]:
    """Listen to the events of the worker at an endpoint; without topics, to all.

    Yields an iterator that begins with a snapshot of each topic. It raises ConnectionLost when
    the worker goes away. Raises ConfigError for a worker that publishes none, for an unknown
    topic, and like connect.
    """
    for topic in topics:
        if topic not in get_args(Topic):
            raise ConfigError(
                f"there is no topic {topic!r}; choose of {', '.join(get_args(Topic))}"
            )
    async with connect(
        endpoint, observe=True, keys=keys, connect_timeout_s=connect_timeout_s
    ) as worker:
        health = await worker.ask(GetHealth())
    if not health.events:
        raise ConfigError(f"the worker at {endpoint} publishes no events")
    at = events_peer(endpoint, health.events)
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        configure_subscriber(socket, at, keys)
        monitor = socket.get_monitor_socket(EVENTS)
        for prefix in topics or ("",):
            socket.subscribe(prefix)
        socket.connect(at)
        try:
            yield follow(socket, monitor, Subscription(health.boot_id), endpoint)
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)


async def follow(
    socket: zmq.asyncio.Socket,
    monitor: zmq.asyncio.Socket,
    subscription: Subscription,
    endpoint: str,
) -> AsyncIterator[Heard | Gap]:
    """Yield what a connected socket hears until its connection is lost."""
    poller = zmq.asyncio.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    while True:
        ready = dict(await poller.poll())
        if socket in ready:
            for item in subscription.take(await socket.recv_multipart(zmq.NOBLOCK)):
                yield item
        elif event_of(await monitor.recv_multipart(zmq.NOBLOCK)) != zmq.Event.HANDSHAKE_SUCCEEDED:
            raise ConnectionLost(f"the worker at {endpoint} went away")


def _decode(frames: list[bytes]) -> tuple[EventHeader, Event]:
    if len(frames) != _NUM_FRAMES:
        raise MalformedMessage(f"an event has {_NUM_FRAMES} frames, this one has {len(frames)}")
    topic, header, body = frames
    event = decode_event(body)
    if topic != TOPIC_OF[type(event)].encode():
        raise MalformedMessage(f"{type(event).__name__} under the topic {topic[:16]!r}")
    return decode_event_header(header), event
