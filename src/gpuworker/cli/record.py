"""Layer 5. `gpuworker record`: `gpuworker serve` that also writes a step log."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from gpuworker.actor import GPUWorker
from gpuworker.cli import serve
from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.config import WorkerConfig
from gpuworker.device.thread import DeviceThread
from gpuworker.ipc import Server
from gpuworker.runtime import Runtime, create_runtime
from gpuworker.steplog import FsyncMode, LogWriter, RecordingWorker, header_of

__all__ = ["add_parser", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "record",
        help="serve, and write everything that is said to a step log",
        description=(
            "Run one worker as `gpuworker serve` does, with the same options and exit status, and\n"
            "record every request and its answer. `gpuworker replay` sends them again to a worker\n"
            "of its own and compares. The log holds prompts and tokens, and its owner alone can\n"
            "read it. When it cannot be written any more, recording stops and the worker goes on."
        ),
        examples=(
            "  gpuworker record --log monday.steps --model DIR --endpoint ipc:///tmp/w/rank0\n"
            "  gpuworker record --log monday.steps --fsync always --config worker.toml\n"
            "  gpuworker replay monday.steps"
        ),
    )
    parser.add_argument(
        "--log", type=Path, metavar="FILE", required=True, help="a new file; none is overwritten"
    )
    parser.add_argument(
        "--fsync",
        choices=get_args(FsyncMode),
        default="interval",
        help="what outlives the machine: every record, all but the last second, or a closed log; "
        "the end of the process alone loses nothing; default: interval",
    )
    serve.add_serve_options(parser)
    parser.set_defaults(run=run)


def run(
    arguments: argparse.Namespace,
    runtime: Callable[[WorkerConfig, DeviceThread], Runtime] = create_runtime,
) -> int:
    """Run the verb around a runtime and return an ExitCode; raises what the start raises."""
    log = LogWriter(arguments.log, fsync=arguments.fsync)
    recorders: list[RecordingWorker] = []

    def make_server(worker: GPUWorker, endpoint: str, **options: Any) -> Server:
        recorder = RecordingWorker(worker, log, epoch=lambda: server.epoch)
        # No ring: its steps would pass the recorder by.
        server = Server(recorder, endpoint, **{**options, "direct": None})
        log.begin(header_of(worker.config, boot_id=server.boot_id))
        recorders.append(recorder)
        return server

    try:
        return serve.run(arguments, runtime, make_server)
    finally:
        for recorder in recorders:
            recorder.finish()
        log.close()
