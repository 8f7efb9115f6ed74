"""Layer 0. Every ZeroMQ option that matters, set in one place."""

from __future__ import annotations

import zmq

from gpuworker.ipc.wire import MAX_BODY_BYTES

__all__ = ["RETRY_S", "configure_client", "configure_server"]

RETRY_S = 0.1
"""Between two attempts of a client to make its connection."""

_HIGH_WATER_MARK = 256
_UNLIMITED = 0
_OFF = 0
_LINGER_MS = 1000
_SEND_TIMEOUT_MS = 1000
_HEARTBEAT_MS = 1000
_HEARTBEAT_TIMEOUT_MS = 3000
_HANDSHAKE_MS = 5000
_NEVER_MS = 1_000_000_000


def configure_server(socket: zmq.Socket, endpoint: str) -> None:  # type: ignore[type-arg]
    """Set every option of a worker's ROUTER.

    It reports what it cannot send instead of dropping it, and refuses the old protocol that has
    no handshake. It sends no heartbeats: libzmq aborts the process when one is due on a
    connection that broke while its receive queue was full, and a peer on this machine that dies
    is noticed without them. It answers those of clients.
    """
    _configure(socket, endpoint)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _OFF)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, _OFF)
    socket.setsockopt(zmq.ZAP_DOMAIN, b"gpuworker")


def configure_client(socket: zmq.Socket, endpoint: str) -> None:  # type: ignore[type-arg]
    """Set every option of a client's DEALER.

    ZeroMQ would connect again by itself and send what was left over to whoever is there then,
    perhaps another worker; so it waits too long for that, and the clients retry the first
    connection themselves. (IMMEDIATE and RECONNECT_IVL -1 throw replies away that have come.)
    The receive queue has no limit, as a client gets one reply per request; so heartbeats are
    safe here, see configure_server.
    """
    _configure(socket, endpoint)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _UNLIMITED)
    socket.setsockopt(zmq.LINGER, _OFF)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)


def _configure(socket: zmq.Socket, endpoint: str) -> None:  # type: ignore[type-arg]
    socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    # Only where it is asked for: an IPv6 socket reports its IPv4 addresses in a mapped form.
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
