"""Layer 0. Everything that can be said to a worker.

Requests are imperatives, replies are facts. `class InitDevice(Request[DeviceReady])` is the
pairing of the two; REQUESTS is the one table. The server's decoder, the clients' reply
decoders, the command line's verbs, the JSON schema and the reference under docs/ derive from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

from gpuworker.health import HealthReport, PeerHealth, SessionHealth
from gpuworker.replies import (
    Asleep,
    Awake,
    Cancelled,
    Closed,
    DeviceReady,
    DummyBatchExecuted,
    Failure,
    Health,
    KVCacheAllocated,
    KVCacheSpec,
    KVLayerSpec,
    Limits,
    MaxModelLenUpdated,
    MemoryProfiled,
    MemoryUse,
    ModelLoaded,
    PoolsResumed,
    Reply,
    RequestsDropped,
    RingOpened,
    ServingStarted,
    SessionEnded,
    Status,
    StepOutput,
    StepsResumed,
    Tag,
    TraceStarted,
    TraceStopped,
    WarmedUp,
    WeightsReloaded,
    WeightsTruth,
    Welcome,
    as_dict,
    message_tag,
)
from gpuworker.step import Count, NewRequest, RequestId

__all__ = [
    "REPLY_OF",
    "REQUESTS",
    "SESSION_REQUESTS",
    "AllocateKVCache",
    "Asleep",
    "Awake",
    "Cancel",
    "Cancelled",
    "Closed",
    "DeviceReady",
    "DropRequests",
    "DummyBatchExecuted",
    "EndSession",
    "ExecuteDummyBatch",
    "ExecuteModel",
    "Failure",
    "GetHealth",
    "GetKVCacheSpec",
    "GetLimits",
    "GetStatus",
    "Health",
    "HealthReport",
    "Hello",
    "InitDevice",
    "KVCacheAllocated",
    "KVCacheSpec",
    "KVLayerSpec",
    "Limits",
    "LoadModel",
    "MaxModelLenUpdated",
    "MemoryProfiled",
    "MemoryUse",
    "ModelLoaded",
    "OpenRing",
    "PeerHealth",
    "PoolsResumed",
    "ProfileMemory",
    "ReloadWeights",
    "Reply",
    "ReplyT",
    "Request",
    "RequestsDropped",
    "ResumePools",
    "ResumeSteps",
    "RingOpened",
    "ServingStarted",
    "SessionEnded",
    "SessionHealth",
    "Shutdown",
    "Sleep",
    "StartServing",
    "StartTrace",
    "Status",
    "StepOutput",
    "StepsResumed",
    "StopTrace",
    "Tag",
    "TraceStarted",
    "TraceStopped",
    "UpdateMaxModelLen",
    "WakeUp",
    "WarmUp",
    "WarmedUp",
    "WeightsReloaded",
    "WeightsTruth",
    "Welcome",
    "as_dict",
    "message_tag",
]

ReplyT = TypeVar("ReplyT", bound=Reply)
_Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Request(
    msgspec.Struct,
    Generic[ReplyT],
    frozen=True,
    kw_only=True,
    array_like=True,
    tag=message_tag,
    forbid_unknown_fields=True,
):
    """Something the worker is told to do; answered by ReplyT or by a Failure."""


class Hello(Request[Welcome], frozen=True):
    """Become the worker's scheduler, in place of any earlier one.

    What an earlier one had queued is revoked, its running step is waited for, its requests are
    dropped; then this is answered. Refused with Fenced unless the epoch is above all earlier
    ones, also those before the worker was started again.
    """

    min_version: Annotated[int, msgspec.Meta(ge=0, le=255)]
    """Lowest and highest major version that the sender speaks."""
    max_version: Annotated[int, msgspec.Meta(ge=0, le=255)]
    epoch: Annotated[int, msgspec.Meta(ge=1, le=2**53 - 1)]
    client: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """A name for people who ask who drives the worker."""
    features: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=64)], ...], msgspec.Meta(max_length=32)
    ] = ()
    """What the sender would like to use."""
    lease_ms: Annotated[int, msgspec.Meta(ge=0, le=86_400_000)] = 0
    """Silence after which the session shall end; 0, never."""


class EndSession(Request[SessionEnded], frozen=True):
    """Give the worker up; what was accepted is still carried out."""


class Cancel(Request[Cancelled], frozen=True):
    """Withdraw a request of this connection that has not started; it is answered cancelled."""

    corr: Annotated[int, msgspec.Meta(ge=0, le=2**53 - 1)]
    """The number that the request travelled under."""


class OpenRing(Request[RingOpened], frozen=True):
    """Exchange the session's messages through shared memory from now on, on the same machine.

    Only while nothing of the session is unanswered. Session messages and questions of
    observers still go over the socket.
    """


class InitDevice(Request[DeviceReady], frozen=True):
    """Choose the device and prepare it for this rank."""


class LoadModel(Request[ModelLoaded], frozen=True):
    """Read the checkpoint into the weight arena; every fault of it is found before."""


class GetKVCacheSpec(Request[KVCacheSpec], frozen=True):
    """Describe what the model keeps per token."""


class GetLimits(Request[Limits], frozen=True):
    """Report the limits of steps and of requests, for a scheduler that starts or takes over."""


class ProfileMemory(Request[MemoryProfiled], frozen=True):
    """Run the largest batch once and report what is left for the KV cache."""


class UpdateMaxModelLen(Request[MaxModelLenUpdated], frozen=True):
    """Set a shorter limit, for example what the KV cache can hold."""

    max_model_len: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class AllocateKVCache(Request[KVCacheAllocated], frozen=True):
    """Create the block pool; the number is the caller's, so that all ranks agree."""

    num_blocks: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]


class WarmUp(Request[WarmedUp], frozen=True):
    """Run every shape that serving needs, so that the first step is not the slow one."""


class StartServing(Request[ServingStarted], frozen=True):
    """Accept steps from now on."""


class ExecuteModel(Request[StepOutput], frozen=True, gc=False):
    """Run one step: finish, add, compute, sample; see gpuworker.step for the buffer."""

    step_id: _Number
    kv_epoch: _Number
    num_rows: Count
    num_block_ids: Count = 0
    num_token_ids: Count = 0
    new_requests: tuple[NewRequest, ...] = ()
    finished: tuple[RequestId, ...] = ()
    """Requests that end before this step; their slots are free for its new requests."""
    buffer: memoryview = memoryview(b"")


class ResumeSteps(Request[StepsResumed], frozen=True):
    """Compute steps again after one did not run; those behind it were answered aborted.

    Whoever sends this knows which steps ran and which did not.
    """

    step_id: _Number
    """The step that did not run, as a proof that its answer was seen."""


class DropRequests(Request[RequestsDropped], frozen=True):
    """Forget every live request, and that a step did not run."""


class ExecuteDummyBatch(Request[DummyBatchExecuted], frozen=True):
    """Run a forward pass without requests, to keep step with the other ranks."""

    num_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)] = 1


class Sleep(Request[Asleep], frozen=True):
    """Finish the steps ahead, then release memory. Level 1 keeps the weights, level 2 nothing."""

    level: Literal[1, 2] = 1


class ResumePools(Request[PoolsResumed], frozen=True):
    """Bring the named memory back and stay asleep, for example to load weights first."""

    tags: tuple[Tag, ...]


class WakeUp(Request[Awake], frozen=True):
    """Bring back whatever is still asleep and serve; needs defined weights."""


class ReloadWeights(Request[WeightsReloaded], frozen=True):
    """Read the checkpoint again into the resident weight arena."""


class StartTrace(Request[TraceStarted], frozen=True):
    """Record a timeline of the steps; idempotent."""


class StopTrace(Request[TraceStopped], frozen=True):
    """Stop recording and write the file; idempotent."""


class GetStatus(Request[Status], frozen=True):
    """Report state, residency, progress and the last error; never waits behind a step."""


class GetHealth(Request[HealthReport], frozen=True):
    """Report whether the worker lives, can serve and gets on; cheap, and never waits."""


class Shutdown(Request[Closed], frozen=True):
    """Finish the steps ahead, release everything, answer whatever is queued, and close."""


REQUESTS: tuple[type[Request[Any]], ...] = (
    Hello,
    EndSession,
    Cancel,
    OpenRing,
    InitDevice,
    LoadModel,
    GetKVCacheSpec,
    GetLimits,
    ProfileMemory,
    UpdateMaxModelLen,
    AllocateKVCache,
    WarmUp,
    StartServing,
    ExecuteModel,
    ResumeSteps,
    DropRequests,
    ExecuteDummyBatch,
    Sleep,
    ResumePools,
    WakeUp,
    ReloadWeights,
    StartTrace,
    StopTrace,
    GetStatus,
    GetHealth,
    Shutdown,
)
SESSION_REQUESTS: frozenset[type[Request[Any]]] = frozenset({Hello, EndSession, Cancel, OpenRing})
"""Those that a connection answers, not the worker behind it."""


def _reply_type(request: type[Request[Any]]) -> type[Reply]:
    bases: tuple[Any, ...] = request.__dict__["__orig_bases__"]
    reply: type[Reply] = get_args(bases[0])[0]
    return reply


REPLY_OF: dict[type[Request[Any]], type[Reply]] = {
    request: _reply_type(request) for request in REQUESTS
}
