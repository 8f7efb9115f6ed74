"""What it costs a message to reach its handler, way by way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from transitions.extensions.asyncio import AsyncMachine

from benchmarks.report import Report, benchmark_parser
from gpuworker import messages as m
from gpuworker.actor import _Envelope
from gpuworker.lifecycle import Lifecycle, State, StateTable, Undo
from gpuworker.permit import Permit
from gpuworker.states import TABLES
from gpuworker.testing import empty_step, fake_worker, walk_to


async def _per_call(call: Callable[[], Awaitable[object]], num_calls: int) -> float:
    started = time.perf_counter()
    for _ in range(num_calls):
        await call()
    return (time.perf_counter() - started) / num_calls * 1e6


async def _nothing() -> None:
    return


def _moving_table() -> list[StateTable[None]]:
    tables: list[StateTable[None]] = [StateTable(state) for state in State]

    @tables[0].moves(m.InitDevice, to=State.UNINIT)
    async def stay(rt: None, request: m.InitDevice, undo: Undo) -> m.Closed:
        return m.Closed()

    return tables


async def _measure(report: Report, num_rounds: int, num_calls: int) -> None:
    lifecycle = Lifecycle(_moving_table(), None)
    stock = AsyncMachine(states=["a"], initial="a", auto_transitions=False)
    stock.add_transition("go", "a", None)
    live = next(table for table in TABLES if table.state is State.SERVING).in_place
    step = empty_step(1)
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)

        async def look_up() -> None:
            live.get(type(step))

        async def queued_step() -> None:
            # As a step that finds a move under way: the consumer hands it over in its turn.
            worker._moving = behind
            try:
                reply = worker.submit(step)
            finally:
                worker._moving = None
            await reply

        behind = _Envelope(m.ReloadWeights(), Permit())
        ways: dict[str, tuple[Callable[[], Awaitable[object]], int]] = {
            "await an empty coroutine": (_nothing, 10),
            "look up the handler of a step": (look_up, 10),
            "stock machine, internal transition": (lambda: stock.trigger("go"), 1),
            "our machine, a move that stays": (lambda: lifecycle.move(m.InitDevice()), 1),
            "ask(get_status)": (lambda: worker.ask(m.GetStatus()), 1),
            "ask(execute_model), fast path": (lambda: worker.ask(step), 1),
            "execute_model through the mailbox": (queued_step, 1),
            "ask(reload_weights), a move through the mailbox": (
                lambda: worker.ask(m.ReloadWeights()),
                1,
            ),
        }
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(num_rounds):
            epoch = (await worker.ask(m.GetStatus())).kv_epoch
            step = empty_step(1, epoch)
            for name, (call, factor) in ways.items():
                rounds[name].append(await _per_call(call, num_calls * factor))
    report.compare("dispatch", rounds, "us", baseline="await an empty coroutine")


def main() -> None:
    """Run the benchmark."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    rounds, calls = (2, 50) if arguments.quick else (9, 1000)
    asyncio.run(_measure(Report("dispatch", arguments.output), rounds, calls))


if __name__ == "__main__":
    main()
