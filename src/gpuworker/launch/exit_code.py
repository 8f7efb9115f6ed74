"""Layer 5. What the exit status of a worker process says."""

from __future__ import annotations

from enum import IntEnum
from typing import Self

__all__ = ["ExitCode"]


class ExitCode(IntEnum):
    """Exit statuses of `gpuworker serve`; meaning says each in a line."""

    meaning: str

    def __new__(cls, value: int, meaning: str) -> Self:
        member = int.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    ORDERLY = 0, "orderly end: shutdown, SIGTERM or SIGINT, everything answered and released"
    FAILED = 1, "could not start, or failed in a way that nobody foresaw"
    USAGE = 2, "usage or configuration"
    FAULTED = 3, "the worker faulted: its device or a peer is lost"
    GIVEN_UP = 4, "given up: a step, a move, the event loop or the end itself took too long"
    ORPHANED = 5, "a process it follows died, and it could not end in order in time"
    INTERRUPTED = 130, "told a second time to end, so it ended at once"

    @classmethod
    def table(cls) -> str:
        """Return one line per status, for a help text."""
        return "\n".join(f"  {code:>3}  {code.meaning}" for code in cls)
