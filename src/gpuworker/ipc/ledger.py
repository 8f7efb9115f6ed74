"""Layer 0. The steps of one session by their numbers: each is carried out at most once.

A pure book; it does no I/O and belongs to one thread at a time.
"""

from __future__ import annotations

from collections import OrderedDict

from gpuworker.errors import Busy, DuplicateExpired, OutOfOrder

__all__ = ["MAX_REPLAY_BYTES", "NUM_REPLAYS", "StepLedger"]

NUM_REPLAYS = 64
"""Answers that are kept for a scheduler that asks again."""
MAX_REPLAY_BYTES = 64 << 20
"""What they may take together; the newest is kept in any case."""


class StepLedger:
    """Numbers from 1 on without gaps, at most `window` of them unanswered."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._next_seq = 1
        self._running: dict[int, list[int]] = {}  # seq -> who else waits, by corr
        self._answers: OrderedDict[int, bytes] = OrderedDict()
        self._answer_bytes = 0

    @property
    def num_running(self) -> int:
        """Steps that were accepted and not answered."""
        return len(self._running)

    def answer_of(self, seq: int, corr: int) -> bytes | None:
        """Return the body that a number was answered with, or None when it is still to come.

        In the second case corr is remembered and gets the answer, too. Raises KeyError for a
        number that was never accepted; check says which of the three a number is.
        """
        answer = self._answers.get(seq)
        if answer is None:
            self._running[seq].append(corr)
        return answer

    def check(self, seq: int) -> bool:
        """Say whether a number is new (else it is a duplicate with an answer, or one to come).

        Raises DuplicateExpired for a number whose answer is gone, OutOfOrder for one that
        leaves a gap, and Busy when the window is full. Nothing changes.
        """
        if seq in self._answers or seq in self._running:
            return False
        if seq < self._next_seq:
            raise DuplicateExpired(
                f"step number {seq} was answered long ago; answers of the last {NUM_REPLAYS} are "
                f"kept, the next new number is {self._next_seq}"
            )
        if seq > self._next_seq:
            raise OutOfOrder(
                f"step number {seq} leaves a gap, the next one is {self._next_seq}; nothing was "
                "accepted"
            )
        if len(self._running) >= self._window:
            raise Busy(
                f"{len(self._running)} steps are unanswered, the window is {self._window}; send "
                f"number {seq} again after a reply"
            )
        return True

    def begin(self, seq: int) -> None:
        """Accept a number that check found to be new."""
        assert seq == self._next_seq, "check comes first"
        self._next_seq += 1
        self._running[seq] = []

    def finish(self, seq: int, body: bytes) -> list[int]:
        """Keep the answer of a number and return who else waits for it, by corr."""
        others = self._running.pop(seq)
        self._answers[seq] = body
        self._answer_bytes += len(body)
        while len(self._answers) > NUM_REPLAYS or (
            self._answer_bytes > MAX_REPLAY_BYTES and len(self._answers) > 1
        ):
            self._answer_bytes -= len(self._answers.popitem(last=False)[1])
        return others
