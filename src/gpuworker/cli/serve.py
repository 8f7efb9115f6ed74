"""Layer 5. `gpuworker serve`: a worker process on an endpoint."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from contextlib import suppress

import msgspec

from gpuworker.actor import GPUWorker
from gpuworker.cli.options import Subparsers, add_verb, add_worker_options, worker_config
from gpuworker.config import WorkerConfig
from gpuworker.errors import WorkerClosed
from gpuworker.ipc import Server, default_endpoint
from gpuworker.launch import ReadyLine, die_with_parent
from gpuworker.messages import Shutdown

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "serve",
        help="run a worker on an endpoint",
        description=(
            "Run one worker and serve it until it gets shutdown, SIGINT or SIGTERM. It starts in\n"
            "state uninit: its scheduler leads it from there."
        ),
        examples=(
            "  gpuworker serve --model ~/models/SmolLM2-135M-Instruct\n"
            "  gpuworker serve --config worker.toml --endpoint ipc:///run/gpuworker/rank0\n"
            "  gpuworker serve --model DIR --dtype bfloat16 --endpoint 'tcp://127.0.0.1:*'"
        ),
    )
    parser.add_argument("--model", metavar="DIR_OR_REPO", help="model directory or repo id")
    parser.add_argument(
        "--endpoint", help="ipc:///path or tcp://127.0.0.1:port; default: a private ipc path"
    )
    parser.add_argument("--json", action="store_true", help="print the ready line as JSON")
    parser.add_argument(
        "--die-with-parent", type=int, metavar="PID", help="end when this parent process dies"
    )
    add_worker_options(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    config = worker_config(arguments)
    if arguments.die_with_parent is not None:
        die_with_parent(arguments.die_with_parent)
    return asyncio.run(_serve(config, arguments.endpoint, as_json=arguments.json))


async def _serve(config: WorkerConfig, endpoint: str | None, *, as_json: bool) -> int:
    def ready(bound: str) -> None:
        if as_json:
            line = msgspec.json.encode(ReadyLine(endpoint=bound, pid=os.getpid())).decode()
        else:
            line = f"ready on {bound}\ntry: gpuworker ask {bound} get_status"
        print(line, flush=True)

    server_endpoint = endpoint or default_endpoint()
    async with GPUWorker(config) as worker:
        loop = asyncio.get_running_loop()
        server = asyncio.create_task(Server(worker, server_endpoint).run(ready))
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, _stop, stop, asyncio.current_task())
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([server, stopped], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not server.done():
            print("stopping: the steps ahead finish first; again to stop at once", file=sys.stderr)
            with suppress(WorkerClosed):  # a client may have said it at the same time
                await worker.ask(Shutdown())
            server.cancel()
            await asyncio.wait([server])
        if not server.cancelled():
            server.result()
    if worker.fault is not None:
        print(f"the worker had faulted: {worker.fault}", file=sys.stderr)
        return 1
    return 0


def _stop(stop: asyncio.Event, task: asyncio.Task[int] | None) -> None:
    """Ask for an orderly end; when asked again, end at once."""
    if stop.is_set() and task is not None:
        task.cancel()
    stop.set()
