"""The corrected machine: cancellation, deadlines, shields, intruders, rollback."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import anyio
import pytest

from gpuworker.errors import DeviceFault, OutOfDeviceMemory
from gpuworker.lifecycle import (
    Lifecycle,
    State,
    StateTable,
    TransitionInFlight,
    Undo,
    legality_table,
    mermaid,
)
from gpuworker.messages import DeviceReady, InitDevice, Reply, Request, Shutdown
from gpuworker.states import TABLES

READY = DeviceReady(device="cpu", device_name="test", total_bytes=1, available_bytes=1)


@dataclass
class Script:
    """A runtime whose one move does what the test says."""

    wait: asyncio.Event = field(default_factory=asyncio.Event)
    error: BaseException | None = None
    log: list[str] = field(default_factory=list)
    undo_error: BaseException | None = None


def lifecycle(script: Script) -> Lifecycle[Script]:
    tables: dict[State, StateTable[Script]] = {state: StateTable(state) for state in State}

    @tables[State.UNINIT].moves(InitDevice, to=State.DEVICE_READY)
    async def init_device(rt: Script, request: InitDevice, undo: Undo) -> DeviceReady:
        async def release(what: str) -> None:
            await asyncio.sleep(0)
            rt.log.append(f"release {what}")
            if rt.undo_error is not None:
                raise rt.undo_error

        for what in ("first", "second"):
            rt.log.append(f"acquire {what}")
            undo.push(release, what)
        await rt.wait.wait()
        if rt.error is not None:
            raise rt.error
        return READY

    return Lifecycle(tables.values(), script)


UNDONE = ["acquire first", "acquire second", "release second", "release first"]


async def test_a_move_that_works_changes_the_state_and_undoes_nothing() -> None:
    script = Script()
    script.wait.set()
    machine = lifecycle(script)
    assert await machine.move(InitDevice()) is READY
    assert machine.state is State.DEVICE_READY
    assert script.log == UNDONE[:2]


async def test_success_and_the_new_state_are_one_atomic_fact() -> None:
    # A move whose work does not suspend finishes in one send: nothing can come in between.
    script = Script()
    script.wait.set()
    machine = lifecycle(script)
    coroutine = machine.move(InitDevice())
    with pytest.raises(StopIteration) as stop:
        coroutine.send(None)
    assert stop.value.value is READY
    assert machine.state is State.DEVICE_READY


async def test_an_error_undoes_in_reverse_order_and_keeps_the_state() -> None:
    script = Script(error=OutOfDeviceMemory("none left"))
    script.wait.set()
    machine = lifecycle(script)
    with pytest.raises(OutOfDeviceMemory, match="none left"):
        await machine.move(InitDevice())
    assert (machine.state, script.log) == (State.UNINIT, UNDONE)
    script.error = None
    await machine.move(InitDevice())
    assert machine.state is State.DEVICE_READY


async def test_a_cancelled_move_is_undone_and_the_machine_goes_on() -> None:
    script = Script()
    machine = lifecycle(script)
    task = asyncio.create_task(machine.move(InitDevice()))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    assert (machine.state, script.log) == (State.UNINIT, UNDONE)
    script.wait.set()
    await machine.move(InitDevice())
    assert machine.state is State.DEVICE_READY


async def test_a_deadline_fires_as_a_timeout_after_the_undo() -> None:
    script = Script()
    machine = lifecycle(script)
    with pytest.raises(TimeoutError), anyio.fail_after(0):
        await machine.move(InitDevice())
    assert (machine.state, script.log) == (State.UNINIT, UNDONE)


async def test_a_task_group_around_a_move_stops_when_told() -> None:
    script = Script()
    machine = lifecycle(script)
    turns = 0

    async def keep_trying() -> None:
        nonlocal turns
        while True:
            turns += 1
            await machine.move(InitDevice())

    async with anyio.create_task_group() as group:
        group.start_soon(keep_trying)
        await asyncio.sleep(0)
        group.cancel_scope.cancel()
    assert turns == 1
    assert script.log == UNDONE


async def test_a_second_move_is_refused_and_the_first_unharmed() -> None:
    script = Script()
    machine = lifecycle(script)
    first = asyncio.create_task(machine.move(InitDevice()))
    await asyncio.sleep(0)
    with pytest.raises(TransitionInFlight, match="InitDevice is under way"):
        await machine.move(InitDevice())
    script.wait.set()
    assert await first is READY


async def test_an_undo_that_raises_still_runs_the_others_and_faults() -> None:
    script = Script(error=OutOfDeviceMemory("none left"), undo_error=ValueError("stuck"))
    script.wait.set()
    machine = lifecycle(script)
    with pytest.raises(DeviceFault, match="undoing init_device failed with ValueError: stuck"):
        await machine.move(InitDevice())
    assert (machine.state, script.log) == (State.FAULTED, UNDONE)


async def test_committing_an_undo_forgets_the_releases() -> None:
    undo, released = Undo(), []

    async def release() -> None:
        released.append(1)

    undo.push(release)
    assert len(undo) == 1
    undo.commit()
    await undo.unwind()
    assert released == []


def test_one_message_cannot_have_two_outcomes_in_a_state() -> None:
    table: StateTable[Script] = StateTable(State.UNINIT)

    async def work(rt: Script, request: Request[Reply], undo: Undo) -> Reply:
        return READY

    table.moves(InitDevice, to=State.DEVICE_READY)(work)
    with pytest.raises(AssertionError, match="two outcomes"):
        table.moves(InitDevice, to=State.CLOSED)(work)


def test_the_diagram_and_the_matrix_come_from_the_tables() -> None:
    diagram, matrix = mermaid(TABLES), legality_table(TABLES)
    assert "    serving --> sleeping: sleep\n" in diagram
    assert diagram.count(": shutdown\n") == len(TABLES) - 1
    row = next(line for line in matrix.splitlines() if line.startswith("| `execute_model`"))
    assert [cell.strip() for cell in row.split("|")[2:-1]].count("yes") == 1
    assert f"`{Shutdown.__struct_config__.tag}`" in matrix
