"""Layer 3. WARMED_UP - every shape ran once; no request is known.

Holds:    everything that serving needs.
Promises: StartServing changes no memory but the garbage collector's view of the heap.
"""

from __future__ import annotations

from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import ServingStarted, StartServing
from gpuworker.runtime import Runtime
from gpuworker.states.common import accept_drop_requests, accept_questions, accept_shutdown

table: StateTable[Runtime] = StateTable(State.WARMED_UP)
accept_shutdown(table)
accept_drop_requests(table)
accept_questions(table)


@table.moves(StartServing, to=State.SERVING)
async def start_serving(rt: Runtime, request: StartServing, undo: Undo) -> ServingStarted:
    reply = await rt.device.run(rt.start_serving)
    undo.push(rt.device.run, rt.stop_serving)
    rt.progress.aborted_after = None  # the sequence of steps begins here
    return reply
