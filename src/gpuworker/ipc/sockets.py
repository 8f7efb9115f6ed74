"""Layer 0. Every ZeroMQ option that matters, set in one place."""

from __future__ import annotations

import zmq

from gpuworker.ipc.wire import MAX_BODY_BYTES

__all__ = ["configure"]

_HIGH_WATER_MARK = 256
_LINGER_MS = 1000
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 3000
_HANDSHAKE_MS = 5000


def configure(socket: zmq.Socket) -> None:  # type: ignore[type-arg]
    """Set limits, timeouts and heartbeats; a ROUTER also learns to report what it cannot send.

    Without these a dead peer blocks the end of the process, a slow one loses messages without
    a word, and a frame may have any size.
    """
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    if socket.type == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # A domain makes libzmq refuse peers of the old protocol, which have no handshake.
        socket.setsockopt(zmq.ZAP_DOMAIN, b"gpuworker")
