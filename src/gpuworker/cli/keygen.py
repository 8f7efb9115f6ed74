"""Layer 5. `gpuworker keygen`: a key pair for an encrypted endpoint."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.cli.output import print_json
from gpuworker.ipc.key_files import write_key_pair

__all__ = ["add_parser"]


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "keygen",
        help="make a key pair for an encrypted endpoint",
        description=(
            "Write DIR/NAME.key, which others may have, and DIR/NAME.key_secret, which nobody\n"
            "else may read. A worker needs its own pair and the .key files of its clients, a\n"
            "client its own pair and the worker's .key file."
        ),
        examples=(
            "  gpuworker keygen ~/.config/gpuworker worker\n"
            "  gpuworker keygen ~/.config/gpuworker scheduler\n"
            "  gpuworker serve --model DIR --endpoint tcp://0.0.0.0:5555 \\\n"
            "      --secret-key ~/.config/gpuworker/worker.key_secret \\\n"
            "      --client-keys ~/.config/gpuworker/scheduler.key"
        ),
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="made with mode 700 if missing")
    parser.add_argument("name", metavar="NAME", help="of the two files")
    parser.add_argument("--json", action="store_true", help="print the paths as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    public, secret = write_key_pair(arguments.directory, arguments.name)
    if arguments.json:
        print_json({"public": str(public), "secret": str(secret)})
    else:
        print(f"{public}  to give away\n{secret}  to keep")
    return 0
