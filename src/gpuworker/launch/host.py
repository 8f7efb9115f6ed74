"""Layer 5. One worker, its endpoint and its watchdog, from the start to an exit status."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpuworker.actor import GPUWorker
from gpuworker.config import SupervisionConfig, WorkerConfig
from gpuworker.device.thread import DeviceThread
from gpuworker.errors import WorkerClosed, WorkerFaulted
from gpuworker.ipc import Server
from gpuworker.ipc.curve import ServerKeys
from gpuworker.ipc.endpoint import EVENTS_SUFFIX, ipc_path
from gpuworker.launch.exit_code import ExitCode
from gpuworker.launch.guard import Guard
from gpuworker.messages import Shutdown
from gpuworker.runtime import Runtime, create_runtime
from gpuworker.watchdog import Watchdog, WorkerEnd

__all__ = ["endpoint_files", "host_worker"]

_BEAT_S = 0.5


def endpoint_files(path: Path) -> tuple[Path, ...]:
    """Name the files that exist as long as a worker lives on the socket file."""
    return (path, Path(f"{path}{EVENTS_SUFFIX}"), Path(f"{path}.lock"))


async def host_worker(
    config: WorkerConfig,
    endpoint: str,
    *,
    guard: Guard,
    on_ready: Callable[[str], None],
    keys: ServerKeys | None = None,
    epoch_file: Path | None = None,
    runtime: Callable[[WorkerConfig, DeviceThread], Runtime] = create_runtime,
    make_server: Callable[..., Server] = Server,
) -> ExitCode:
    """Run a worker on an endpoint until it is shut down, told to end, or faulted.

    Told to end means through the guard: the steps ahead finish and what is queued is answered.
    A worker that faulted stays for supervision.faulted_linger_s, so that its schedulers can
    read why. on_ready gets the endpoint as bound. make_server is called as Server is. Raises
    what GPUWorker and Server raise.
    """
    limits = config.supervision
    async with GPUWorker(config, runtime) as worker:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        server = make_server(
            worker,
            endpoint,
            keys=keys,
            epoch_file=epoch_file,
            events=worker.events,
            direct=worker,
        )
        serving = asyncio.create_task(_serve(server, guard, endpoint, on_ready))
        watching = asyncio.create_task(Watchdog(worker, limits).run())
        stopped = asyncio.create_task(stop.wait())
        beating = asyncio.create_task(_beat(guard, limits))

        def ask() -> None:
            with suppress(RuntimeError):  # the loop is at its end already
                loop.call_soon_threadsafe(stop.set)

        guard.ask_by(ask)
        try:
            await _first_of(serving, stopped, watching)
            if watching.done():
                watching.result()  # an error of the watchdog must not look like the worker's
            if watching.done() and not serving.done() and not stop.is_set():
                linger_s = limits.faulted_linger_s
                _say(f"the worker faulted; ending in {linger_s:g} s, or at once after shutdown")
                await _first_of(serving, stopped, limit_s=linger_s)
            guard.end_within(
                limits.drain_limit_s,
                ExitCode.GIVEN_UP,
                f"not at its end {limits.drain_limit_s:g} s after it began to end",
            )
            if not serving.done():
                await _end_in_order(worker, server, serving)
        finally:
            await _end(serving, watching, stopped, beating)
        if not serving.cancelled():
            serving.result()
    if worker.fault is None:
        return ExitCode.ORDERLY
    _say(f"the worker had faulted: {worker.fault}")
    has_given_up = not watching.cancelled() and watching.result() is WorkerEnd.GIVEN_UP
    return ExitCode.GIVEN_UP if has_given_up else ExitCode.FAULTED


async def _serve(
    server: Server, guard: Guard, endpoint: str, on_ready: Callable[[str], None]
) -> None:
    path = ipc_path(endpoint)
    makes_directory = path is not None and not path.parent.exists()

    def ready(bound: str) -> None:
        if path is not None:
            guard.own(endpoint_files(path), path.parent if makes_directory else None)
        on_ready(bound)

    try:
        await server.run(ready)
    finally:
        guard.disown()


async def _end_in_order(worker: GPUWorker, server: Server, serving: asyncio.Task[None]) -> None:
    """Finish what was accepted, release everything and let the answers out."""
    with suppress(WorkerClosed, WorkerFaulted):  # a client may have said it, or it is past that
        await worker.ask(Shutdown())
    server.finish()
    await asyncio.wait([serving])


async def _beat(guard: Guard, limits: SupervisionConfig) -> None:
    """Show the guard that the event loop lives; it may not stand still longer than a step."""
    if limits.stall_action == "fault":
        guard.expect_beats(limits.step_limit_s + limits.stall_grace_s)
    try:
        while True:
            guard.beat()
            await asyncio.sleep(_BEAT_S)
    finally:
        guard.expect_beats(math.inf)


async def _first_of(*tasks: asyncio.Task[Any], limit_s: float | None = None) -> None:
    await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
