"""Layer 5. How a command becomes a worker's scheduler: never by accident."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpuworker.errors import ConfigError
from gpuworker.ipc import BlockingClient
from gpuworker.ipc.curve import ClientKeys, load_client_keys
from gpuworker.messages import GetHealth

__all__ = ["add_key_options", "add_session_options", "check_free", "client_keys"]


def add_session_options(parser: argparse.ArgumentParser) -> None:
    """Add --epoch and --take-over."""
    parser.add_argument(
        "--epoch", type=int, metavar="N", help="of the session; default: the next one"
    )
    parser.add_argument(
        "--take-over", action="store_true", help="replace the scheduler that drives the worker"
    )


def add_key_options(parser: argparse.ArgumentParser) -> None:
    """Add --secret-key and --server-key."""
    group = parser.add_argument_group("keys of an encrypted endpoint (see gpuworker keygen)")
    group.add_argument("--secret-key", type=Path, metavar="FILE", help="our own .key_secret")
    group.add_argument("--server-key", type=Path, metavar="FILE", help="the worker's .key")


def client_keys(arguments: argparse.Namespace) -> ClientKeys | None:
    """Read the keys that the options name; None without. Raises ConfigError."""
    secret, server = arguments.secret_key, arguments.server_key
    if secret is None and server is None:
        return None
    if secret is None or server is None:
        raise ConfigError("an encrypted endpoint needs both --secret-key and --server-key")
    return load_client_keys(secret, server)


def check_free(arguments: argparse.Namespace) -> None:
    """Raise ConfigError when somebody else drives the worker and is not to be replaced."""
    if arguments.take_over:
        return
    keys = client_keys(arguments)
    with BlockingClient(arguments.endpoint, observe=True, keys=keys) as worker:
        session = worker.ask(GetHealth()).session
    if session is not None and session.live:
        raise ConfigError(
            f"{session.client or 'a scheduler'} with epoch {session.highest_epoch} drives the "
            f"worker and was heard {session.silent_s:.1f} s ago; --take-over replaces it, and its "
            "requests are lost"
        )
