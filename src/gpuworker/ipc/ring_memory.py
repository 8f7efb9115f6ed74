"""Layer 0. The shared memory of two rings and their bells; it has no name and outlives nobody.

The worker makes a memory file and two pipes. A client of the same user opens them through /proc
as long as the worker holds them, and after that each end notices when the other is gone.
"""

from __future__ import annotations

import mmap
import os
import platform
import sys
from collections.abc import Sequence
from typing import Self

from gpuworker.errors import ConfigError, InvalidRequest
from gpuworker.ipc.ring import COUNTERS_BYTES, Bell, RingReader, RingWriter
from gpuworker.messages import RingOpened

__all__ = ["RING_BYTES", "ClientRings", "WorkerRings", "can_have_rings"]

RING_BYTES = 8 << 20
"""Data of each of the two rings; pages that nothing is written to take no memory."""
_PART_BYTES = COUNTERS_BYTES + RING_BYTES


def can_have_rings() -> bool:
    """Say whether this machine can: Python has no fences, so its stores must keep their order."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64")


class _Rings:
    """A mapping with both rings: requests first, then replies."""

    def __init__(self, memory_descriptor: int) -> None:
        self._mapping = mmap.mmap(memory_descriptor, 2 * _PART_BYTES)

    def _part(self, number: int) -> memoryview:
        return memoryview(self._mapping)[number * _PART_BYTES : (number + 1) * _PART_BYTES]


class WorkerRings(_Rings):
    """The worker's side: reads requests, writes replies."""

    def __init__(self) -> None:
        """Make the memory; raises InvalidRequest where the system cannot."""
        if not can_have_rings():
            raise InvalidRequest(
                f"rings need Linux and the order of stores of x86-64, this is {sys.platform} on "
                f"{platform.machine()}; go on over the socket"
            )
        self._memory = os.memfd_create("gpuworker-ring", os.MFD_CLOEXEC)
        os.ftruncate(self._memory, 2 * _PART_BYTES)
        super().__init__(self._memory)
        request_bell, self._request_end = os.pipe2(os.O_CLOEXEC)
        self._reply_end, reply_bell = os.pipe2(os.O_CLOEXEC)
        self.requests = RingReader(self._part(0))
        self.replies = RingWriter(self._part(1))
        self.request_bell, self.reply_bell = Bell(request_bell), Bell(reply_bell)
        self._lent: list[int] = [self._memory, self._request_end, self._reply_end]

    def opened(self) -> RingOpened:
        """Say what a client opens."""
        return RingOpened(
            pid=os.getpid(),
            memory_fd=self._memory,
            request_bell_fd=self._request_end,
            reply_bell_fd=self._reply_end,
            ring_bytes=RING_BYTES,
        )

    def keep_own(self) -> None:
        """Let go of what the client has opened by now; its end is noticed from here on."""
        while self._lent:
            os.close(self._lent.pop())

    def close(self) -> None:
        """Let go of everything; the client notices. Idempotent."""
        self.keep_own()
        self.request_bell.close()
        self.reply_bell.close()
        self.requests.release()
        self.replies.release()
        self._mapping.close()


class ClientRings(_Rings):
    """A client's side: writes requests, reads replies."""

    @classmethod
    def open(cls, opened: RingOpened) -> Self:
        """Open what a worker has made; raises ConfigError when this process cannot reach it."""
        descriptors: list[int] = []
        try:
            for number, flags in (
                (opened.memory_fd, os.O_RDWR),
                (opened.request_bell_fd, os.O_WRONLY),
                (opened.reply_bell_fd, os.O_RDONLY),
            ):
                path = f"/proc/{opened.pid}/fd/{number}"
                descriptors.append(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK))
            memory, request_bell, reply_bell = descriptors
            if opened.ring_bytes != RING_BYTES or os.fstat(memory).st_size != 2 * _PART_BYTES:
                raise ConfigError("the worker's ring has another size than this release uses")
            return cls(memory, Bell(request_bell), Bell(reply_bell))
        except (OSError, ConfigError) as error:
            for descriptor in descriptors:
                os.close(descriptor)
            raise ConfigError(
                f"cannot open the ring of process {opened.pid}: {error}; a ring needs the same "
                "machine, user and process namespace, connect without it"
            ) from error

    def __init__(self, memory: int, request_bell: Bell, reply_bell: Bell) -> None:
        super().__init__(memory)
        os.close(memory)
        self.requests = RingWriter(self._part(0))
        self.replies = RingReader(self._part(1))
        self.request_bell, self.reply_bell = request_bell, reply_bell

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message; False when there is no room. Raises like RingWriter.push."""
        header, body = frames
        if not self.requests.push(header, body):
            return False
        self.request_bell.ring()
        return True

    def close(self) -> None:
        """Let go of everything; the worker notices. Idempotent."""
        self.request_bell.close()
        self.reply_bell.close()
        self.requests.release()
        self.replies.release()
        self._mapping.close()
