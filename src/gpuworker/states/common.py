"""Layer 3. What several states accept in the same way. (GetStatus is answered by the actor.)"""

from __future__ import annotations

import asyncio

from gpuworker.errors import InvalidRequest
from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import (
    Closed,
    DropRequests,
    GetKVCacheSpec,
    GetLimits,
    KVCacheSpec,
    Limits,
    RequestsDropped,
    Shutdown,
    StopTrace,
    TraceStopped,
)
from gpuworker.permit import Permit
from gpuworker.runtime import Runtime

__all__ = [
    "accept_drop_requests",
    "accept_questions",
    "accept_shutdown",
    "accept_stop_trace",
    "require_model",
]


async def _shut_down(rt: Runtime, request: Shutdown, undo: Undo) -> Closed:
    undo.commit()
    if not rt.device.is_lost:  # a thread that is stuck releases nothing
        await rt.device.run(rt.release_all)
    return Closed()


def _get_limits(rt: Runtime, request: GetLimits, permit: Permit) -> asyncio.Future[Limits]:
    require_model(rt)
    return rt.device.submit(permit.guard(rt.limits))


def _get_kv_cache_spec(
    rt: Runtime, request: GetKVCacheSpec, permit: Permit
) -> asyncio.Future[KVCacheSpec]:
    require_model(rt)
    return rt.device.submit(permit.guard(rt.kv_cache_spec))


def _stop_trace(rt: Runtime, request: StopTrace, permit: Permit) -> asyncio.Future[TraceStopped]:
    def stop() -> TraceStopped:
        path = rt.stop_trace()
        return TraceStopped(changed=bool(path), path=path)

    return rt.device.submit(permit.guard(stop))


def _drop_requests(
    rt: Runtime, request: DropRequests, permit: Permit
) -> asyncio.Future[RequestsDropped]:
    def drop() -> RequestsDropped:
        num_dropped = rt.drop_requests()
        rt.progress.aborted_after = None
        return RequestsDropped(num_dropped=num_dropped)

    return rt.device.submit(permit.guard(drop))


def accept_shutdown(table: StateTable[Runtime]) -> None:
    """Let a state move to CLOSED, releasing whatever is held by then."""
    table.moves(Shutdown, to=State.CLOSED)(_shut_down)


def accept_questions(table: StateTable[Runtime]) -> None:
    """Let a state describe its model: GetLimits and GetKVCacheSpec."""
    table.on(GetLimits)(_get_limits)
    table.on(GetKVCacheSpec)(_get_kv_cache_spec)


def accept_drop_requests(table: StateTable[Runtime]) -> None:
    """Let a state forget its requests, as a scheduler does that takes over."""
    table.on(DropRequests)(_drop_requests)


def accept_stop_trace(table: StateTable[Runtime]) -> None:
    """Let a state end a trace."""
    table.on(StopTrace)(_stop_trace)


def require_model(rt: Runtime) -> None:
    """Raise InvalidRequest unless a model is loaded."""
    if not rt.has_model():
        raise InvalidRequest("no model is loaded yet; send load_model first")
