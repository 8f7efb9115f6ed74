"""Layer 0. What ZeroMQ's socket monitor says about a connection."""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["EVENTS", "is_lost", "is_ready"]

_READY = zmq.Event.HANDSHAKE_SUCCEEDED
_LOST = (
    zmq.Event.DISCONNECTED,
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL,
    zmq.Event.HANDSHAKE_FAILED_PROTOCOL,
    zmq.Event.HANDSHAKE_FAILED_AUTH,
)
EVENTS = int(_READY | _LOST[0] | _LOST[1] | _LOST[2] | _LOST[3])


def is_ready(frames: Sequence[bytes]) -> bool:
    """Say whether a monitor message means that the peer can be talked to."""
    return bool(parse_monitor_message(list(frames))["event"] == _READY)


def is_lost(frames: Sequence[bytes]) -> bool:
    """Say whether a monitor message means that the peer went away."""
    return parse_monitor_message(list(frames))["event"] in _LOST
