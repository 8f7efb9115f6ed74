"""Layer 0. The answer to GetHealth: does the worker live, can it serve, does it get on."""

from __future__ import annotations

import msgspec

from gpuworker.replies import Health, Number, Reply, Tag, WeightsTruth

__all__ = ["HealthReport", "PeerHealth", "SessionHealth"]


class PeerHealth(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What this rank knows of another one."""

    rank: Number
    alive: bool
    silent_s: float
    """Seconds since something was heard of it."""


class SessionHealth(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who drives the worker."""

    highest_epoch: Number
    """The next hello needs a higher one."""
    client: str
    """Name that the scheduler gave itself."""
    live: bool
    """Whether there is a session whose lease has not run out."""
    silent_s: float
    """Seconds since its last message."""


class HealthReport(Reply, frozen=True):
    """Whether the worker lives, can serve, and gets on; answered outside the queue.

    That it is answered at all shows that the event loop lives. A step or a move that is older
    than its limit makes it stalled.
    """

    health: Health
    ready: bool
    """Whether a step would be computed: serving, resident, defined weights, nothing stalled."""
    state: str
    weights: WeightsTruth
    asleep: tuple[Tag, ...]
    num_steps: Number
    """Steps completed since the start."""
    running_step_id: Number | None
    running_step_s: float
    moving: str
    """Tag of the message whose move is under way, or empty."""
    moving_s: float
    limit_s: float
    """Age at which what runs counts as stalled; 0 when nothing runs."""
    aborted_after: Number | None
    """The step that did not run, while later ones are aborted; see resume_steps."""
    last_step_s: float | None
    """Seconds since the last completed step."""
    last_error: str
    fault: str
    """Why the worker cannot go on, or empty; this never goes away."""
    loop_lag_s: float
    """How late the event loop was at the last look."""
    uptime_s: float
    peers: tuple[PeerHealth, ...] = ()
    boot_id: str = ""
    """This and the following are known only on an endpoint."""
    session: SessionHealth | None = None
    events: str = ""
    """Endpoint of the events, or empty."""
