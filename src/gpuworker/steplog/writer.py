"""Layer 5. A step log that is being written: one write per record, and never in the way."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Literal, get_args

import msgspec

from gpuworker.errors import ConfigError
from gpuworker.steplog.records import (
    FILE_HEAD,
    FORMAT_VERSION,
    MAGIC,
    Header,
    Record,
    Stopped,
    encode_record,
)

__all__ = ["FsyncMode", "LogStatistics", "LogWriter"]

FsyncMode = Literal["always", "interval", "close"]
"""After every record; about once a second, on a thread; only at the end."""
_SYNC_INTERVAL_S = 1.0
_MAX_REASON = 1000
_log = logging.getLogger(__name__)


class LogStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """How far a log has come."""

    num_records: int
    num_bytes: int
    stopped: str
    """Why recording was given up; empty while it goes on."""


class LogWriter:
    """Appends records to a new file.

    Each record is handed to the kernel in one write as it happens, so it outlives the process,
    however that ends; fsync decides what outlives the machine. A failure to write ends the
    recording and nothing else: it is logged once, noted in the file if that still takes it, and
    told by statistics. Every method belongs to one thread.
    """

    def __init__(self, path: Path, *, fsync: FsyncMode = "interval") -> None:
        """Create the file, for the owner only; raises ConfigError when it exists or cannot be."""
        if fsync not in get_args(FsyncMode):
            raise ConfigError(f"fsync is {fsync!r}; choose one of {', '.join(get_args(FsyncMode))}")
        self.path = path
        self._fsync = fsync
        self._num_records = 0
        self._num_bytes = 0
        self._stopped = ""
        self._sync_error: OSError | None = None
        self._unsynced = threading.Event()
        self._closing = threading.Event()
        self._syncer: threading.Thread | None = None
        try:
            self._descriptor = os.open(
                path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600
            )
        except FileExistsError as error:
            raise ConfigError(
                f"{path} exists and is not overwritten; choose another name, or remove it"
            ) from error
        except OSError as error:
            raise ConfigError(f"cannot create the step log {path}: {error.strerror}") from error

    def begin(self, header: Header) -> None:
        """Write the head of the file; raises ConfigError when not even that can be written."""
        self._write(FILE_HEAD.pack(MAGIC, FORMAT_VERSION) + encode_record(header))
        if self.is_stopped:
            raise ConfigError(f"cannot write the step log {self.path}: {self._stopped}")
        self._num_records += 1
        _sync_directory(self.path.parent)
        if self._fsync == "interval":
            self._syncer = threading.Thread(target=self._sync_now_and_then, daemon=True)
            self._syncer.start()

    @property
    def is_stopped(self) -> bool:
        """Whether recording was given up."""
        return bool(self._stopped)

    def append(self, record: Record) -> None:
        """Write one record; does nothing once recording has stopped."""
        if self._stopped:
            return
        if self._sync_error is not None:
            self.give_up(_reason(self._sync_error))
            return
        try:
            frame = encode_record(record)
        except ValueError as error:
            self.give_up(str(error))
            return
        self._write(frame)
        self._num_records += not self._stopped

    def give_up(self, reason: str) -> None:
        """Stop recording: cut off what was written in part and say why if there is room."""
        self._stopped = reason[:_MAX_REASON]
        self._warn(self._stopped)
        with suppress(OSError):
            os.ftruncate(self._descriptor, self._num_bytes)
            if self._num_bytes:
                note = encode_record(Stopped(reason=self._stopped))
                if os.write(self._descriptor, note) == len(note):
                    self._num_bytes += len(note)
                    self._num_records += 1
                else:
                    os.ftruncate(self._descriptor, self._num_bytes)

    def statistics(self) -> LogStatistics:
        """Return what has been written, and whether recording goes on."""
        return LogStatistics(
            num_records=self._num_records, num_bytes=self._num_bytes, stopped=self._stopped
        )

    def close(self) -> None:
        """Make everything durable and let go of the file; one without a header is removed."""
        self._closing.set()
        self._unsynced.set()
        if self._syncer is not None:
            self._syncer.join()
        try:
            if self._num_bytes:
                os.fsync(self._descriptor)
        except OSError as error:
            self._warn(_reason(error))
        finally:
            os.close(self._descriptor)
        if not self._num_records:
            with suppress(OSError):
                self.path.unlink()

    def _write(self, frame: bytes) -> None:
        rest = memoryview(frame)
        try:
            while rest:  # a file takes it all at once unless the disk is full
                rest = rest[os.write(self._descriptor, rest) :]
            if self._fsync == "always":
                os.fdatasync(self._descriptor)
        except OSError as error:
            self.give_up(_reason(error))
            return
        self._num_bytes += len(frame)
        self._unsynced.set()

    def _warn(self, reason: str) -> None:
        _log.warning("recording to %s has stopped, the worker goes on: %s", self.path, reason)

    def _sync_now_and_then(self) -> None:
        while not self._closing.is_set():
            self._unsynced.wait()
            self._closing.wait(_SYNC_INTERVAL_S)
            self._unsynced.clear()
            try:
                os.fdatasync(self._descriptor)
            except OSError as error:
                self._sync_error = error
                return


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _sync_directory(directory: Path) -> None:
    """Make the file's name durable; not every file system lets us."""
    with suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
