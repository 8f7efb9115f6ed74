"""Layer 1. What memory there is, and how much of it the KV cache may take.

The arithmetic is pure and uses numbers of this process wherever it can, so that a neighbour
that allocates or releases memory during the profile is reported, never charged to us.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from gpuworker.errors import InsufficientKVMemory

__all__ = ["KVBudget", "MemoryReader", "MemorySnapshot", "plan_kv_budget", "take_snapshot"]

MARGIN_BYTES = 256 << 20
"""Left free on the device when the KV cache takes all that is available."""
NOISE_BYTES = 128 << 20
"""Changes of other processes below this are not worth a warning."""


class MemoryReader(Protocol):
    """Where the numbers come from; a device has one, a test has its own."""

    def total_bytes(self) -> int:
        """Return the device's memory, or the part of it that this process may ever use."""

    def available_bytes(self) -> int:
        """Return what can still be allocated now, by anyone."""

    def process_bytes(self) -> int:
        """Return what this process occupies now."""

    def reset_peak(self) -> None:
        """Start a new span for peak_bytes."""

    def peak_bytes(self) -> int:
        """Return the largest process_bytes since reset_peak; may end the span."""


@dataclass(frozen=True, slots=True)
class MemorySnapshot:
    """The numbers of one moment, in bytes."""

    total_bytes: int
    available_bytes: int
    process_bytes: int
    peak_bytes: int

    @property
    def others_bytes(self) -> int:
        """Memory that is neither available nor ours."""
        return self.total_bytes - self.available_bytes - self.process_bytes


def take_snapshot(reader: MemoryReader) -> MemorySnapshot:
    """Read all numbers now; reset_peak comes after the snapshot before a measured run."""
    return MemorySnapshot(
        total_bytes=reader.total_bytes(),
        available_bytes=reader.available_bytes(),
        process_bytes=reader.process_bytes(),
        peak_bytes=reader.peak_bytes(),
    )


@dataclass(frozen=True, slots=True)
class KVBudget:
    """The size of the KV cache and the numbers that it follows from, in bytes."""

    kv_bytes: int
    block_bytes: int
    requested_bytes: int
    """What this worker may use in total: ceil(total * utilization)."""
    weight_bytes: int
    peak_activation_bytes: int
    other_bytes: int
    """Own memory that is neither weights nor activations: runtime, buffers, libraries."""
    warnings: tuple[str, ...]

    @property
    def max_num_blocks(self) -> int:
        """Whole blocks that fit; at least 1."""
        return self.kv_bytes // self.block_bytes


def plan_kv_budget(
    *,
    start: MemorySnapshot,
    loaded: MemorySnapshot,
    profiled: MemorySnapshot,
    utilization: float,
    weight_bytes: int,
    block_bytes: int,
    kv_cache_memory_bytes: int | None = None,
    margin_bytes: int = MARGIN_BYTES,
) -> KVBudget:
    """Compute the KV budget from three snapshots of one process.

    start: before the weights were loaded; loaded: weights resident, taken right before
    reset_peak and the largest batch; profiled: after it ran, so that its peak covers the run.
    With u the utilization:

        requested       = ceil(total * u)
        peak_activation = profiled.peak - loaded.process
        other           = loaded.process - weights
        kv              = min(requested - weights - peak_activation - other,
                              profiled.available - absent_activation - margin)

    where absent_activation = profiled.peak - profiled.process is what the next large batch will
    allocate again. The three own terms add up to the process's peak, so nothing is counted
    twice. kv_cache_memory_bytes replaces the first bound, not the second.

    Raises InsufficientKVMemory when less than one block fits, or when the explicit size exceeds
    what is available; the message names every term.
    """
    requested_bytes = math.ceil(profiled.total_bytes * utilization)
    peak_activation_bytes = max(0, profiled.peak_bytes - loaded.process_bytes)
    other_bytes = max(0, loaded.process_bytes - weight_bytes)
    absent_activation_bytes = max(0, profiled.peak_bytes - profiled.process_bytes)
    share_bytes = requested_bytes - weight_bytes - peak_activation_bytes - other_bytes
    room_bytes = profiled.available_bytes - absent_activation_bytes - margin_bytes
    drift_bytes = profiled.others_bytes - start.others_bytes

    terms = (
        f"total {_size(profiled.total_bytes)} x utilization {utilization:g} = requested "
        f"{_size(requested_bytes)}; weights {_size(weight_bytes)}, peak activation "
        f"{_size(peak_activation_bytes)}, other {_size(other_bytes)}; available "
        f"{_size(profiled.available_bytes)} of which {_size(absent_activation_bytes)} for "
        f"activations and {_size(margin_bytes)} margin; other processes changed by "
        f"{_signed(drift_bytes)}"
    )
    wanted_bytes = share_bytes if kv_cache_memory_bytes is None else kv_cache_memory_bytes
    if kv_cache_memory_bytes is not None and kv_cache_memory_bytes > room_bytes:
        raise InsufficientKVMemory(
            f"cache.kv_cache_memory_bytes {_size(kv_cache_memory_bytes)} exceeds the "
            f"{_size(max(0, room_bytes))} that are available ({terms}); give a smaller size, or "
            "free memory held by other processes"
        )
    kv_bytes = min(wanted_bytes, room_bytes)
    if kv_bytes < block_bytes:
        raise InsufficientKVMemory(
            f"no memory is left for the KV cache: {_size(kv_bytes)} for blocks of "
            f"{_size(block_bytes)} ({terms}); "
            + _way_out(by_share=wanted_bytes < block_bytes, explicit=kv_cache_memory_bytes)
        )
    return KVBudget(
        kv_bytes=kv_bytes,
        block_bytes=block_bytes,
        requested_bytes=requested_bytes,
        weight_bytes=weight_bytes,
        peak_activation_bytes=peak_activation_bytes,
        other_bytes=other_bytes,
        warnings=_warnings(drift_bytes, wanted_bytes, room_bytes),
    )


def _way_out(*, by_share: bool, explicit: int | None) -> str:
    if by_share and explicit is not None:
        return "raise cache.kv_cache_memory_bytes"
    if by_share:
        return (
            "raise device.memory_utilization, or lower limits.max_num_batched_tokens or "
            "cache.block_size"
        )
    return "free memory held by other processes, or lower limits.max_num_batched_tokens"


def _warnings(drift_bytes: int, wanted_bytes: int, room_bytes: int) -> tuple[str, ...]:
    warnings: list[str] = []
    if abs(drift_bytes) >= NOISE_BYTES:
        warnings.append(
            f"other processes changed by {_signed(drift_bytes)} since the device was initialised"
        )
    if room_bytes < wanted_bytes:
        warnings.append(
            f"the KV cache is limited to the {_size(room_bytes)} that are available; the "
            f"requested share would allow {_size(wanted_bytes)}"
        )
    return tuple(warnings)


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.4g} {name}"
    return f"{num_bytes} bytes"


def _signed(num_bytes: int) -> str:
    return f"{'-' if num_bytes < 0 else '+'}{_size(abs(num_bytes))}"
