"""Layer 5. `gpuworker serve`: a worker process on an endpoint."""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from gpuworker.cli.options import Subparsers, add_verb, add_worker_options, worker_config
from gpuworker.config import WorkerConfig
from gpuworker.device.thread import DeviceThread
from gpuworker.errors import ConfigError
from gpuworker.ipc import Server, default_endpoint
from gpuworker.ipc.curve import ServerKeys, load_server_keys
from gpuworker.launch import ExitCode, Guard, ReadyLine, host_worker
from gpuworker.runtime import Runtime, create_runtime

__all__ = ["add_parser", "add_serve_options", "run"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "serve",
        help="run a worker on an endpoint",
        description=(
            "Run one worker and serve it until it gets shutdown, SIGINT or SIGTERM. It starts in\n"
            "state uninit: its scheduler leads it from there. A signal lets the steps ahead\n"
            "finish, for at most supervision.drain_limit_s; a second one ends it at once.\n\n"
            f"exit status:\n{ExitCode.table()}"
        ),
        examples=(
            "  gpuworker serve --model ~/models/SmolLM2-135M-Instruct\n"
            "  gpuworker serve --config worker.toml --endpoint ipc:///run/gpuworker/rank0\n"
            "  gpuworker serve --model DIR --dtype bfloat16 --endpoint 'tcp://127.0.0.1:*'\n"
            "  gpuworker serve --model DIR --die-with $$     end with this shell\n"
            "  gpuworker serve --config - < worker.json      configuration from stdin"
        ),
    )
    add_serve_options(parser)
    parser.set_defaults(run=run)


def add_serve_options(parser: argparse.ArgumentParser) -> None:
    """Add what says which worker is run, and where."""
    parser.add_argument("--model", metavar="DIR_OR_REPO", help="model directory or repo id")
    parser.add_argument(
        "--endpoint",
        help="ipc:///path, tcp://127.0.0.1:port, or with keys any tcp; default: a private ipc path",
    )
    parser.add_argument(
        "--epoch-file",
        type=Path,
        metavar="FILE",
        help="remembers the highest session epoch; default: beside the socket",
    )
    parser.add_argument("--json", action="store_true", help="print the ready line as JSON")
    parser.add_argument(
        "--die-with",
        type=int,
        action="append",
        default=[],
        metavar="PID",
        help="end when this process dies, however it dies; may be given again",
    )
    group = parser.add_argument_group("keys of an encrypted endpoint (see gpuworker keygen)")
    group.add_argument("--secret-key", type=Path, metavar="FILE", help="our own .key_secret")
    group.add_argument(
        "--client-keys", type=Path, metavar="FILE_OR_DIR", help=".key files of who may connect"
    )
    add_worker_options(parser)


def run(
    arguments: argparse.Namespace,
    runtime: Callable[[WorkerConfig, DeviceThread], Runtime] = create_runtime,
    make_server: Callable[..., Server] = Server,
) -> int:
    """Run the verb around a runtime and return an ExitCode; raises what the start raises."""
    with Guard(arguments.die_with) as guard:
        config, keys = worker_config(arguments), _keys(arguments)
        guard.drain_limit_s = config.supervision.drain_limit_s
        endpoint = arguments.endpoint or default_endpoint()

        def ready(bound: str) -> None:
            if arguments.json:
                line = msgspec.json.encode(ReadyLine(endpoint=bound, pid=os.getpid())).decode()
            else:
                line = f"ready on {bound}\ntry: gpuworker ask {bound} get_status"
            print(line, flush=True)

        code = asyncio.run(
            host_worker(
                config,
                endpoint,
                guard=guard,
                on_ready=ready,
                keys=keys,
                epoch_file=arguments.epoch_file,
                runtime=runtime,
                make_server=make_server,
            )
        )
        if code is ExitCode.GIVEN_UP:
            # The device thread is stuck in foreign code: an interpreter that takes itself apart
            # around it may hang or crash.
            guard.leave(code, "the device did not come back")
    return code


def _keys(arguments: argparse.Namespace) -> ServerKeys | None:
    secret, clients = arguments.secret_key, arguments.client_keys
    if secret is None and clients is None:
        return None
    if secret is None or clients is None:
        raise ConfigError("an encrypted endpoint needs both --secret-key and --client-keys")
    return load_server_keys(secret, clients)
