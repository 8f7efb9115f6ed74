"""Layer 3. UNINIT - nothing is held.

Holds:    a device thread.
Promises: InitDevice either succeeds or leaves no trace, so it may be tried again.
"""

from __future__ import annotations

from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import DeviceReady, InitDevice
from gpuworker.runtime import Runtime
from gpuworker.states.common import accept_drop_requests, accept_shutdown

table: StateTable[Runtime] = StateTable(State.UNINIT)
accept_shutdown(table)
accept_drop_requests(table)


@table.moves(InitDevice, to=State.DEVICE_READY)
async def init_device(rt: Runtime, request: InitDevice, undo: Undo) -> DeviceReady:
    reply = await rt.device.run(rt.open_device)
    undo.push(rt.device.run, rt.close_device)
    return reply
