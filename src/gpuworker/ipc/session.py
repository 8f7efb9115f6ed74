"""Layer 0. Who may say what on an endpoint: one scheduler at a time, the newest wins.

Pure bookkeeping, no I/O: the server calls it from the event loop's thread and does what it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Literal

from gpuworker.errors import Fenced, InvalidRequest, NoSession, RequestCancelled, StaleEpoch
from gpuworker.ipc.epoch_file import EpochFile
from gpuworker.ipc.ledger import StepLedger
from gpuworker.ipc.wire import RequestHeader
from gpuworker.messages import (
    ExecuteModel,
    GetHealth,
    GetKVCacheSpec,
    GetLimits,
    GetStatus,
    Hello,
    Request,
    SessionHealth,
)
from gpuworker.permit import Permit

__all__ = ["OBSERVER_REQUESTS", "Call", "Session", "SessionBook"]

OBSERVER_REQUESTS: frozenset[type[Request[Any]]] = frozenset(
    {GetHealth, GetStatus, GetLimits, GetKVCacheSpec}
)
"""Questions that anybody may ask; they change nothing."""


class Session:
    """One scheduler's time with the worker."""

    def __init__(self, peer: bytes, hello: Hello, window: int, now: float) -> None:
        self.peer = peer
        self.epoch = hello.epoch
        self.client = hello.client
        self.lease_s = hello.lease_ms / 1000
        self.heard = now
        self.ledger = StepLedger(window)
        self.calls: dict[int, Call] = {}


class Call:
    """A request that was accepted and is not answered yet."""

    __slots__ = ("corr", "peer", "permit", "seq", "session")

    def __init__(self, peer: bytes, header: RequestHeader, session: Session | None) -> None:
        self.peer = peer
        self.corr = header.corr
        self.seq = 0
        self.session = session
        self.permit = Permit(header.budget_us / 1e6 if header.budget_us else None)


class SessionBook:
    """All sessions of an endpoint: the present one, and the highest epoch of the past ones."""

    def __init__(
        self, epochs: EpochFile, window: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._epochs = epochs
        self._window = window
        self._clock = clock
        self._session: Session | None = None  # the one that may speak
        self._claimant: Session | None = None  # the newest, welcomed or not
        self._claimed = epochs.highest

    @property
    def epoch(self) -> int:
        """Epoch of the present session; 0 without one."""
        return self._session.epoch if self._session is not None else 0

    @property
    def window(self) -> int:
        """Steps that a session may have unanswered."""
        return self._window

    def health(self) -> SessionHealth:
        """Describe who drives the worker."""
        session = self._session
        if session is None:
            return SessionHealth(highest_epoch=self._claimed, client="", live=False, silent_s=0.0)
        silent_s = self._clock() - session.heard
        return SessionHealth(
            highest_epoch=self._claimed,
            client=session.client,
            live=not session.lease_s or silent_s <= session.lease_s,
            silent_s=silent_s,
        )

    def claim(self, peer: bytes, hello: Hello) -> Session:
        """Begin a session in place of the present one; raises Fenced and changes nothing then.

        What the old one has queued is revoked. The new one may say nothing until it was
        welcomed: the server records its epoch, waits for the step that runs, lets the worker
        drop the old requests, and calls welcome.
        """
        if hello.epoch <= self._claimed:
            raise Fenced(
                f"epoch {hello.epoch} is not above {self._claimed}, the highest one seen; a newer "
                "scheduler has been here"
            )
        self._claimed = hello.epoch
        claimant = self._claimant = Session(peer, hello, self._window, self._clock())
        old, self._session = self._session, None
        if old is not None:
            for call in tuple(old.calls.values()):
                call.permit.revoke(_stale(old, claimant))
        return claimant

    def record(self, session: Session) -> None:
        """Write the epoch of a claimed session down; blocks, any thread. Raises ConfigError."""
        if session.epoch > self._epochs.highest:
            self._epochs.raise_to(session.epoch)

    def welcome(self, session: Session) -> None:
        """Let a claimed session speak; raises Fenced when a newer one came in the meantime."""
        if session is not self._claimant:
            raise Fenced(
                f"epoch {session.epoch} was overtaken by epoch {self._claimed} before it was "
                "welcomed"
            )
        self._session = session
        session.heard = self._clock()

    def give_up(self, session: Session) -> None:
        """End a session, if it still is the present one; its calls are still carried out."""
        if session is self._session:
            self._session = None

    def check(self, session: Session, header: RequestHeader) -> None:
        """Raise unless a step on the ring of a session may be carried out. Any thread."""
        if session is not self._session or header.epoch != session.epoch:
            raise self._refusal(header)
        now = self._clock()
        if session.lease_s and now - session.heard > session.lease_s:
            raise self._refusal(header)
        session.heard = now

    def successor_of(self, session: Session) -> StaleEpoch | None:
        """Return what a session that was replaced is told; None for the newest. Any thread."""
        newest = self._claimant
        return None if newest is None or newest is session else _stale(session, newest)

    def accept(self, peer: bytes, header: RequestHeader, message: type[Request[Any]]) -> Call:
        """Decide whether a request may be passed on; nothing is remembered yet, see begin.

        Raises NoSession, StaleEpoch and InvalidRequest, and for a new step what
        StepLedger.check raises. For a step that was here before, call.seq is 0.
        """
        session = self._session_of(peer)
        if header.seq and message is not ExecuteModel:
            raise InvalidRequest(f"only steps are numbered, and this has number {header.seq}")
        if message in OBSERVER_REQUESTS:
            return Call(peer, header, session)
        if session is None:
            raise self._refusal(header)
        if header.epoch != session.epoch:
            raise StaleEpoch(
                f"the message names epoch {header.epoch}, the session has {session.epoch}"
            )
        call = Call(peer, header, session)
        if message is ExecuteModel:
            if header.seq == 0:
                raise InvalidRequest("a step needs a number in its header, from 1 on; this has 0")
            if session.ledger.check(header.seq):
                call.seq = header.seq
        if header.corr in session.calls and bool(call.seq) == (message is ExecuteModel):
            raise InvalidRequest(
                f"corr {header.corr} is under way already; count it up with every request"
            )
        return call

    def begin(self, call: Call) -> None:
        """Remember a call that the worker has accepted."""
        if call.session is not None:
            call.session.calls[call.corr] = call
            if call.seq:
                call.session.ledger.begin(call.seq)

    def end(self, call: Call) -> StaleEpoch | None:
        """Forget a call that was answered; returns what to answer when its session is over."""
        session = call.session
        if session is None:
            return None
        session.calls.pop(call.corr, None)
        return self.successor_of(session)

    def cancel(self, peer: bytes, corr: int) -> Literal["withdrawn", "started", "unknown"]:
        """Withdraw a request of this peer unless it has started."""
        session = self._session_of(peer)
        call = session.calls.get(corr) if session is not None else None
        if call is None:
            return "unknown"
        withdrawn = call.permit.revoke(
            RequestCancelled("withdrawn by its sender before its turn came; nothing was done")
        )
        return "withdrawn" if withdrawn else "started"

    def owner(self, peer: bytes, header: RequestHeader) -> Session:
        """Return the session of a peer; raises NoSession or StaleEpoch."""
        session = self._session_of(peer)
        if session is None:
            raise self._refusal(header)
        return session

    def _session_of(self, peer: bytes) -> Session | None:
        session = self._session
        if session is None or session.peer != peer:
            return None
        now = self._clock()
        if session.lease_s and now - session.heard > session.lease_s:
            return None
        session.heard = now
        return session

    def _refusal(self, header: RequestHeader) -> NoSession | StaleEpoch:
        if 0 < header.epoch < self._claimed:
            return StaleEpoch(
                f"epoch {header.epoch} is over, a scheduler with epoch {self._claimed} has taken "
                "over; nothing was done"
            )
        if header.epoch and header.epoch == self.epoch:
            return NoSession(
                f"this connection does not hold the session of epoch {header.epoch}: its lease "
                "has run out, it was not welcomed yet, or it belongs to another connection; say "
                f"hello with an epoch above {self._claimed}"
            )
        return NoSession(
            f"this message needs a session; say hello with an epoch above {self._claimed}"
        )


def _stale(old: Session, new: Session) -> StaleEpoch:
    return StaleEpoch(
        f"the session of epoch {old.epoch} is over, {new.client or 'a scheduler'} with epoch "
        f"{new.epoch} has taken over"
    )
