"""Layer 0. Listen to a worker's events without an event loop."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Self

import zmq

from gpuworker.events import Topic
from gpuworker.ipc.blocking import BlockingClient
from gpuworker.ipc.client import CONNECT_TIMEOUT_S
from gpuworker.ipc.curve import ClientKeys
from gpuworker.ipc.monitor import EVENTS
from gpuworker.ipc.sockets import configure_subscriber
from gpuworker.ipc.subscriber import Gap, Heard, Inbox, Subscription, check_topics, events_of
from gpuworker.messages import GetHealth

__all__ = ["BlockingFollower", "watch_blocking"]


class BlockingFollower:
    """What a connected socket hears, as an iterator; one thread uses it.

    Once it has raised ConnectionLost it always will.
    """

    def __init__(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes], inbox: Inbox) -> None:
        self._socket, self._monitor, self._inbox = socket, monitor, inbox
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)

    @property
    def num_malformed(self) -> int:
        """Messages that were no events and were skipped."""
        return self._inbox.num_malformed

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Heard | Gap:
        """Wait for the next item; raises ConnectionLost."""
        while (item := self._inbox.pop()) is None:
            self._hear(None)
        return item

    def next_within(self, timeout_s: float) -> Heard | Gap | None:
        """Wait for the next item; None when there is none in time. Raises ConnectionLost."""
        deadline = time.monotonic() + timeout_s
        while (item := self._inbox.pop()) is None:
            left_s = deadline - time.monotonic()
            # A time that is up still takes what is there.
            if not self._hear(max(math.ceil(left_s * 1000), 0)) and left_s <= 0:
                return None
        return item

    def _hear(self, timeout_ms: int | None) -> bool:
        ready = dict(self._poller.poll(timeout_ms))
        if self._socket in ready:
            self._inbox.take(self._socket.recv_multipart(zmq.NOBLOCK))
        elif self._monitor in ready:
            self._inbox.notice(self._monitor.recv_multipart(zmq.NOBLOCK))
        return bool(ready)


@contextmanager
def watch_blocking(
    endpoint: str,
    topics: Collection[Topic] = (),
    *,
    keys: ClientKeys | None = None,
    connect_timeout_s: float = CONNECT_TIMEOUT_S,
) -> Iterator[BlockingFollower]:
    """Listen to the events of the worker at an endpoint, as watch does; raises the same."""
    check_topics(topics)
    with BlockingClient(
        endpoint, observe=True, keys=keys, connect_timeout_s=connect_timeout_s
    ) as worker:
        health = worker.ask(GetHealth())
    at = events_of(health, endpoint)
    with zmq.Context() as context, context.socket(zmq.SUB) as socket:
        configure_subscriber(socket, at, keys)
        monitor = socket.get_monitor_socket(EVENTS)
        for prefix in topics or ("",):
            socket.subscribe(prefix)
        socket.connect(at)
        try:
            yield BlockingFollower(socket, monitor, Inbox(Subscription(health.boot_id), endpoint))
        finally:
            socket.disable_monitor()
            monitor.close(linger=0)
