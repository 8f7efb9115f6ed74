"""Layer 2. Who may send what, when, and where it leads. The only importer of transitions.

Everything known here comes from the state tables; nothing is known of devices or sockets. A
move does its work in the machine's `before`, with an Undo, and the state changes only after the
work has succeeded. The released AsyncMachine swallows cancellation, cancels a running trigger
when another arrives, and runs callbacks in tasks of their own; Lifecycle replaces the three
methods that do so.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio
import anyio.lowlevel
from transitions import EventData
from transitions.extensions.asyncio import AsyncMachine

from gpuworker.errors import DeviceFault, IllegalMessage, WorkerFaulted
from gpuworker.messages import (
    REQUESTS,
    SESSION_REQUESTS,
    GetHealth,
    GetStatus,
    Reply,
    ReplyT,
    Request,
    message_tag,
)
from gpuworker.permit import Permit

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "Edge",
    "Lifecycle",
    "Start",
    "State",
    "StateTable",
    "TransitionInFlight",
    "Undo",
    "legality_table",
    "mermaid",
]

logging.getLogger("transitions").setLevel(logging.CRITICAL)


class State(Enum):
    """Where a worker is; each has a module of its own under gpuworker.states."""

    UNINIT = "uninit"
    DEVICE_READY = "device_ready"
    PROFILED = "profiled"
    KV_ALLOCATED = "kv_allocated"
    WARMED_UP = "warmed_up"
    SERVING = "serving"
    SLEEPING = "sleeping"
    FAULTED = "faulted"
    CLOSED = "closed"


class TransitionInFlight(AssertionError):
    """Raised when two moves meet; behind the mailbox this cannot happen."""


class Undo:
    """The releases of what a move has acquired so far, newest first."""

    def __init__(self) -> None:
        self._releases: list[Callable[[], Awaitable[object]]] = []

    def __len__(self) -> int:
        return len(self._releases)

    def push(self, release: Callable[..., Awaitable[object]], *args: Any) -> None:
        """Remember to await release(*args) should the move fail."""
        self._releases.append(lambda: release(*args))

    def commit(self) -> None:
        """Forget all releases: the move is past its point of no return."""
        self._releases.clear()

    async def unwind(self) -> None:
        """Await every release, newest first, even when some raise; raises the first error."""
        errors: list[BaseException] = []
        while self._releases:
            try:
                await self._releases.pop()()
            except BaseException as error:
                errors.append(error)
        if errors:
            raise errors[0]


RT = TypeVar("RT")
RequestT = TypeVar("RequestT", bound=Request[Any])
InPlace = Callable[[RT, RequestT, Permit], "asyncio.Future[Any]"]
Start = Callable[[Any, Any, Permit], "asyncio.Future[Any]"]
Move = Callable[[RT, RequestT, Undo], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class Edge:
    """One legal move."""

    source: State
    message: type[Request[Any]]
    dest: State
    work: Callable[[Any, Any, Undo], Awaitable[Reply]]


class StateTable(Generic[RT]):
    """The messages that one state accepts: handled in place, or moving to a state."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.edges: list[Edge] = []
        self.in_place: dict[type[Request[Any]], Start] = {}

    def on(
        self, message: type[RequestT]
    ) -> Callable[[InPlace[RT, RequestT]], InPlace[RT, RequestT]]:
        """Register a handler that starts work and returns its future; such work pipelines.

        It gets the message's permit, and starts that when the work really begins.
        """

        def register(start: InPlace[RT, RequestT]) -> InPlace[RT, RequestT]:
            self._claim(message)
            self.in_place[message] = start
            return start

        return register

    def moves(
        self, message: type[RequestT], *, to: State
    ) -> Callable[[Move[RT, RequestT]], Move[RT, RequestT]]:
        """Register the work of a move; a move may lead back to its own state."""

        def register(work: Move[RT, RequestT]) -> Move[RT, RequestT]:
            self._claim(message)
            self.edges.append(Edge(self.state, message, to, work))
            return work

        return register

    def accepted(self) -> tuple[type[Request[Any]], ...]:
        """List the accepted messages in the order of the message table."""
        moving = {edge.message for edge in self.edges}
        return tuple(r for r in REQUESTS if r in moving or r in self.in_place)

    def _claim(self, message: type[Request[Any]]) -> None:
        assert message not in self.accepted(), f"{message.__name__} has two outcomes"


class Lifecycle(AsyncMachine, Generic[RT]):
    """The machine: moves with undo, one at a time, each either done or as if never begun."""

    state: State

    def __init__(self, tables: Iterable[StateTable[RT]], runtime: RT) -> None:
        self._tables = {table.state: table for table in tables}
        self._edges = {
            (edge.source, edge.message): edge
            for table in self._tables.values()
            for edge in table.edges
        }
        self._runtime = runtime
        self._moving: Edge | None = None
        self._reply: Reply | None = None
        super().__init__(
            model=self,
            states=State,
            initial=State.UNINIT,
            auto_transitions=False,
            send_event=True,
            queued=False,
            transitions=[
                {
                    "trigger": edge.message.__name__,
                    "source": edge.source,
                    "dest": edge.dest,
                    "before": self._perform,
                }
                for edge in self._edges.values()
            ],
        )
        self.live: Mapping[type[Request[Any]], Start]
        self._enter(State.UNINIT)

    def accepted(self) -> tuple[str, ...]:
        """Name the messages that the current state accepts."""
        return tuple(message_tag(r.__name__) for r in self._tables[self.state].accepted())

    def check(self, message: type[Request[Any]]) -> None:
        """Raise IllegalMessage unless the current state accepts the message."""
        if (self.state, message) not in self._edges and message not in self.live:
            accepted = self.accepted()
            raise IllegalMessage(
                f"{message_tag(message.__name__)} is not accepted in state {self.state.value}; "
                f"accepted: {', '.join(accepted) or 'nothing'}",
                state=self.state.value,
                accepted=accepted,
            )

    async def move(self, request: Request[ReplyT]) -> Reply:
        """Perform the move of a request and return its reply.

        On failure or cancellation everything the move acquired is released and the state is as
        before. When the failure is a WorkerFaulted, or a release fails, the state is FAULTED.
        """
        self.check(type(request))
        if self._moving is not None:
            raise TransitionInFlight(f"{self._moving.message.__name__} is under way")
        edge = self._moving = self._edges[self.state, type(request)]
        try:
            await self.events[edge.message.__name__].trigger(self, edge, request)
        except WorkerFaulted:
            self.fault()
            raise
        finally:
            self._moving = None
        self._enter(edge.dest)
        reply, self._reply = self._reply, None
        assert reply is not None
        return reply

    def fault(self) -> None:
        """Give up: from here only GetStatus and Shutdown are answered."""
        if self.state is not State.CLOSED:
            self.set_state(State.FAULTED)
            self._enter(State.FAULTED)

    def close(self) -> None:
        """End here, whatever the state; the owner releases what is held."""
        self.set_state(State.CLOSED)
        self._enter(State.CLOSED)

    def _enter(self, state: State) -> None:
        self.live = self._tables[state].in_place

    async def _perform(self, event: EventData) -> None:
        edge, request = event.args
        undo = Undo()
        try:
            self._reply = await edge.work(self._runtime, request, undo)
            if len(undo):
                # A deadline that passed during the last device call is noticed here, while
                # the move can still be undone.
                await anyio.lowlevel.checkpoint_if_cancelled()
        except BaseException as error:
            with anyio.CancelScope(shield=True):
                try:
                    await undo.unwind()
                except BaseException as failed:
                    raise DeviceFault(
                        f"undoing {message_tag(edge.message.__name__)} failed with "
                        f"{type(failed).__name__}: {failed}; the device is in an unknown state",
                    ) from error
            raise

    # -- AsyncMachine, corrected: in order, in the caller's task, never swallowing ------------

    @staticmethod
    async def await_all(
        callables: list[Callable[..., Coroutine[Any, Any, bool | None]]],
    ) -> list[bool | None]:
        return [await call() for call in callables]

    async def cancel_running_transitions(self, model: object, msg: str | None = None) -> None:
        return

    async def process_context(self, func: Callable[[], Awaitable[Any]], model: object) -> bool:
        return bool(await func())


def legality_table(tables: Iterable[StateTable[Any]]) -> str:
    """Render the state x message matrix as Markdown, straight from the tables."""
    tables = list(tables)
    header = ["message", *(table.state.value for table in tables)]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    for request in REQUESTS:
        cells = [f"`{message_tag(request.__name__)}`"]
        for table in tables:
            if request in SESSION_REQUESTS:
                cells.append("connection")
                continue
            if request in (GetStatus, GetHealth):  # the actor answers, whatever the table says
                cells.append("at once" if table.state is not State.CLOSED else "")
                continue
            dest = {edge.message: edge.dest for edge in table.edges}.get(request)
            if dest is not None:
                cells.append(f"-> {dest.value}" if dest is not table.state else "stays")
            else:
                cells.append("yes" if request in table.in_place else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def mermaid(tables: Iterable[StateTable[Any]]) -> str:
    """Draw the moves as a Mermaid state diagram, straight from the tables."""
    lines = ["stateDiagram-v2", f"    [*] --> {State.UNINIT.value}"]
    for table in tables:
        for edge in table.edges:
            lines.append(
                f"    {edge.source.value} --> {edge.dest.value}: "
                f"{message_tag(edge.message.__name__)}"
            )
    lines.append(f"    {State.CLOSED.value} --> [*]")
    return "\n".join(lines) + "\n"
