"""Layer 0. One worker per socket file: a second bind would succeed and steal the connections."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpuworker.errors import ConfigError
from gpuworker.ipc.endpoint import EVENTS_SUFFIX, LOCK_SUFFIX, prepare_directory

__all__ = ["owned"]


@contextmanager
def owned(path: Path | None) -> Iterator[None]:
    """Own a socket file, by a lock file beside it; None (no file, no ownership) passes.

    Raises ConfigError when another worker lives on the path, when something other than a socket
    is there, or when the directory cannot be used. Leaving removes the socket, that of the
    events beside it, the lock, and the directory that this call made.
    """
    if path is None:
        yield
        return
    lock_path = Path(f"{path}{LOCK_SUFFIX}")
    sockets = (path, Path(f"{path}{EVENTS_SUFFIX}"))
    created = prepare_directory(path)
    lock = _lock(path, lock_path)
    try:
        for socket in sockets:
            _refuse_other_files(socket)
        try:
            yield
        finally:
            for socket in sockets:
                socket.unlink(missing_ok=True)
    finally:
        lock_path.unlink(missing_ok=True)  # before the lock ends, or it may be another worker's
        os.close(lock)
        if created:
            with suppress(OSError):  # somebody else uses it by now
                path.parent.rmdir()


def _lock(path: Path, lock_path: Path) -> int:
    while True:
        try:
            lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"cannot lock {lock_path}: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_size:
                raise ConfigError(
                    f"{lock_path} is not a lock of ours, it has contents; use another path"
                )
            if _is_at(lock, lock_path):
                return lock
        except BlockingIOError as error:
            os.close(lock)
            raise ConfigError(
                f"a worker lives on ipc://{path}; stop it, or use another path"
            ) from error
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # its last owner removed the file in between: a new one counts


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def _refuse_other_files(path: Path) -> None:
    """Refuse a path that is taken: ZeroMQ would remove whatever is there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"{path} exists and is not a socket; name another path")
