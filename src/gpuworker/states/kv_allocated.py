"""Layer 3. KV_ALLOCATED - the block pool exists and the runner is bound to it.

Holds:    the device, the weights, the KV cache.
Promises: nothing has been computed yet; WarmUp will pay for every first time.
"""

from __future__ import annotations

from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import WarmedUp, WarmUp
from gpuworker.runtime import Runtime
from gpuworker.states.common import accept_drop_requests, accept_questions, accept_shutdown

table: StateTable[Runtime] = StateTable(State.KV_ALLOCATED)
accept_shutdown(table)
accept_drop_requests(table)
accept_questions(table)


@table.moves(WarmUp, to=State.WARMED_UP)
async def warm_up(rt: Runtime, request: WarmUp, undo: Undo) -> WarmedUp:
    reply = await rt.device.run(rt.warm_up)
    undo.push(rt.device.run, rt.cool_down)
    return reply
