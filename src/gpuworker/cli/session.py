"""Layer 5. How a command becomes a worker's scheduler: never by accident."""

from __future__ import annotations

import argparse

from gpuworker.errors import ConfigError
from gpuworker.ipc import BlockingClient
from gpuworker.messages import GetHealth

__all__ = ["add_session_options", "check_free"]


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Add --epoch and --take-over."""
    parser.add_argument(
        "--epoch", type=int, metavar="N", help="of the session; default: the next one"
    )
    parser.add_argument(
        "--take-over", action="store_true", help="replace the scheduler that drives the worker"
    )


def check_free(arguments: argparse.Namespace) -> None:
    """Raise ConfigError when somebody else drives the worker and is not to be replaced."""
    if arguments.take_over:
        return
    with BlockingClient(arguments.endpoint, observe=True) as worker:
        session = worker.ask(GetHealth()).session
    if session is not None and session.live:
        raise ConfigError(
            f"{session.client or 'a scheduler'} with epoch {session.highest_epoch} drives the "
            f"worker and was heard {session.silent_s:.1f} s ago; --take-over replaces it, and its "
            "requests are lost"
        )
