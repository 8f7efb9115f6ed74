"""Layer 3. What every live state accepts: Shutdown. (GetStatus is answered by the actor.)"""

from __future__ import annotations

from gpuworker.lifecycle import State, StateTable, Undo
from gpuworker.messages import Closed, Shutdown
from gpuworker.runtime import Runtime

__all__ = ["accept_shutdown"]


async def _shut_down(rt: Runtime, request: Shutdown, undo: Undo) -> Closed:
    undo.commit()
    await rt.device.run(rt.release_all)
    return Closed()


def accept_shutdown(table: StateTable[Runtime]) -> None:
    """Let a state move to CLOSED, releasing whatever is held by then."""
    table.moves(Shutdown, to=State.CLOSED)(_shut_down)
