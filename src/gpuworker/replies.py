"""Layer 0. Every answer of a worker: facts, named by what has become true."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec

from gpuworker.step import Count, Logprobs, Refusal

__all__ = [
    "Asleep",
    "Awake",
    "Cancelled",
    "Closed",
    "DeviceReady",
    "DummyBatchExecuted",
    "Failure",
    "Health",
    "KVCacheAllocated",
    "KVCacheSpec",
    "KVLayerSpec",
    "Limits",
    "MaxModelLenUpdated",
    "MemoryProfiled",
    "MemoryUse",
    "ModelLoaded",
    "Number",
    "PoolsResumed",
    "Reply",
    "RequestsDropped",
    "RingOpened",
    "ServingStarted",
    "SessionEnded",
    "Status",
    "StepOutput",
    "StepsResumed",
    "Tag",
    "TraceStarted",
    "TraceStopped",
    "WarmedUp",
    "WeightsReloaded",
    "WeightsTruth",
    "Welcome",
    "as_dict",
    "message_tag",
]

Tag = Literal["weights", "kv_cache"]
"""A class of memory that sleeps and wakes as one."""
WeightsTruth = Literal["undefined", "defined", "poisoned"]
"""Whether the weights hold a model; SERVING is reachable only with "defined"."""
Health = Literal["ok", "stalled", "faulted"]
"""ok; the running step is older than its limit; the worker cannot go on."""
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Number = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


def message_tag(name: str) -> str:
    """Turn a class name into its tag on the wire: AllocateKVCache -> allocate_kv_cache."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


class Reply(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    array_like=True,
    tag=message_tag,
    forbid_unknown_fields=True,
):
    """A fact that the worker states."""


class Failure(Reply, frozen=True):
    """The request was refused or failed; code names the error class."""

    code: str
    message: str
    """What was wrong, the limit, and the way out; at most 1000 characters."""
    state: str = ""
    """Where the worker was, when that is the reason."""
    accepted: tuple[str, ...] = ()
    """What it accepts there."""
    retryable: bool = False
    """Whether the same message may simply be sent again."""


class Welcome(Reply, frozen=True):
    """The sender is the worker's scheduler from now on; requests of earlier ones are gone."""

    version: Number
    """Major version that both speak."""
    boot_id: str
    """New with every start of the worker; every reply carries it."""
    epoch: Number
    state: str
    window: Number
    """Steps that may be unanswered at a time."""
    num_replays: Number
    """Answers of steps that are kept for a scheduler that asks again."""
    lease_ms: Number
    """Silence after which the session ends; 0, never."""
    features: tuple[str, ...]
    """Of those asked for, what this worker has; all of them when none was asked for."""
    max_body_bytes: Bytes
    events: str
    """Endpoint of the events, or empty."""


class SessionEnded(Reply, frozen=True):
    """Nothing but questions is answered to this connection from now on."""


class Cancelled(Reply, frozen=True):
    """How far the request had come: only one that was withdrawn will not be carried out."""

    outcome: Literal["withdrawn", "started", "unknown"]
    """unknown: answered already, or never accepted."""


class RingOpened(Reply, frozen=True):
    """Shared memory for the messages of this session; the client opens it through /proc.

    /proc/PID/fd/NUMBER of the worker's process: the memory, the writing end of the pipe that
    says that a request is there, the reading end of the one for replies.
    """

    pid: Number
    memory_fd: Number
    request_bell_fd: Number
    reply_bell_fd: Number
    ring_bytes: Bytes
    """Data of each of the two rings; see gpuworker.ipc.ring."""


class StepsResumed(Reply, frozen=True):
    """Steps are computed again."""

    next_step_id: Number
    """The smallest step id that is accepted."""


class RequestsDropped(Reply, frozen=True):
    """No request is live."""

    num_dropped: Number


class DeviceReady(Reply, frozen=True):
    """The device is chosen and empty of us."""

    device: str
    """Name as torch knows it: cpu, cuda:0."""
    device_name: str
    total_bytes: Bytes
    available_bytes: Bytes


class ModelLoaded(Reply, frozen=True):
    """The weights hold the model."""

    architecture: str
    num_parameters: Number
    weight_bytes: Bytes
    dtype: str
    max_model_len: Number
    vocab_size: Number
    eos_token_ids: tuple[int, ...]
    load_s: float
    warnings: tuple[str, ...] = ()


class KVLayerSpec(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What one layer keeps per block."""

    layer: int
    kind: Literal["full", "sliding"]
    num_kv_heads: int
    head_size: int
    sliding_window: int | None
    block_bytes: Bytes


class KVCacheSpec(Reply, frozen=True):
    """How the KV cache of this rank is cut."""

    block_size: Count
    dtype: str
    block_bytes: Bytes
    """Bytes of one block over all layers."""
    layers: tuple[KVLayerSpec, ...]


class MemoryProfiled(Reply, frozen=True):
    """What is left for the KV cache, and the measurements it follows from."""

    kv_budget_bytes: Bytes
    block_bytes: Bytes
    max_num_blocks: Number
    requested_bytes: Bytes
    weight_bytes: Bytes
    peak_activation_bytes: Bytes
    other_bytes: Bytes
    """Own memory that is neither weights nor activations: runtime, buffers, libraries."""
    warnings: tuple[str, ...] = ()
    profile_s: float = 0.0


class MaxModelLenUpdated(Reply, frozen=True):
    """The longest sequence from now on."""

    max_model_len: Number


class KVCacheAllocated(Reply, frozen=True):
    """The block pool exists."""

    num_blocks: Number
    block_size: Count
    kv_cache_bytes: Bytes
    kv_epoch: Number


class WarmedUp(Reply, frozen=True):
    """Every shape that serving needs has run once."""

    num_shapes: Number
    warm_up_s: float


class ServingStarted(Reply, frozen=True):
    """Steps are accepted."""

    kv_epoch: Number
    max_num_seqs: Number
    max_num_batched_tokens: Number


class Limits(Reply, frozen=True):
    """What a scheduler must know of this worker, and what its predecessor left behind."""

    max_model_len: Number
    vocab_size: Number
    eos_token_ids: tuple[int, ...]
    max_num_seqs: Number
    max_num_batched_tokens: Number
    max_logprobs: Number
    window: Number
    """Steps that a session may have unanswered at a time."""
    block_size: Count
    max_num_blocks: Number
    """What the profile left room for; 0 before ProfileMemory."""
    num_blocks: Number
    """Blocks of the pool, the null block included; 0 before AllocateKVCache."""
    kv_epoch: Number
    next_step_id: Number
    """The smallest step id that is accepted."""
    live_requests: tuple[str, ...]
    """Requests that are known; a scheduler that takes over sends them as finished."""


class StepOutput(Reply, frozen=True, gc=False):
    """The sampled tokens of a step, in the order of its rows.

    The buffer holds int32 num_sampled[num_rows], then the token ids. A row whose prompt is not
    finished samples nothing; a refused row samples nothing and is named in refusals.
    """

    step_id: Number
    kv_epoch: Number
    num_rows: Count
    step_s: float
    buffer: memoryview
    logprobs: Logprobs | None = None
    refusals: tuple[Refusal, ...] = ()


class DummyBatchExecuted(Reply, frozen=True):
    """A forward pass without requests ran."""

    num_tokens: Count


class MemoryUse(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Bytes of one class: the address range, what is mapped, and what is physically there."""

    tag: Tag
    reserved_bytes: Bytes
    mapped_bytes: Bytes
    resident_bytes: Bytes
    spilled_bytes: Bytes = 0
    """Bytes kept outside device memory."""


class Asleep(Reply, frozen=True):
    """The memory is released; freed_bytes is measured, not computed."""

    level: Literal[1, 2]
    freed_bytes: Bytes
    spilled_bytes: Bytes
    """Bytes copied out by this call; 0 when the kept copy was still valid."""
    kv_epoch: Number
    """Epoch of the KV cache after waking up; the contents of earlier epochs are gone."""
    sleep_s: float


class PoolsResumed(Reply, frozen=True):
    """The named memory is back; the worker still sleeps."""

    resumed: tuple[Tag, ...]
    """Those that were asleep."""
    asleep: tuple[Tag, ...]
    weights: WeightsTruth
    kv_epoch: Number


class Awake(Reply, frozen=True):
    """Everything is resident and the weights are defined; steps are accepted."""

    resumed: tuple[Tag, ...]
    kv_epoch: Number
    wake_s: float


class WeightsReloaded(Reply, frozen=True):
    """The weights hold the checkpoint again."""

    weight_bytes: Bytes
    weight_version: Number
    kv_epoch: Number
    """Reloading makes cached KV wrong, so this is a new epoch."""
    load_s: float


class TraceStarted(Reply, frozen=True):
    """A trace is recording; changed says whether this call started it."""

    changed: bool


class TraceStopped(Reply, frozen=True):
    """No trace is recording; changed says whether this call stopped one."""

    changed: bool
    path: str = ""
    """The file written by this call."""


class Status(Reply, frozen=True):
    """What the worker is doing right now; answered even while a step runs."""

    state: str
    health: Health
    weights: WeightsTruth
    asleep: tuple[Tag, ...]
    memory: tuple[MemoryUse, ...]
    process_bytes: Bytes
    """Resident memory of the worker's process."""
    kv_epoch: Number
    weight_version: Number
    num_requests: Number
    """Live requests, scheduled or preempted."""
    num_queued: Number
    """Messages accepted and not yet started."""
    num_steps: Number
    """Steps completed since the worker started."""
    running_step_id: Number | None
    running_step_s: float
    """Age of the running step; 0 when none runs."""
    moving: str
    """Tag of the message whose move is under way, or empty."""
    moving_s: float
    last_step_s: float | None
    """Seconds since the last completed step."""
    last_error: str
    """code: message of the most recent step or move that failed; empty after a success."""


class Closed(Reply, frozen=True):
    """The worker released everything and accepts nothing more."""


def as_dict(message: msgspec.Struct) -> dict[str, Any]:
    """Turn a message into JSON-friendly builtins by field name; buffers become lists of bytes."""

    def plain(value: Any) -> Any:
        if isinstance(value, msgspec.Struct):
            return as_dict(value)
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        if isinstance(value, memoryview):
            return list(value)
        return value

    return {field: plain(getattr(message, field)) for field in message.__struct_fields__}
