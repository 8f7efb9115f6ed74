"""Layer 0. Names of endpoints, checked before ZeroMQ sees them."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
import stat
import tempfile
from pathlib import Path

import zmq

from gpuworker.errors import ConfigError

__all__ = [
    "EPOCH_SUFFIX",
    "EVENTS_SUFFIX",
    "LOCK_SUFFIX",
    "MAX_IPC_PATH_BYTES",
    "check_endpoint",
    "check_peer",
    "default_endpoint",
    "events_endpoint",
    "events_peer",
    "ipc_path",
    "prepare_directory",
]

EVENTS_SUFFIX = ".events"
"""Of the socket beside an ipc endpoint that publishes its events."""
LOCK_SUFFIX = ".lock"
EPOCH_SUFFIX = ".epoch"
"""Of the files beside an ipc endpoint: who has it, and the highest epoch that it has seen."""
MAX_IPC_PATH_BYTES = (zmq.IPC_PATH_MAX_LEN or 107) - len(EVENTS_SUFFIX)
"""Of an ipc endpoint; the longest name that a Unix socket can have, less the suffix."""
_LOOPBACK_NAMES = ("localhost",)
_ANY_PORT = ("*", "0")
_RESERVED = (EVENTS_SUFFIX, LOCK_SUFFIX, EPOCH_SUFFIX)
_NAME = re.compile(r"[0-9A-Za-z][0-9A-Za-z_.-]*")


def check_endpoint(endpoint: str, *, encrypted: bool = False) -> str:
    """Return the endpoint when a worker can have it; raises ConfigError that names what is wrong.

    ipc:// takes a path of a file system, short enough for a Unix socket. tcp:// takes a loopback
    address, and any other, one of all addresses (* or 0.0.0.0) or a name only when the
    connection is encrypted; port * or 0 lets the system choose.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator or scheme not in ("ipc", "tcp"):
        raise ConfigError(f"endpoint {endpoint!r} must begin with ipc:// or tcp://")
    if scheme == "ipc":
        _check_ipc(endpoint, rest)
    else:
        _check_tcp(endpoint, rest, encrypted=encrypted)
    return endpoint


def check_peer(endpoint: str, *, encrypted: bool = False) -> str:
    """Return the endpoint when a client can connect to it; raises ConfigError like check_endpoint.

    A port that the system chooses is known only after the worker was bound to it, and a worker
    on all addresses of its machine is reached at one of them.
    """
    check_endpoint(endpoint, encrypted=encrypted)
    if ipc_path(endpoint) is not None:
        return endpoint
    host, port = _split(endpoint.removeprefix("tcp://"))
    if port in _ANY_PORT:
        raise ConfigError(
            f"endpoint {endpoint!r} names no port; a worker says which one it got when it is ready"
        )
    if _is_wildcard(host):
        raise ConfigError(
            f"endpoint {endpoint!r} stands for all addresses of a machine; connect to one of them"
        )
    return endpoint


def ipc_path(endpoint: str) -> Path | None:
    """Return the socket file of an ipc endpoint; None for tcp."""
    scheme, _, rest = endpoint.partition("://")
    return Path(rest) if scheme == "ipc" else None


def events_endpoint(endpoint: str) -> str:
    """Return where a worker on the endpoint publishes its events.

    Beside the socket of an ipc endpoint; on another port of a tcp one, which the system
    chooses and the worker tells.
    """
    if ipc_path(endpoint) is not None:
        return f"{endpoint}{EVENTS_SUFFIX}"
    return f"{endpoint.rpartition(':')[0]}:*"


def events_peer(endpoint: str, announced: str) -> str:
    """Return where a client that reached a worker at endpoint connects for its events.

    announced is what the worker says. Only its port counts: the worker may be bound to all
    addresses, or see its files under other names, and nobody is to be sent elsewhere by it.
    Raises ConfigError for an announcement that has no port.
    """
    events = events_endpoint(endpoint)
    if ipc_path(endpoint) is not None:
        return events
    return check_peer(f"{events.rpartition(':')[0]}:{announced.rpartition(':')[2]}", encrypted=True)


def prepare_directory(path: Path) -> bool:
    """Make the directory of a socket file, private to this user; say whether it was not there.

    Raises ConfigError when it cannot be made, or when an existing one belongs to or can be
    entered by somebody else.
    """
    directory = path.parent
    try:
        missing = [parent for parent in directory.parents if not parent.exists()]
        created = not directory.is_dir()
        for place in (*reversed(missing), directory):  # parents=True forgets the mode for these
            place.mkdir(mode=0o700, exist_ok=True)
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
        is_short = len(os.fsencode(f"{base}/{name}")) <= MAX_IPC_PATH_BYTES
        if is_short and os.path.isabs(base) and os.access(base, os.W_OK | os.X_OK):
            return f"ipc://{base}/{name}"
    return f"ipc:///tmp/{name}"


def _check_ipc(endpoint: str, path: str) -> None:
    if path.startswith("@"):
        raise ConfigError(
            f"endpoint {endpoint!r} is an abstract socket, which has no permissions; use a path"
        )
    if not os.path.isabs(path) or path.endswith("/") or "\0" in path:
        raise ConfigError(f"endpoint {endpoint!r} needs an absolute path of a file after ipc://")
    if path.endswith(_RESERVED):
        raise ConfigError(
            f"endpoint {endpoint!r} has the name of a file that belongs to another socket; "
            f"one may not end in {', '.join(_RESERVED)}"
        )
    length = len(os.fsencode(path))
    if length > MAX_IPC_PATH_BYTES:
        raise ConfigError(
            f"socket path {path!r} has {length} bytes, the limit is {MAX_IPC_PATH_BYTES} (with "
            f"{EVENTS_SUFFIX} behind it, what a Unix socket can have); use a shorter directory"
        )


def _check_tcp(endpoint: str, address: str, *, encrypted: bool) -> None:
    host, port = _split(address)
    if not (port == "*" or (port.isascii() and port.isdecimal() and int(port) < 1 << 16)):
        raise ConfigError(f"endpoint {endpoint!r} needs a port: tcp://127.0.0.1:5555, or * for any")
    if not host:
        raise ConfigError(
            f"endpoint {endpoint!r} names no host; tcp://127.0.0.1:5555 and tcp://[::1]:5555 do"
        )
    if not encrypted and host not in _LOOPBACK_NAMES and not _is_loopback(host):
        what = "stands for all addresses of this machine" if _is_wildcard(host) else "is remote"
        raise ConfigError(
            f"endpoint {endpoint!r} {what}, which needs keys: make them with gpuworker keygen, or "
            "use ipc:// or tcp://127.0.0.1, which only this machine reaches"
        )


def _split(address: str) -> tuple[str, str]:
    """Return host and port; "" for one that is not there or is none."""
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        return (host if _ip(host) is not None else ""), port
    return (host if host == "*" or _NAME.fullmatch(host) else ""), port


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _is_loopback(host: str) -> bool:
    address = _ip(host)
    return address is not None and address.is_loopback


def _is_wildcard(host: str) -> bool:
    address = _ip(host)
    return host == "*" or (address is not None and address.is_unspecified)
