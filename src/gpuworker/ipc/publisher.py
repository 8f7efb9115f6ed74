"""Layer 0. Events on a socket: each topic counted without gaps, and a snapshot for who comes."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import zmq

from gpuworker.errors import ConfigError
from gpuworker.events import TOPIC_OF, Event, EventSource, encode_event
from gpuworker.ipc.curve import ServerKeys
from gpuworker.ipc.loop_socket import LoopSocket
from gpuworker.ipc.sockets import configure_publisher
from gpuworker.ipc.wire import EventHeader, Kind, event_header

__all__ = ["Publisher"]

_SUBSCRIBED, _UNSUBSCRIBED = b"\x01", b"\x00"
_PREFIXES = frozenset({b"", *(topic.encode() for topic in TOPIC_OF.values())})
_SNAPSHOT_DELAY_S = 0.01
_TICK_S = 0.25
_TICKS_PER_METRICS = 4


class Publisher:
    """Publishes a worker's events from start to stop; belongs to the event loop's thread.

    Frames are [topic | header | body]. A topic's events are numbered from 1 on; whoever finds
    a gap was too slow, and asks for health. A new subscription is answered with the snapshot
    of its topics, which carries the number of the last event instead of one of its own. Only
    topics, and nothing for all of them, can be subscribed to. (libzmq still remembers the
    prefixes that a peer makes up until it leaves; who may connect is a matter of the directory
    or the keys.)
    """

    def __init__(self, source: EventSource, boot_id: str) -> None:
        self._source = source
        self._boot_id = boot_id
        self._seqs: Counter[str] = Counter()
        self._newly_subscribed: set[bytes] = set()
        self._socket: zmq.Socket[bytes]
        self._wire: LoopSocket

    def start(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        keys: ServerKeys | None = None,
    ) -> str:
        """Bind, listen to the worker, and return the endpoint as bound; raises ConfigError."""
        self._socket = context.socket(zmq.XPUB)
        configure_publisher(self._socket, endpoint, keys)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._socket.close(linger=0)
            raise ConfigError(f"cannot bind {endpoint}: {error.strerror}") from error
        self._wire = LoopSocket(self._socket, self._subscription)
        self._wire.start()
        self._unsubscribe = self._source.subscribe(self._publish)
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")

    async def run(self) -> None:
        """Let the worker state what time alone changes, until cancelled."""
        for number in itertools.count():
            self._source.tick(with_metrics=number % _TICKS_PER_METRICS == 0)
            await asyncio.sleep(_TICK_S)

    def stop(self) -> None:
        """Say no more, and close."""
        self._unsubscribe()
        self._wire.stop()
        self._socket.close(linger=0)

    def _subscription(self, frames: list[bytes]) -> None:
        # The option concerns the peer whose message was the last one.
        kind, prefix = frames[0][:1], frames[0][1:]
        if len(frames) != 1 or prefix not in _PREFIXES:
            return
        if kind == _UNSUBSCRIBED:
            self._socket.setsockopt(zmq.UNSUBSCRIBE, prefix)
        elif kind == _SUBSCRIBED:
            self._socket.setsockopt(zmq.SUBSCRIBE, prefix)
            if not self._newly_subscribed:  # those who come together share a snapshot
                asyncio.get_running_loop().call_later(_SNAPSHOT_DELAY_S, self._send_snapshots)
            self._newly_subscribed.add(prefix)

    def _send_snapshots(self) -> None:
        prefixes, self._newly_subscribed = self._newly_subscribed, set()
        if self._socket.closed:
            return
        for event in self._source.snapshot():
            topic = TOPIC_OF[type(event)]
            if b"" in prefixes or topic.encode() in prefixes:
                self._send(topic, event, is_snapshot=True)

    def _publish(self, event: Event) -> None:
        topic = TOPIC_OF[type(event)]
        self._seqs[topic] += 1
        self._send(topic, event, is_snapshot=False)

    def _send(self, topic: str, event: Event, *, is_snapshot: bool) -> None:
        header = EventHeader(Kind.EVENT, self._seqs[topic], is_snapshot, self._boot_id)
        # A full queue drops it; the number tells.
        self._wire.send((topic.encode(), event_header(header), encode_event(event)))
