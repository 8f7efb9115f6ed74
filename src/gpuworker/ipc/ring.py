"""Layer 0. Records through shared memory: one producer, one consumer, nothing on any disk.

A ring is a part of a mapping: two counters that only grow, each on a cache line of its own, and
the data. The producer writes data, then its counter; the consumer copies data out, then writes
its own. A pipe is the bell: it is rung for every record, because a flag that says whether the
other side sleeps would need a memory fence, which Python does not have.

Whatever a broken or hostile peer writes there, reading it raises; nothing outside is touched.
"""

from __future__ import annotations

import os
import select
import struct
import threading
from contextlib import suppress

from gpuworker.errors import MalformedMessage, MessageTooLarge
from gpuworker.ipc.wire import MAX_HEADER_BYTES

__all__ = ["COUNTERS_BYTES", "Bell", "RingReader", "RingWriter"]

COUNTERS_BYTES = 128
"""Before the data: the producer's counter, and 64 bytes behind it the consumer's."""
_HEAD, _TAIL = 0, 8  # in units of 8 bytes
_LENGTHS = struct.Struct("<II")
_ALIGN = 8
_RING = b"\x01"
_DRAIN_BYTES = 1 << 16


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


class RingWriter:
    """The producer's side; several threads of its process may push."""

    def __init__(self, memory: memoryview) -> None:
        """Take a part of a mapping: COUNTERS_BYTES, then the data."""
        self._counters = memory[:COUNTERS_BYTES].cast("Q")
        self._data = memory[COUNTERS_BYTES:]
        self._capacity = len(self._data)
        self._head = self._counters[_HEAD]
        self._lock = threading.Lock()

    def push(self, header: bytes, body: bytes) -> bool:
        """Put a record in; False when there is no room for it now.

        Raises MessageTooLarge for one that can never fit, MalformedMessage for a counter of
        the consumer's that cannot be.
        """
        size = _padded(_LENGTHS.size + len(header) + len(body))
        with self._lock:
            if not self._capacity:
                return False
            if size > self._capacity:
                raise MessageTooLarge(
                    f"a record of {size} bytes does not fit into a ring of {self._capacity}; send "
                    "less at a time, or without a ring"
                )
            used = self._head - self._counters[_TAIL]
            if not 0 <= used <= self._capacity:
                raise MalformedMessage(f"a ring of {self._capacity} bytes says it holds {used}")
            if used + size > self._capacity:
                return False
            at = self._put(self._head, _LENGTHS.pack(len(header), len(body)))
            self._put(self._put(at, header), body)
            self._head += size
            self._counters[_HEAD] = self._head  # after the data
        return True

    def release(self) -> None:
        """Let go of the memory; from now on there is no room. Idempotent."""
        with self._lock:
            self._capacity = 0
            self._counters.release()
            self._data.release()

    def _put(self, at: int, data: bytes) -> int:
        start = at % self._capacity
        first = min(len(data), self._capacity - start)
        self._data[start : start + first] = data[:first]
        if first < len(data):
            self._data[: len(data) - first] = data[first:]
        return at + len(data)


class RingReader:
    """The consumer's side; one thread at a time pops."""

    def __init__(self, memory: memoryview) -> None:
        """Take a part of a mapping: COUNTERS_BYTES, then the data."""
        self._counters = memory[:COUNTERS_BYTES].cast("Q")
        self._data = memory[COUNTERS_BYTES:]
        self._capacity = len(self._data)
        self._tail = self._counters[_TAIL]

    def is_empty(self) -> bool:
        """Say whether there is nothing to pop."""
        return self._counters[_HEAD] == self._tail

    def pop(self) -> tuple[bytes, bytes] | None:
        """Copy the oldest record out; None when there is none.

        Raises MalformedMessage for counters or lengths that cannot be; the ring is of no more
        use then.
        """
        used = self._counters[_HEAD] - self._tail
        if used == 0:
            return None
        if not _LENGTHS.size <= used <= self._capacity:
            raise MalformedMessage(f"a ring of {self._capacity} bytes says it holds {used}")
        num_header, num_body = _LENGTHS.unpack(self._get(self._tail, _LENGTHS.size))
        size = _padded(_LENGTHS.size + num_header + num_body)
        if num_header > MAX_HEADER_BYTES or size > used:
            raise MalformedMessage(
                f"a record of {num_header} and {num_body} bytes, where {used} are used"
            )
        at = self._tail + _LENGTHS.size
        record = self._get(at, num_header), self._get(at + num_header, num_body)
        self._tail += size
        self._counters[_TAIL] = self._tail  # after the data was copied
        return record

    def release(self) -> None:
        """Let go of the memory; nothing may be popped from now on. Idempotent."""
        self._counters.release()
        self._data.release()

    def _get(self, at: int, size: int) -> bytes:
        start = at % self._capacity
        first = min(size, self._capacity - start)
        if first == size:
            return bytes(self._data[start : start + size])
        return bytes(self._data[start:]) + bytes(self._data[: size - first])


class Bell:
    """One end of a pipe that says there is something to pop, and by its end that nobody is left."""

    def __init__(self, descriptor: int) -> None:
        """Own a descriptor."""
        os.set_blocking(descriptor, False)
        self.descriptor = descriptor

    def ring(self) -> None:
        """Wake the other side; does nothing when it has been woken often enough, or is gone."""
        with suppress(BlockingIOError, BrokenPipeError):
            os.write(self.descriptor, _RING)

    def drain(self) -> bool:
        """Forget how often it rang; False when the other side is gone."""
        try:
            return bool(os.read(self.descriptor, _DRAIN_BYTES))
        except BlockingIOError:
            return True

    def wait(self, timeout_s: float) -> None:
        """Return when it rings or the time is over."""
        poller = select.poll()
        poller.register(self.descriptor, select.POLLIN)
        poller.poll(timeout_s * 1000)

    def close(self) -> None:
        """Close the descriptor. Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
