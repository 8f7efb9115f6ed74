"""Layer 5. Reading a step log back: what is intact, and what is torn or damaged."""

from __future__ import annotations

import mmap
import re
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from gpuworker.errors import ConfigError
from gpuworker.steplog.records import (
    FILE_HEAD,
    FORMAT_VERSION,
    HEAD,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    RECORD_TYPES,
    End,
    Header,
    LoggedReply,
    LoggedRequest,
    Record,
    Stopped,
    checksum,
    decode_record,
)

__all__ = ["Exchange", "LogReader"]

_CANDIDATE = re.compile(
    # Where a record may begin: a length of at most 64 MiB, a known kind, a short msgpack array.
    rb"(?=.{3}[\x00-\x04].{4}[" + bytes(RECORD_TYPES) + rb"][\x90-\x9f])",
    re.DOTALL,
)


class Exchange(NamedTuple):
    """A request and its answer."""

    request: LoggedRequest
    reply: LoggedReply | None
    """None when the log ends before the answer."""


class LogReader:
    """The records of a file, in their order.

    What follows the last intact record is what a crash leaves: it is no error, torn_bytes says
    how much it is. Damage with an intact record behind it raises ConfigError with the offset;
    with salvage it is skipped and counted. The file may still be growing.
    """

    def __init__(self, path: Path, *, salvage: bool = False) -> None:
        """Name the file; it is opened by each pass over it."""
        self.path = path
        self.torn_bytes = 0
        """Bytes at the end that are no record; known at the end of a pass."""
        self.num_skipped_bytes = 0
        """Damaged bytes that salvage went past; known at the end of a pass."""
        self.end: End | Stopped | None = None
        """How the log was closed; None when it was not, or not yet read."""
        self._salvage = salvage

    def read_header(self) -> Header:
        """Return the first record; raises ConfigError for a file that begins otherwise."""
        first = next(self.records(), None)
        if not isinstance(first, Header):
            raise ConfigError(
                f"{self.path} is no usable step log: it ends before the header is complete"
                if first is None
                else f"{self.path} is no usable step log: it does not begin with a header"
            )
        return first

    def records(self) -> Iterator[Record]:
        """Yield every intact record from the beginning; raises ConfigError, see above."""
        self.torn_bytes = self.num_skipped_bytes = 0
        self.end = None
        try:
            with self.path.open("rb") as file:
                if self._read_file_head(file):
                    yield from self._read_records(file)
        except OSError as error:
            raise ConfigError(f"cannot read {self.path}: {error.strerror}") from error

    def exchanges(self) -> Iterator[Exchange]:
        """Yield the requests in the order of their acceptance, each with its answer.

        Raises ConfigError also for records that do not belong together, unless salvaged.
        """
        return _paired(self.records(), self.path, salvage=self._salvage)

    def _read_file_head(self, file: BinaryIO) -> bool:
        head = file.read(FILE_HEAD.size)
        if head[: len(MAGIC)] != MAGIC[: len(head)]:
            raise ConfigError(f"{self.path} is no step log; `gpuworker record` writes them")
        if len(head) < FILE_HEAD.size:
            self.torn_bytes = len(head)
            return False
        _, version = FILE_HEAD.unpack(head)
        if version != FORMAT_VERSION:
            raise ConfigError(
                f"{self.path} has format version {version}; version {FORMAT_VERSION} is read here"
            )
        return True

    def _read_records(self, file: BinaryIO) -> Iterator[Record]:
        offset = FILE_HEAD.size
        while True:
            file.seek(offset)
            head = file.read(HEAD.size)
            if not head:
                return
            frame = _intact(head, file)
            if frame is None:
                found = self._next_intact(file, offset)
                if found is None:
                    return
                offset = found
                continue
            kind, payload = frame
            record = self._decoded(kind, payload, offset)
            offset += HEAD.size + len(payload)
            if record is None:
                continue
            if isinstance(record, End | Stopped):
                self.end = record
            yield record

    def _decoded(self, kind: int, payload: bytes, offset: int) -> Record | None:
        try:
            return decode_record(kind, payload)
        except msgspec.DecodeError as error:
            if not self._salvage:
                raise ConfigError(
                    f"{self.path}: the record at offset {offset} is intact and not understood: "
                    f"{error}; it was written by another version"
                ) from error
            self.num_skipped_bytes += HEAD.size + len(payload)
            return None

    def _next_intact(self, file: BinaryIO, damaged: int) -> int | None:
        """Return the offset of the next intact record, or None when all that follows is torn."""
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for match in _CANDIDATE.finditer(data, damaged + 1):
                offset = match.start()
                file.seek(offset)
                if _intact(file.read(HEAD.size), file) is not None:
                    break
            else:
                self.torn_bytes = len(data) - damaged
                return None
        if not self._salvage:
            raise ConfigError(
                f"{self.path} is damaged at offset {damaged}, and not only at its end: an intact "
                f"record follows at offset {offset}; --salvage goes on there"
            )
        self.num_skipped_bytes += offset - damaged
        return offset


def _intact(head: bytes, file: BinaryIO) -> tuple[int, bytes] | None:
    """Read the payload that a record's head announces; None unless the checksum agrees."""
    if len(head) < HEAD.size:
        return None
    length, crc, kind = HEAD.unpack(head)
    if length > MAX_PAYLOAD_BYTES:
        return None
    payload = file.read(length)
    if len(payload) < length or checksum(kind, payload) != crc:
        return None
    return kind, payload


def _paired(records: Iterable[Record], path: Path, *, salvage: bool) -> Iterator[Exchange]:
    """Hold requests back until the answer of the oldest one is there."""
    waiting: deque[LoggedRequest] = deque()
    replies: dict[int, LoggedReply] = {}
    open_indices: set[int] = set()
    next_index = 0
    for record in records:
        if isinstance(record, LoggedRequest):
            if record.index != next_index and not salvage:
                raise _unfit(path, f"request {record.index} follows request {next_index - 1}")
            next_index = record.index + 1
            waiting.append(record)
            open_indices.add(record.index)
        elif isinstance(record, LoggedReply):
            if record.index in open_indices:
                open_indices.remove(record.index)
                replies[record.index] = record
            elif not salvage:
                raise _unfit(path, f"there is an answer to request {record.index}, which is not")
        while waiting and waiting[0].index in replies:
            request = waiting.popleft()
            yield Exchange(request, replies.pop(request.index))
    for request in waiting:
        yield Exchange(request, replies.get(request.index))


def _unfit(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is not a log of one worker: {what}")
