"""Layer 3. CLOSED - everything is released.

Holds:    nothing.
Promises: every message is answered with WorkerClosed.
"""

from __future__ import annotations

from gpuworker.lifecycle import State, StateTable
from gpuworker.runtime import Runtime

table: StateTable[Runtime] = StateTable(State.CLOSED)
