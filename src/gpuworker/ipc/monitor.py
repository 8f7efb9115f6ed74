"""Layer 0. What ZeroMQ's socket monitor says about a connection."""

from __future__ import annotations

from collections.abc import Sequence

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["EVENTS", "event_of"]

EVENTS = int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED)
"""The peer can be talked to; it went away; an attempt to connect failed."""


def event_of(frames: Sequence[bytes]) -> zmq.Event:
    """Return the event of a monitor message, one of EVENTS."""
    return zmq.Event(parse_monitor_message(list(frames))["event"])
