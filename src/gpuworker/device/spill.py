"""Layer 1. Keeps an arena's contents in a file, so that its memory can really be released."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import tempfile
from pathlib import Path
from typing import IO

from gpuworker.device.arena import Arena
from gpuworker.errors import SpillFailed

__all__ = ["Spill"]

_CHUNK_BYTES = 32 << 20
"""Bytes per call; a multiple of the page size, as direct I/O asks for."""
_RAM_FILE_SYSTEMS = frozenset({"ramfs", "tmpfs"})
_DISK_TEMP_DIR = Path("/var/tmp")


class Spill:
    """At most one kept copy of one arena, in a temporary file without a name.

    The file vanishes with the process, however it ends. Where the file system allows it, bytes
    go straight between arena and disk: a copy in the page cache would take the memory that is
    to be released, and was measured to make save several times slower and much less even, for
    a restore that may or may not be faster. Threads did not help. Belongs to the device thread;
    num_bytes and kept_version may be read from any.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """Remember where to write; nothing is created yet.

        None takes the temp dir, or /var/tmp where the temp dir itself lives in memory.
        """
        self.directory = directory if directory is not None else _temp_dir()
        self._file: IO[bytes] | None = None
        self._version: int | None = None
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Size of the kept copy; 0 without one."""
        return self._num_bytes

    def kept_version(self) -> int | None:
        """Return the version of the kept copy; None without one."""
        return self._version

    def save(self, arena: Arena, version: int) -> int:
        """Keep the mapped bytes of an arena under a version and return the bytes written.

        Writes nothing and returns 0 when this version is kept already. Any older copy is gone
        afterwards, success or not: it would be stale. Raises SpillFailed when the space does not
        suffice, before anything is written, or when writing fails; nothing is kept then.
        """
        if self._version == version:
            return 0
        self.drop()
        memory = arena.memory()
        try:
            self._file = self._create(len(memory))
            _bypass_page_cache(self._file.fileno())
            _write(self._file.fileno(), memory)
        except OSError as error:
            self.drop()
            raise SpillFailed(
                f"cannot keep {len(memory)} bytes of {arena.tag} in {self.directory}: "
                f"{error.strerror}; set sleep.spill_dir to a directory with more room, or sleep "
                "at level 2"
            ) from error
        self._version = version
        self._num_bytes = len(memory)
        return len(memory)

    def restore(self, arena: Arena) -> None:
        """Read the kept copy back into an arena mapped to at least its size; it stays kept.

        Raises SpillFailed when nothing is kept, the arena is too small, or reading fails; the
        arena's contents are undefined in the last case.
        """
        if self._file is None or self._version is None:
            raise SpillFailed(f"no copy of {arena.tag} is kept; load the contents again")
        memory = arena.memory()
        if len(memory) < self._num_bytes:
            raise SpillFailed(
                f"the {arena.tag} arena has {len(memory)} bytes mapped, the kept copy has "
                f"{self._num_bytes}; map it first"
            )
        try:
            _read(self._file.fileno(), memory[: self._num_bytes])
        except OSError as error:
            raise SpillFailed(
                f"cannot read {self._num_bytes} bytes of {arena.tag} back from {self.directory}: "
                f"{error.strerror}; load the contents again"
            ) from error

    def drop(self) -> None:
        """Forget the kept copy and free its space. Idempotent."""
        self._version = None
        self._num_bytes = 0
        if self._file is not None:
            self._file.close()
            self._file = None

    def _create(self, need_bytes: int) -> IO[bytes]:
        status = os.statvfs(self.directory)
        free_bytes = status.f_bavail * status.f_frsize
        if need_bytes > free_bytes:
            raise SpillFailed(
                f"{self.directory} has {free_bytes} bytes free, {need_bytes} are needed to keep "
                "the contents; set sleep.spill_dir to a directory with more room, or sleep at "
                "level 2"
            )
        return tempfile.TemporaryFile(dir=self.directory, prefix="gpuworker-", buffering=0)


def _temp_dir() -> Path:
    directory = Path(tempfile.gettempdir())
    if _is_in_memory(directory) and _DISK_TEMP_DIR.is_dir() and not _is_in_memory(_DISK_TEMP_DIR):
        return _DISK_TEMP_DIR
    return directory


def _is_in_memory(directory: Path) -> bool:
    """Look the directory's device up among the mounts; unknown means no."""
    device = directory.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, file_system = line.partition(" - ")
        if mount.split()[2] == number:
            return file_system.split()[0] in _RAM_FILE_SYSTEMS
    return False


def _bypass_page_cache(fd: int) -> None:
    """Ask for direct I/O; a file system without it goes on through the page cache."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_DIRECT)


def _write(fd: int, memory: memoryview) -> None:
    position = 0
    while position < len(memory):
        position += os.pwrite(fd, memory[position : position + _CHUNK_BYTES], position)


def _read(fd: int, memory: memoryview) -> None:
    position = 0
    while position < len(memory):
        num_read = os.preadv(fd, [memory[position : position + _CHUNK_BYTES]], position)
        if num_read == 0:
            raise OSError(errno.EIO, "the file is shorter than what was written")
        position += num_read
