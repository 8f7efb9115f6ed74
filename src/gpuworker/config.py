"""Layer 0. What is given to a worker before it starts: one frozen Struct per consumer.

Values are checked when the Struct is built (ConfigError names the field, the value and the
limit); whether they fit the machine and the checkpoint is decided by the state that needs them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import msgspec

from gpuworker.errors import ConfigError

__all__ = [
    "AttentionBackend",
    "CacheConfig",
    "DType",
    "DeviceConfig",
    "DeviceKind",
    "LimitsConfig",
    "LoadFormat",
    "ModelConfig",
    "RankConfig",
    "SleepConfig",
    "StallAction",
    "SupervisionConfig",
    "WorkerConfig",
    "load_config",
]

DType = Literal["auto", "float32", "float16", "bfloat16"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
DeviceKind = Literal["cpu", "cuda"]
AttentionBackend = Literal["auto", "reference", "sdpa"]
StallAction = Literal["report", "fault"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    _require(value in known, f"{field} is {value!r}; choose one of {', '.join(known)}")


class _Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class ModelConfig(_Config, frozen=True):
    """Which model to load and how."""

    model: str
    """Directory with config.json and safetensors, or a Hugging Face repo id."""
    revision: str | None = None
    dtype: DType = "auto"
    """Compute and storage type; auto takes the checkpoint's own type."""
    load_format: LoadFormat = "auto"
    """dummy fills the weights with small seeded random numbers and reads config.json only."""
    max_model_len: int | None = None
    """Longest sequence in tokens; None takes the checkpoint's limit."""

    def __post_init__(self) -> None:
        _require_one_of("model.dtype", self.dtype, get_args(DType))
        _require_one_of("model.load_format", self.load_format, get_args(LoadFormat))
        _require(bool(self.model), "model.model is empty; give a directory or a repo id")
        _require(
            self.max_model_len is None or self.max_model_len >= 1,
            f"model.max_model_len is {self.max_model_len}; it must be at least 1",
        )


class DeviceConfig(_Config, frozen=True):
    """Where the rank computes."""

    kind: DeviceKind = "cpu"
    num_threads: int | None = None
    """Compute threads on a CPU; None leaves torch's choice."""
    memory_utilization: float | None = None
    """Share of the device's memory that this worker may use in total, in (0, 1].

    None takes half of a CPU's memory, because other programs live there too.
    """
    seed: int = 0
    assigned_device_ids: tuple[str, ...] | None = None
    """Physical devices of this node's ranks in local order (index or UUID); None takes all."""
    attention_backend: AttentionBackend = "auto"

    def __post_init__(self) -> None:
        _require_one_of("device.kind", self.kind, get_args(DeviceKind))
        _require_one_of(
            "device.attention_backend", self.attention_backend, get_args(AttentionBackend)
        )
        _require(
            self.num_threads is None or self.num_threads >= 1,
            f"device.num_threads is {self.num_threads}; it must be at least 1",
        )
        _require(
            self.memory_utilization is None or 0.0 < self.memory_utilization <= 1.0,
            f"device.memory_utilization is {self.memory_utilization}; it must be in (0, 1]",
        )


class RankConfig(_Config, frozen=True):
    """The place of this process among its peers."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    tp_size: int = 1
    pp_size: int = 1

    def __post_init__(self) -> None:
        for name in ("world_size", "tp_size", "pp_size"):
            value: int = getattr(self, name)
            _require(value >= 1, f"rank.{name} is {value}; it must be at least 1")
        _require(
            0 <= self.rank < self.world_size,
            f"rank.rank is {self.rank}; it must be in [0, world_size={self.world_size})",
        )
        _require(self.local_rank >= 0, f"rank.local_rank is {self.local_rank}; it must be >= 0")
        _require(
            self.tp_size * self.pp_size == self.world_size,
            f"rank.tp_size {self.tp_size} x rank.pp_size {self.pp_size} must equal "
            f"rank.world_size {self.world_size}",
        )


class CacheConfig(_Config, frozen=True):
    """The paged KV cache."""

    block_size: int = 16
    """Token slots per block."""
    kv_cache_memory_bytes: int | None = None
    """Size of the KV cache instead of what the profile leaves; 0 is an error, not "unset"."""

    def __post_init__(self) -> None:
        _require(
            1 <= self.block_size <= 1024,
            f"cache.block_size is {self.block_size}; it must be in [1, 1024]",
        )
        _require(
            self.kv_cache_memory_bytes is None or self.kv_cache_memory_bytes >= 1,
            f"cache.kv_cache_memory_bytes is {self.kv_cache_memory_bytes}; give a positive size, "
            "or leave it out to measure",
        )


class LimitsConfig(_Config, frozen=True):
    """The largest step that a scheduler may send."""

    max_num_seqs: int = 128
    max_num_batched_tokens: int = 2048
    max_logprobs: int = 20
    window: int = 2
    """Steps that a scheduler may have unanswered at a time, 1 to 4."""

    def __post_init__(self) -> None:
        _require(1 <= self.window <= 4, f"limits.window is {self.window}; it must be in [1, 4]")
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value: int = getattr(self, name)
            _require(value >= 1, f"limits.{name} is {value}; it must be at least 1")
        _require(
            self.max_num_batched_tokens >= self.max_num_seqs,
            f"limits.max_num_batched_tokens {self.max_num_batched_tokens} is below "
            f"limits.max_num_seqs {self.max_num_seqs}; every request needs a token",
        )
        _require(self.max_logprobs >= 0, f"limits.max_logprobs is {self.max_logprobs}; minimum 0")


class SleepConfig(_Config, frozen=True):
    """What happens to bytes while the worker sleeps."""

    spill_dir: str | None = None
    """Directory of the file that keeps CPU weights during level 1; None takes the temp dir."""


class SupervisionConfig(_Config, frozen=True):
    """Limits that turn silence into a report, and a report into an end."""

    step_limit_s: float = 300.0
    """A step older than this makes the worker report itself as stalled."""
    move_limit_s: float = 1800.0
    """The same for a move."""
    move_limits_s: dict[str, float] = {}
    """Limits of single moves by the tag of their message, for example sleep = 60.0."""
    stall_action: StallAction = "fault"
    """What follows a stall: a report only, or after stall_grace_s the end of the worker."""
    stall_grace_s: float = 30.0
    drain_limit_s: float = 30.0
    """How long an orderly end may take before the process ends regardless."""
    faulted_linger_s: float = 60.0
    """How long a process stays after a fault, so that the reason can be read."""
    mailbox_limit: int = 64
    """Messages that may wait; the next one is answered with MailboxFull."""
    trace_dir: str | None = None
    """Directory for traces; None refuses StartTrace."""

    def __post_init__(self) -> None:
        _require_one_of("supervision.stall_action", self.stall_action, get_args(StallAction))
        limits: dict[str, float] = {
            **{name: getattr(self, name) for name in ("step_limit_s", "move_limit_s")},
            **{f"move_limits_s.{tag}": limit for tag, limit in self.move_limits_s.items()},
        }
        for name, limit_s in limits.items():
            _require(limit_s > 0, f"supervision.{name} is {limit_s}; it must be positive")
        for name in ("stall_grace_s", "drain_limit_s", "faulted_linger_s"):
            value: float = getattr(self, name)
            _require(value >= 0, f"supervision.{name} is {value}; it must not be negative")
        _require(
            self.mailbox_limit >= 1,
            f"supervision.mailbox_limit is {self.mailbox_limit}; it must be at least 1",
        )

    def limit_of_move_s(self, tag: str) -> float:
        """Return the age at which the move of a message counts as stalled."""
        return self.move_limits_s.get(tag, self.move_limit_s)


class WorkerConfig(_Config, frozen=True):
    """Everything one rank needs to know."""

    model: ModelConfig
    device: DeviceConfig = DeviceConfig()
    rank: RankConfig = RankConfig()
    cache: CacheConfig = CacheConfig()
    limits: LimitsConfig = LimitsConfig()
    sleep: SleepConfig = SleepConfig()
    supervision: SupervisionConfig = SupervisionConfig()


def load_config(path: Path) -> WorkerConfig:
    """Read a TOML or JSON file; raises ConfigError that names the file and the field."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    try:
        if path.suffix == ".json":
            return msgspec.json.decode(data, type=WorkerConfig)
        return msgspec.toml.decode(data, type=WorkerConfig)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from error
