"""Layer 5. How a scheduler starts on a worker that another one may have used before."""

from __future__ import annotations

from gpuworker.engine.worker import WorkerLike
from gpuworker.errors import IllegalMessage
from gpuworker.messages import ExecuteModel, GetLimits, GetStatus, Limits

__all__ = ["end_live_requests", "serving_limits"]


async def serving_limits(worker: WorkerLike) -> Limits:
    """Return the limits of a worker that serves; raises IllegalMessage for any other."""
    status = await worker.ask(GetStatus())
    if status.state != "serving":
        raise IllegalMessage(
            f"the worker is {status.state} and runs no steps; call bring_up first",
            state=status.state,
        )
    return await worker.ask(GetLimits())


async def end_live_requests(worker: WorkerLike, limits: Limits) -> Limits:
    """End what a scheduler that is gone left behind, and return the limits after that.

    The requests are named in a step without rows; it takes the first of the step ids. Raises
    what the worker answers, with nothing changed.
    """
    if not limits.live_requests:
        return limits
    await worker.ask(
        ExecuteModel(
            step_id=limits.next_step_id,
            kv_epoch=limits.kv_epoch,
            num_rows=0,
            finished=limits.live_requests,
        )
    )
    return await worker.ask(GetLimits())
