"""Layer 3. One module per state: what it holds, what it promises, what it accepts."""

from __future__ import annotations

from gpuworker.lifecycle import StateTable
from gpuworker.runtime import Runtime
from gpuworker.states import (
    closed,
    device_ready,
    faulted,
    kv_allocated,
    profiled,
    serving,
    sleeping,
    uninit,
    warmed_up,
)

__all__ = ["TABLES"]

TABLES: tuple[StateTable[Runtime], ...] = (
    uninit.table,
    device_ready.table,
    profiled.table,
    kv_allocated.table,
    warmed_up.table,
    serving.table,
    sleeping.table,
    faulted.table,
    closed.table,
)
