"""Layer 0. What ZeroMQ's socket monitor says about a connection."""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["EVENTS", "NOBODY", "WHY_NOT", "event_of"]

WHY_NOT: dict[zmq.Event, str] = {
    zmq.Event.HANDSHAKE_FAILED_AUTH: "the worker does not let this key in",
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL: "one side uses keys and the other does not",
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL: (
        "it ended the handshake: does it use keys, and is --server-key the right one?"
    ),
}
"""What a handshake that failed says of who is there."""
EVENTS = int(
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.DISCONNECTED
    | zmq.Event.CONNECT_RETRIED
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
)
"""The peer can be talked to; it went away; an attempt to connect failed, and why."""
NOBODY = "is one running? gpuworker serve starts one"
"""What to think when nothing at all is heard."""


def event_of(frames: Sequence[bytes]) -> zmq.Event:
    """Return the event of a monitor message, one of EVENTS."""
    return zmq.Event(parse_monitor_message(list(frames))["event"])
