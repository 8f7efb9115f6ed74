"""Layer 0. Whether a message that was accepted may still be carried out when its turn comes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from gpuworker.errors import DeadlineExceeded, WorkerError

__all__ = ["Permit"]

T = TypeVar("T")


class Permit:
    """Decides between starting a message and withdrawing it; the first of the two wins.

    The device thread starts, the event loop revokes. A deadline is on the clock of
    time.monotonic and is looked at only when the message's turn comes, because what runs on
    the device cannot be interrupted.
    """

    __slots__ = ("_claim", "_deadline", "_error")

    def __init__(self, budget_s: float | None = None) -> None:
        """Give a permit that ends budget_s seconds from now; None, never."""
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        self._error: WorkerError | None = None
        self._claim = threading.Lock()

    @property
    def is_decided(self) -> bool:
        """Whether the message was started or revoked."""
        return self._claim.locked()

    def start(self) -> None:
        """Begin; raises the error it was revoked with, or DeadlineExceeded."""
        if not self._claim.acquire(blocking=False):
            error = self._error
            assert error is not None, "a message is started once"
            raise error
        if self._deadline is not None and (late_s := time.monotonic() - self._deadline) > 0:
            raise DeadlineExceeded(
                f"its turn came {late_s:.3f} s after its deadline; nothing was done. Allow more "
                "time, or send less ahead of it"
            )

    def revoke(self, error: WorkerError) -> bool:
        """Withdraw the message; says whether it had not started, and so never will."""
        if self._error is None:
            self._error = error  # before the claim: start reads it when it finds the claim taken
        return self._claim.acquire(blocking=False)

    def guard(self, call: Callable[[], T]) -> Callable[[], T]:
        """Return a call that starts before it calls."""

        def guarded() -> T:
            self.start()
            return call()

        return guarded
