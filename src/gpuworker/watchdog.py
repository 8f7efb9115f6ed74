"""Layer 4. Looks at a worker from outside: what takes too long is reported, then given up."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import StrEnum
from typing import Protocol

from gpuworker.config import SupervisionConfig
from gpuworker.errors import DeviceFault, WorkerFaulted
from gpuworker.reports import Activity

__all__ = ["Clock", "LoopClock", "Watchdog", "WatchedWorker", "WorkerEnd", "watch"]

_log = logging.getLogger(__name__)
_PERIOD_S = 0.25


class WatchedWorker(Protocol):
    """What a watchdog needs of a worker."""

    @property
    def fault(self) -> WorkerFaulted | None:
        """What ended the worker, when it faulted."""

    def activity(self) -> Activity | None:
        """Say what the device is busy with and since when."""

    def give_up(self, error: DeviceFault) -> None:
        """End the worker, because its device does not come back."""

    def note_loop_lag(self, lag_s: float) -> None:
        """Take in how late the event loop was."""


class Clock(Protocol):
    """A clock and its alarm; tests bring their own."""

    def now(self) -> float:
        """Return seconds that only grow."""

    async def sleep(self, delay_s: float) -> None:
        """Return delay_s later, or as soon after as the event loop gets round to it."""


class LoopClock:
    """The event loop's own time."""

    def now(self) -> float:
        """Return the monotonic clock."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Sleep on the event loop."""
        await asyncio.sleep(delay_s)


class WorkerEnd(StrEnum):
    """How a worker came to be FAULTED."""

    FAULTED = "faulted"
    GIVEN_UP = "given_up"


class Watchdog:
    """Watches one worker, on its event loop.

    What is older than its limit is reported once, in the log and to on_stall. With
    stall_action "fault" it gets stall_grace_s more, from the report on and not counting time
    in which the process itself was stopped; then the worker is given up.
    """

    def __init__(
        self,
        worker: WatchedWorker,
        config: SupervisionConfig,
        *,
        on_stall: Callable[[Activity], None] | None = None,
        clock: Clock | None = None,
        period_s: float = _PERIOD_S,
    ) -> None:
        self._worker = worker
        self._config = config
        self._on_stall = on_stall
        self._clock = clock if clock is not None else LoopClock()
        self._period_s = period_s
        self._stalled: Activity | None = None
        self._granted_s = 0.0
        self._loop_lag_s = 0.0
        self._end = WorkerEnd.FAULTED

    @property
    def stalled(self) -> Activity | None:
        """What was found to be too old at the last look; None when all is well."""
        return self._stalled

    @property
    def loop_lag_s(self) -> float:
        """How late the event loop was at the last look."""
        return self._loop_lag_s

    async def run(self) -> WorkerEnd:
        """Watch until the worker is FAULTED, and say whether it was given up here."""
        while self._worker.fault is None:
            expected = self._clock.now() + self._period_s
            await self._clock.sleep(self._period_s)
            self._loop_lag_s = max(self._clock.now() - expected, 0.0)
            self._worker.note_loop_lag(self._loop_lag_s)
            self._look()
        return self._end

    def _look(self) -> None:
        activity = self._worker.activity()
        if self._worker.fault is not None:
            return
        before, self._stalled = self._stalled, _too_old(activity)
        if before is not None and not _is_same(before, activity):
            _log.warning("%s went on after more than %.1f s", before.name, before.age_s)
        if self._stalled is None:
            return
        if before is not None and _is_same(before, activity):
            self._granted_s += self._period_s
        else:
            self._granted_s = 0.0
            self._report(self._stalled)
        if self._config.stall_action == "fault" and self._granted_s >= self._config.stall_grace_s:
            self._end = WorkerEnd.GIVEN_UP
            self._worker.give_up(self._despair(self._stalled))

    def _report(self, activity: Activity) -> None:
        _log.warning(
            "%s is stalled: it has run for %.1f s, the limit is %g s%s",
            activity.name,
            activity.age_s,
            activity.limit_s,
            f"; given up in {self._config.stall_grace_s:g} s"
            if self._config.stall_action == "fault"
            else "",
        )
        if self._on_stall is not None:
            self._on_stall(activity)

    def _despair(self, activity: Activity) -> DeviceFault:
        field = "step_limit_s" if activity.kind == "step" else "move_limit_s"
        return DeviceFault(
            f"{activity.name} has run for {activity.age_s:.1f} s; its limit is "
            f"{activity.limit_s:g} s and {self._config.stall_grace_s:g} s more were granted. If "
            f"it needs longer, raise supervision.{field}"
        )


@asynccontextmanager
async def watch(
    worker: WatchedWorker,
    config: SupervisionConfig,
    *,
    on_stall: Callable[[Activity], None] | None = None,
) -> AsyncIterator[Watchdog]:
    """Watch an embedded worker for the length of a block."""
    watchdog = Watchdog(worker, config, on_stall=on_stall)
    task = asyncio.create_task(watchdog.run(), name="gpuworker watchdog")
    try:
        yield watchdog
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


def _too_old(activity: Activity | None) -> Activity | None:
    return activity if activity is not None and activity.age_s > activity.limit_s else None


def _is_same(before: Activity, now: Activity | None) -> bool:
    """Say whether something still runs; what has the same name and is younger is another."""
    return (
        now is not None
        and (now.kind, now.name) == (before.kind, before.name)
        and now.age_s >= before.age_s
    )
