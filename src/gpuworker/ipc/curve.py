"""Layer 0. An encrypted endpoint: who the worker is, and whom it lets in."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.utils.z85

from gpuworker.ipc.key_files import load_public_key, load_public_keys, load_secret_key
from gpuworker.ipc.loop_socket import LoopSocket

__all__ = [
    "ZAP_DOMAIN",
    "Admission",
    "ClientKeys",
    "ServerKeys",
    "authenticating",
    "load_client_keys",
    "load_server_keys",
]

ZAP_DOMAIN = "gpuworker"
_log = logging.getLogger(__name__)

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_NUM_ZAP_FRAMES = 6
_LOG_INTERVAL_S = 1.0
"""Refusals are logged at most this often; all are counted."""


@dataclass(frozen=True, slots=True)
class ServerKeys:
    """A worker's own pair, and the public keys of the clients that may connect."""

    public: bytes
    secret: bytes = field(repr=False)
    clients: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """A client's own pair, and the public key of the worker that it expects."""

    public: bytes
    secret: bytes = field(repr=False)
    server: bytes


def load_server_keys(secret: Path, clients: Path) -> ServerKeys:
    """Read a worker's secret key and the public keys of its clients.

    clients is one public key file, or a directory of them. Raises ConfigError as load_secret_key
    and load_public_keys do.
    """
    own = load_secret_key(secret)
    return ServerKeys(own.public, own.secret, load_public_keys(clients))


def load_client_keys(secret: Path, server: Path) -> ClientKeys:
    """Read a client's secret key and its worker's public key; raises ConfigError likewise."""
    own = load_secret_key(secret)
    return ClientKeys(own.public, own.secret, load_public_key(server))


class Admission:
    """Answers ZeroMQ's question who may connect (ZAP, RFC 27), by key and by nothing else.

    Addresses do not count: a list of them would shut ipc out, which has none.
    """

    def __init__(self, socket: zmq.Socket[bytes], clients: frozenset[bytes]) -> None:
        self._wire = LoopSocket(socket, self._answer)
        self._clients = {zmq.utils.z85.decode(key): key for key in clients}
        self._next_log_s = 0.0
        self.num_admitted = 0
        self.num_refused = 0

    def start(self) -> None:
        """Begin to answer."""
        self._wire.start()

    def stop(self) -> None:
        """Answer no more; nobody gets in from now on."""
        self._wire.stop()

    def _answer(self, question: list[bytes]) -> None:
        request_id = question[1] if len(question) > 1 else b""
        user = self._user(question)
        if user:
            self.num_admitted += 1
            status, text = b"200", b"OK"
        else:
            self.num_refused += 1
            self._log(question)
            status, text = b"400", b"this key is not let in"
        self._wire.send((_ZAP_VERSION, request_id, status, text, user, b""))

    def _user(self, question: list[bytes]) -> bytes:
        """Return the key that was shown; nothing for one that may not come in."""
        version, _, domain, _, _, mechanism, *credentials = [*question, *[b""] * _NUM_ZAP_FRAMES]
        if (version, domain, mechanism) != (_ZAP_VERSION, ZAP_DOMAIN.encode(), b"CURVE"):
            return b""
        return self._clients.get(credentials[0], b"")

    def _log(self, question: list[bytes]) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._next_log_s:
            self._next_log_s = now + _LOG_INTERVAL_S
            _log.warning(
                "refused a client without an authorised key (%d since the start): %s",
                self.num_refused,
                b" ".join(question[2:4]).decode("ascii", "backslashreplace"),
            )


@asynccontextmanager
async def authenticating(
    context: zmq.Context,  # type: ignore[type-arg]
    keys: ServerKeys | None,
) -> AsyncIterator[Admission | None]:
    """Decide inside who may connect to the context's sockets; keys None does nothing.

    Enter it before they are bound and leave it when they are closed: without it, sockets with
    keys let nobody in.
    """
    if keys is None:
        yield None
        return
    socket = context.socket(zmq.REP, socket_class=zmq.Socket)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(_ZAP_ENDPOINT)
        admission = Admission(socket, keys.clients)
        admission.start()
        try:
            yield admission
        finally:
            admission.stop()
    finally:
        socket.close()
