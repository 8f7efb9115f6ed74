"""Layer 3. FAULTED - the device or a peer failed for good.

Holds:    whatever could not be given back.
Promises: nothing is computed any more; GetStatus says why, Shutdown releases what it can.
"""

from __future__ import annotations

from gpuworker.lifecycle import State, StateTable
from gpuworker.runtime import Runtime
from gpuworker.states.common import accept_shutdown

table: StateTable[Runtime] = StateTable(State.FAULTED)
accept_shutdown(table)
