"""A source of made-up events, what publishes it, and one who listens, for the tests of events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import zmq
import zmq.asyncio

from gpuworker import events as e
from gpuworker.ipc import default_endpoint
from gpuworker.ipc.monitor import EVENTS
from gpuworker.ipc.publisher import Publisher
from gpuworker.ipc.sockets import configure_subscriber
from gpuworker.ipc.subscriber import Follower, Inbox, Subscription

BOOT = "ab" * 8


class ToySource:
    """Says what it is told; a state is named by its number on the topic."""

    def __init__(self) -> None:
        self.listeners: list[e.Listener] = []
        self.num_states = 0
        self.kv_epoch = 0
        self.padding = ""
        """Makes the events of the state large."""
        self.ticks: list[bool] = []

    def subscribe(self, listener: e.Listener) -> Callable[[], None]:
        self.listeners.append(listener)
        return lambda: self.listeners.remove(listener)

    def snapshot(self) -> Iterator[e.Event]:
        yield e.StateChanged(state=str(self.num_states), previous="")
        yield e.KVEpochChanged(kv_epoch=self.kv_epoch)

    def tick(self, *, with_metrics: bool) -> None:
        self.ticks.append(with_metrics)

    def change_state(self) -> None:
        self.num_states += 1
        self._say(e.StateChanged(state=str(self.num_states), previous=self.padding))

    def change_epoch(self) -> None:
        self.kv_epoch += 1
        self._say(e.KVEpochChanged(kv_epoch=self.kv_epoch))

    def _say(self, event: e.Event) -> None:
        for listener in tuple(self.listeners):
            listener(event)


@contextmanager
def free_endpoint() -> Iterator[str]:
    """An ipc endpoint in a directory that exists while it is needed."""
    endpoint = default_endpoint()
    path = Path(endpoint.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700)
    try:
        yield endpoint
    finally:
        path.unlink(missing_ok=True)
        path.parent.rmdir()


@asynccontextmanager
async def published() -> AsyncIterator[tuple[ToySource, str]]:
    """A source, and the endpoint that its events are published on."""
    source = ToySource()
    publisher = Publisher(source, BOOT)
    with free_endpoint() as endpoint, zmq.Context() as context:
        at = publisher.start(context, endpoint)
        try:
            yield source, at
        finally:
            publisher.stop()


@asynccontextmanager
async def following(at: str, *topics: str, queue: int = 0) -> AsyncIterator[Follower]:
    """One who listens there; queue bounds what its socket holds, 0 leaves it as it is."""
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as socket:
        configure_subscriber(socket, at)
        if queue:
            socket.setsockopt(zmq.RCVHWM, queue)
        monitor = socket.get_monitor_socket(EVENTS)
        for topic in topics or ("",):
            socket.subscribe(topic)
        socket.connect(at)
        try:
            yield Follower(socket, monitor, Inbox(Subscription(BOOT), at))
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
