"""Layer 0. Names of endpoints, checked before ZeroMQ sees them."""

from __future__ import annotations

import ipaddress
import os
import secrets
import stat
import tempfile
from pathlib import Path

import zmq

from gpuworker.errors import ConfigError

__all__ = [
    "MAX_IPC_PATH_BYTES",
    "check_endpoint",
    "check_peer",
    "default_endpoint",
    "ipc_path",
    "prepare_directory",
]

_LOOPBACK_NAMES = ("localhost",)
_ANY_PORT = ("*", "0")
MAX_IPC_PATH_BYTES = zmq.IPC_PATH_MAX_LEN or 107


def check_endpoint(endpoint: str) -> str:
    """Return the endpoint when a worker can have it; raises ConfigError that names what is wrong.

    ipc:// takes a path of a file system, short enough for a Unix socket. tcp:// takes loopback
    addresses only, because this release has no encryption; port * or 0 lets the system choose.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise ConfigError(f"endpoint {endpoint!r} must begin with ipc:// or tcp://")
    if scheme == "ipc":
        _check_ipc(endpoint, rest)
    else:
        _check_tcp(endpoint, rest)
    return endpoint


def check_peer(endpoint: str) -> str:
    """Return the endpoint when a client can connect to it; raises ConfigError like check_endpoint.

    A port that the system chooses is known only after the worker was bound to it.
    """
    check_endpoint(endpoint)
    if ipc_path(endpoint) is None and endpoint.rpartition(":")[2] in _ANY_PORT:
        raise ConfigError(
            f"endpoint {endpoint!r} names no port; a worker says which one it got when it is ready"
        )
    return endpoint


def ipc_path(endpoint: str) -> Path | None:
    """Return the socket file of an ipc endpoint; None for tcp."""
    scheme, _, rest = endpoint.partition("://")
    return Path(rest) if scheme == "ipc" else None


def prepare_directory(path: Path) -> bool:
    """Make the directory of a socket file, private to this user; say whether it was not there.

    Raises ConfigError when it cannot be made, or when an existing one belongs to or can be
    entered by somebody else.
    """
    directory = path.parent
    created = not directory.is_dir()
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise ConfigError(f"cannot make {directory}: {error.strerror}") from error
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise ConfigError(
            f"{directory} has mode {mode:03o} and owner {status.st_uid}; sockets go into a "
            "directory of mode 700 of your own: chmod 700 it, or name another"
        )
    return created


def default_endpoint() -> str:
    """Return an ipc endpoint in a directory of its own, which the server will make and remove.

    Under XDG_RUNTIME_DIR or the temp dir; under /tmp where their names are too long for a socket.
    """
    name = f"gpuworker-{secrets.token_hex(6)}/worker"
    for base in (os.environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir()):
        if os.path.isdir(base) and len(os.fsencode(f"{base}/{name}")) <= MAX_IPC_PATH_BYTES:
            return f"ipc://{base}/{name}"
    return f"ipc:///tmp/{name}"


def _check_ipc(endpoint: str, path: str) -> None:
    if path.startswith("@"):
        raise ConfigError(
            f"endpoint {endpoint!r} is an abstract socket, which has no permissions; use a path"
        )
    if not os.path.isabs(path) or path.endswith("/"):
        raise ConfigError(f"endpoint {endpoint!r} needs an absolute path of a file after ipc://")
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"socket path {path!r} has {length} bytes, the limit is {MAX_IPC_PATH_BYTES}; use a "
            "shorter directory"
        )


def _check_tcp(endpoint: str, address: str) -> None:
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    has_port = port == "*" or (port.isascii() and port.isdecimal() and int(port) < 1 << 16)
    if not separator or not has_port:
        raise ConfigError(f"endpoint {endpoint!r} needs a port: tcp://127.0.0.1:5555, or * for any")
    if host in _LOOPBACK_NAMES:
        return
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        raise ConfigError(
            f"endpoint {endpoint!r} is not a loopback address; this release has no encrypted "
            "remote transport, use tcp://127.0.0.1 or ipc:// and a tunnel"
        )
