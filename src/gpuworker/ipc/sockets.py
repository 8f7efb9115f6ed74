"""Layer 0. Every ZeroMQ option that matters, set in one place."""

from __future__ import annotations

import zmq

from gpuworker.ipc.curve import ZAP_DOMAIN, ClientKeys, ServerKeys
from gpuworker.ipc.wire import MAX_BODY_BYTES

__all__ = [
    "RETRY_S",
    "configure_client",
    "configure_publisher",
    "configure_server",
    "configure_subscriber",
]

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
_MAX_SUBSCRIPTION_BYTES = 256
_CURVE_BYTES = 64
"""At least what encryption adds to a frame, which MAXMSGSIZE counts."""
_KEEPALIVE_S = 30
_KEEPALIVE_RETRY_S = 10
_KEEPALIVE_RETRIES = 3


def configure_server(
    socket: zmq.Socket,  # type: ignore[type-arg]
    endpoint: str,
    keys: ServerKeys | None = None,
) -> None:
    """Set every option of a worker's ROUTER.

    It reports what it cannot send instead of dropping it, and refuses the old protocol that has
    no handshake. It sends no heartbeats: libzmq aborts the process when one is due on a
    connection that broke while its receive queue was full, and a peer that dies is noticed
    without them, on another machine by the keep-alive of TCP. It answers those of clients.
    """
    _configure(socket, endpoint)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _OFF)
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    socket.setsockopt(zmq.ROUTER_HANDOVER, _OFF)
    _guard(socket, keys)


def configure_publisher(
    socket: zmq.Socket,  # type: ignore[type-arg]
    endpoint: str,
    keys: ServerKeys | None = None,
) -> None:
    """Set every option of a worker's XPUB.

    It says every subscription and grants none by itself: the publisher decides, and sends a
    snapshot. What a subscriber does not take in is dropped, which the numbers show. Whoever
    subscribes sends nothing but subscriptions, so messages from there are small.
    """
    _configure(socket, endpoint)
    socket.setsockopt(zmq.MAXMSGSIZE, _MAX_SUBSCRIPTION_BYTES + _CURVE_BYTES)
    socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _OFF)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _OFF)
    socket.setsockopt(zmq.XPUB_MANUAL, 1)
    _guard(socket, keys)


def configure_subscriber(
    socket: zmq.Socket,  # type: ignore[type-arg]
    endpoint: str,
    keys: ClientKeys | None = None,
) -> None:
    """Set every option of a client's SUB; like configure_client it never connects again."""
    _configure(socket, endpoint)
    socket.setsockopt(zmq.RCVHWM, _HIGH_WATER_MARK)
    socket.setsockopt(zmq.LINGER, _OFF)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _OFF)
    socket.setsockopt(zmq.RECONNECT_IVL, _NEVER_MS)
    _identify(socket, keys)


def configure_client(
    socket: zmq.Socket,  # type: ignore[type-arg]
    endpoint: str,
    keys: ClientKeys | None = None,
) -> None:
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
    _identify(socket, keys)


def _guard(socket: zmq.Socket, keys: ServerKeys | None) -> None:  # type: ignore[type-arg]
    """With keys, let those in whom authenticating admits.

    Where nothing answers for the domain, libzmq would take that for encryption without
    authentication and let everybody in.
    """
    if keys is not None:
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def _identify(socket: zmq.Socket, keys: ClientKeys | None) -> None:  # type: ignore[type-arg]
    if keys is not None:
        socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


def _configure(socket: zmq.Socket, endpoint: str) -> None:  # type: ignore[type-arg]
    socket.setsockopt(zmq.SNDTIMEO, _SEND_TIMEOUT_MS)
    # Of each frame: libzmq keeps all frames of a message that does not end until its peer leaves,
    # which only the choice of who may connect prevents.
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_BODY_BYTES + _CURVE_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    # With a domain, libzmq does not speak its old protocol, whose bytes need no handshake.
    socket.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN.encode())
    # Only where it is asked for: an IPv6 socket reports its IPv4 addresses in a mapped form.
    socket.setsockopt(zmq.IPV6, int(endpoint.startswith("tcp://[")))
    # A peer on another machine may vanish without a word; those on ipc cannot.
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, _KEEPALIVE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, _KEEPALIVE_RETRY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, _KEEPALIVE_RETRIES)
