"""Layer 3. FAULTED - the device or a peer failed for good.

Holds:    whatever could not be given back.
Promises: nothing is computed any more; GetStatus says why, Shutdown releases what it can.
"""

from __future__ import annotations

import asyncio

from gpuworker.lifecycle import State, StateTable
from gpuworker.messages import DropRequests, RequestsDropped
from gpuworker.permit import Permit
from gpuworker.runtime import Runtime
from gpuworker.states.common import accept_shutdown

table: StateTable[Runtime] = StateTable(State.FAULTED)
accept_shutdown(table)


@table.on(DropRequests)
def drop_requests(
    rt: Runtime, request: DropRequests, permit: Permit
) -> asyncio.Future[RequestsDropped]:
    # At once, because the device may never answer: so a scheduler can come, read why, and end it.
    reply: asyncio.Future[RequestsDropped] = asyncio.get_running_loop().create_future()
    reply.set_result(RequestsDropped(num_dropped=0))
    return reply
