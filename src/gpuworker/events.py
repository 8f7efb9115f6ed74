"""Layer 0. What a worker says unasked: states, progress, health, figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, Protocol, Union, get_args

import msgspec

from gpuworker.replies import Bytes, Health, Number, message_tag

__all__ = [
    "EVENTS",
    "TOPIC_OF",
    "Event",
    "EventSource",
    "HealthChanged",
    "KVEpochChanged",
    "Listener",
    "Metrics",
    "MoveProgress",
    "StateChanged",
    "Topic",
    "decode_event",
    "encode_event",
]

Topic = Literal["state", "kv_epoch", "health", "progress", "metrics"]


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    array_like=True,
    tag=message_tag,
    forbid_unknown_fields=True,
):
    """A fact that the worker states unasked."""


class StateChanged(Event, frozen=True):
    """The worker is in another state."""

    state: str
    previous: str
    """Empty in a snapshot."""


class KVEpochChanged(Event, frozen=True):
    """What was cached before is gone; steps name the new epoch."""

    kv_epoch: Number


class HealthChanged(Event, frozen=True):
    """Something is older than its limit, the worker cannot go on, or all is well again."""

    health: Health
    reason: str
    """What is stalled and for how long, or the fault; empty when all is well."""


class MoveProgress(Event, frozen=True):
    """A move is under way."""

    move: str
    """Tag of its message."""
    move_s: float
    done_bytes: Bytes
    """What a load has read so far; 0 for moves that do not say."""
    total_bytes: Bytes


class Metrics(Event, frozen=True):
    """Figures for routers and dashboards."""

    num_requests: Number
    """Live requests; num_requests_running of other engines."""
    num_waiting: Number
    """Messages whose turn has not come."""
    num_in_flight: Number
    num_steps: Number
    """Steps completed since the start."""
    running_step_s: float
    """Age of the running step; 0 when none runs."""
    last_step_s: float | None
    """Seconds since the last completed step."""
    process_bytes: Bytes
    loop_lag_s: float


EVENTS: tuple[type[Event], ...] = (
    StateChanged,
    KVEpochChanged,
    HealthChanged,
    MoveProgress,
    Metrics,
)
TOPIC_OF: dict[type[Event], Topic] = dict(zip(EVENTS, get_args(Topic), strict=True))
"""What a subscriber names to get an event."""
Listener = Callable[[Event], None]


class EventSource(Protocol):
    """A worker that can be listened to, on its event loop."""

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call a listener with every event from now on; returns how to end that."""

    def snapshot(self) -> Iterable[Event]:
        """Say how things are, as one event of each kind that applies."""

    def tick(self, *, with_metrics: bool) -> None:
        """State what time alone has changed, and the figures when they are due."""


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Event] = msgspec.msgpack.Decoder(
    Union[EVENTS]  # noqa: UP007  # a tuple of types cannot be joined with |
)


def encode_event(event: Event) -> bytes:
    """Encode an event as a tagged msgpack array."""
    return _encoder.encode(event)


def decode_event(body: bytes) -> Event:
    """Decode an event; raises msgspec.DecodeError or RecursionError."""
    return _decoder.decode(body)
