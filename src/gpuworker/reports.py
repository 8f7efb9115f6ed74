"""Layer 4. What a worker says of itself, put together from one look at it."""

from __future__ import annotations

from typing import Literal, NamedTuple

from gpuworker.config import SupervisionConfig
from gpuworker.lifecycle import State
from gpuworker.messages import Health, HealthReport, Status
from gpuworker.runtime import Runtime

__all__ = ["Activity", "Moment", "activity_of", "health_of", "status_of", "verdict_of"]


class Activity(NamedTuple):
    """What the device is busy with."""

    kind: Literal["step", "move", "call"]
    name: str
    age_s: float
    limit_s: float
    """Age at which it counts as stalled."""


class Moment(NamedTuple):
    """One look at a worker; times are on time.monotonic."""

    state: State
    runtime: Runtime
    supervision: SupervisionConfig
    now: float
    moving: str
    """Tag of the message whose move is under way, or empty."""
    moving_since: float
    num_waiting: int
    """Messages whose turn has not come."""
    num_in_flight: int
    """Messages in place that were started or queued on the device."""
    last_error: str
    loop_lag_s: float
    started: float

    @property
    def moving_s(self) -> float:
        """Age of the move under way; 0 without one."""
        return self.now - self.moving_since if self.moving else 0.0

    @property
    def running_step_s(self) -> float:
        """Age of the running step; 0 when none runs."""
        progress = self.runtime.progress
        since = progress.running_since
        return max(self.now - since, 0.0) if since is not None else 0.0

    @property
    def last_step_s(self) -> float | None:
        """Seconds since the last completed step."""
        last_step_at = self.runtime.progress.last_step_at
        return None if last_step_at is None else self.now - last_step_at


def activity_of(moment: Moment) -> Activity | None:
    """Say what the device is busy with and since when; None when nothing runs."""
    limits, busy_since = moment.supervision, moment.runtime.device.busy_since
    running = moment.runtime.progress.running
    if running is not None:
        return Activity("step", f"step {running}", moment.running_step_s, limits.step_limit_s)
    if moment.moving:
        limit_s = limits.limit_of_move_s(moment.moving)
        return Activity("move", moment.moving, moment.moving_s, limit_s)
    if busy_since is not None:
        age_s = max(moment.now - busy_since, 0.0)
        return Activity("call", "a device call", age_s, limits.move_limit_s)
    return None


def health_of(moment: Moment) -> HealthReport:
    """Report whether the worker can serve and gets on; cheap."""
    runtime, progress = moment.runtime, moment.runtime.progress
    activity = activity_of(moment)
    verdict = verdict_of(moment, activity)
    weights, asleep = runtime.weights_truth(), runtime.asleep()
    is_resident = weights == "defined" and not asleep
    is_free = verdict == "ok" and not moment.moving
    return HealthReport(
        health=verdict,
        ready=moment.state is State.SERVING and is_resident and is_free,
        state=moment.state.value,
        weights=weights,
        asleep=asleep,
        num_steps=progress.num_steps,
        running_step_id=progress.running,
        running_step_s=moment.running_step_s,
        moving=moment.moving,
        moving_s=moment.moving_s,
        limit_s=activity.limit_s if activity is not None else 0.0,
        aborted_after=progress.aborted_after,
        last_step_s=moment.last_step_s,
        last_error=progress.last_error or moment.last_error,
        fault="" if progress.fault is None else f"{progress.fault.code}: {progress.fault}",
        loop_lag_s=moment.loop_lag_s,
        uptime_s=moment.now - moment.started,
    )


def status_of(moment: Moment) -> Status:
    """Report everything there is to know, memory measured."""
    runtime, progress = moment.runtime, moment.runtime.progress
    running = progress.running
    num_behind = max(moment.num_in_flight - (running is not None), 0)
    return Status(
        state=moment.state.value,
        health=verdict_of(moment, activity_of(moment)),
        weights=runtime.weights_truth(),
        asleep=runtime.asleep(),
        memory=runtime.memory(),
        process_bytes=runtime.process_bytes(),
        kv_epoch=runtime.kv_epoch(),
        weight_version=runtime.weight_version(),
        num_requests=runtime.num_requests(),
        num_queued=moment.num_waiting + num_behind,
        num_steps=progress.num_steps,
        running_step_id=running,
        running_step_s=moment.running_step_s,
        moving=moment.moving,
        moving_s=moment.moving_s,
        last_step_s=moment.last_step_s,
        last_error=progress.last_error or moment.last_error,
    )


def verdict_of(moment: Moment, activity: Activity | None) -> Health:
    """Say whether all is well, given what the device is busy with."""
    if moment.state is State.FAULTED:
        return "faulted"
    if activity is not None and activity.age_s > activity.limit_s:
        return "stalled"
    return "ok"
