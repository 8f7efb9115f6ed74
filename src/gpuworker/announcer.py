"""Layer 4. Events of a worker: what has changed between two looks at it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from gpuworker.events import (
    Event,
    HealthChanged,
    KVEpochChanged,
    Listener,
    Metrics,
    MoveProgress,
    StateChanged,
)
from gpuworker.messages import Health
from gpuworker.reports import Moment, activity_of, verdict_of

__all__ = ["Announcer"]


class _Look(NamedTuple):
    state: str
    kv_epoch: int
    health: Health


class Announcer:
    """Calls listeners with events; belongs to the worker's event loop.

    The worker looks whenever something may have changed; tick looks for what time alone
    changes. A listener must neither wait nor raise.
    """

    def __init__(self, moment: Callable[[], Moment]) -> None:
        self._moment = moment
        self._listeners: list[Listener] = []
        self._last: _Look | None = None

    def subscribe(self, listener: Listener) -> Callable[[], None]:
        """Call a listener with every event from now on; returns how to end that."""
        if not self._listeners:
            self._last = _look(self._moment())
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener)

    def snapshot(self) -> Iterator[Event]:
        """Say how things are, as one event of each kind that applies."""
        moment = self._moment()
        look = _look(moment)
        yield StateChanged(state=look.state, previous="")
        yield KVEpochChanged(kv_epoch=look.kv_epoch)
        yield HealthChanged(health=look.health, reason=_reason(moment))
        yield from _progress(moment)
        yield _metrics(moment)

    def look(self) -> None:
        """State what has changed since the last look; nearly free without listeners."""
        if self._listeners:
            self._compare(self._moment())

    def tick(self, *, with_metrics: bool) -> None:
        """Look, and state how far a move has come, and the figures when they are due."""
        if not self._listeners:
            return
        moment = self._moment()
        self._compare(moment)
        for event in _progress(moment):
            self._say(event)
        if with_metrics:
            self._say(_metrics(moment))

    def _compare(self, moment: Moment) -> None:
        before, now = self._last, _look(moment)
        if before is None or before == now:
            return
        self._last = now
        if now.state != before.state:
            self._say(StateChanged(state=now.state, previous=before.state))
        if now.kv_epoch != before.kv_epoch:
            self._say(KVEpochChanged(kv_epoch=now.kv_epoch))
        if now.health != before.health:
            self._say(HealthChanged(health=now.health, reason=_reason(moment)))

    def _say(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            listener(event)


def _look(moment: Moment) -> _Look:
    health = verdict_of(moment, activity_of(moment))
    return _Look(moment.state.value, moment.runtime.kv_epoch(), health)


def _reason(moment: Moment) -> str:
    fault, activity = moment.runtime.progress.fault, activity_of(moment)
    if fault is not None:
        return f"{fault.code}: {fault}"
    if activity is not None and activity.age_s > activity.limit_s:
        return f"{activity.name} runs for {activity.age_s:.1f} s, its limit is {activity.limit_s:g}"
    return ""


def _progress(moment: Moment) -> Iterator[MoveProgress]:
    if moment.moving:
        done_bytes, total_bytes = moment.runtime.progress.move_bytes
        yield MoveProgress(
            move=moment.moving,
            move_s=moment.moving_s,
            done_bytes=done_bytes,
            total_bytes=total_bytes,
        )


def _metrics(moment: Moment) -> Metrics:
    return Metrics(
        num_requests=moment.runtime.num_requests(),
        num_waiting=moment.num_waiting,
        num_in_flight=moment.num_in_flight,
        num_steps=moment.runtime.progress.num_steps,
        running_step_s=moment.running_step_s,
        last_step_s=moment.last_step_s,
        process_bytes=moment.runtime.process_bytes(),
        loop_lag_s=moment.loop_lag_s,
    )
