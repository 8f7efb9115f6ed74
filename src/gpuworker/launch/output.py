"""Layer 5. What a child writes: kept in a file without a name, so nobody has to read it."""

from __future__ import annotations

import os
import tempfile

__all__ = ["Output"]

_TAIL_BYTES = 64 << 10
_CHUNK_BYTES = 1 << 20


class Output:
    """An unnamed file that a child writes to; a pipe would stop it when nobody reads.

    It vanishes with the last process that has it open. Reading does not move the position
    that the child, which shares the descriptor, writes at.
    """

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        self._seen_bytes = 0

    def fileno(self) -> int:
        """Return the descriptor, to be given to a child."""
        return self._file.fileno()

    def new_lines(self) -> list[bytes]:
        """Return the complete lines that were not returned before."""
        text = b""
        while chunk := os.pread(self.fileno(), _CHUNK_BYTES, self._seen_bytes + len(text)):
            text += chunk
        complete = text[: text.rfind(b"\n") + 1]
        self._seen_bytes += len(complete)
        return complete.splitlines()

    def last_lines(self, count: int) -> str:
        """Return the last lines, of what fits into 64 KiB."""
        size = os.fstat(self.fileno()).st_size
        tail = os.pread(self.fileno(), _TAIL_BYTES, max(size - _TAIL_BYTES, 0))
        return "\n".join(tail.decode(errors="replace").splitlines()[-count:])

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._file.close()
