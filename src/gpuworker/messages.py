"""Layer 0. Everything that can be said to a worker.

Requests are imperatives, replies are facts. `class InitDevice(Request[DeviceReady])` is the
pairing of the two; REQUESTS is the one table. The server's decoder, the clients' reply
decoders, the command line's verbs, the JSON schema and the reference under docs/ derive from it.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar, get_args

import msgspec

from gpuworker.replies import (
    Asleep,
    Awake,
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
    ServingStarted,
    Status,
    StepOutput,
    Tag,
    TraceStarted,
    TraceStopped,
    WarmedUp,
    WeightsReloaded,
    WeightsTruth,
    as_dict,
    message_tag,
)
from gpuworker.step import Count, NewRequest, RequestId

__all__ = [
    "REPLY_OF",
    "REQUESTS",
    "AllocateKVCache",
    "Asleep",
    "Awake",
    "Closed",
    "DeviceReady",
    "DummyBatchExecuted",
    "ExecuteDummyBatch",
    "ExecuteModel",
    "Failure",
    "GetKVCacheSpec",
    "GetLimits",
    "GetStatus",
    "Health",
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
    "PoolsResumed",
    "ProfileMemory",
    "ReloadWeights",
    "Reply",
    "ReplyT",
    "Request",
    "ResumePools",
    "ServingStarted",
    "Shutdown",
    "Sleep",
    "StartServing",
    "StartTrace",
    "Status",
    "StepOutput",
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


class Shutdown(Request[Closed], frozen=True):
    """Finish the steps ahead, release everything, answer whatever is queued, and close."""


REQUESTS: tuple[type[Request[Any]], ...] = (
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
    ExecuteDummyBatch,
    Sleep,
    ResumePools,
    WakeUp,
    ReloadWeights,
    StartTrace,
    StopTrace,
    GetStatus,
    Shutdown,
)


def _reply_type(request: type[Request[Any]]) -> type[Reply]:
    bases: tuple[Any, ...] = request.__dict__["__orig_bases__"]
    reply: type[Reply] = get_args(bases[0])[0]
    return reply


REPLY_OF: dict[type[Request[Any]], type[Reply]] = {
    request: _reply_type(request) for request in REQUESTS
}
