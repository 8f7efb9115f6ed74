"""Layer 5. `gpuworker docs`: write, or check, the pages that derive from the tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.ipc.protocol_page import protocol_page
from gpuworker.ipc.schema import json_schema, message_reference
from gpuworker.ipc.vectors import protocol_vectors
from gpuworker.lifecycle import State, legality_table, mermaid
from gpuworker.states import TABLES

__all__ = ["add_parser", "generated_pages"]

_LIFECYCLE = """# Lifecycle

Generated from the state tables; `make docs` renews it.

```mermaid
{diagram}```

A fault of the device or of a peer leads from any state to `{faulted}`.

| cell | meaning |
|---|---|
| `-> state` | accepted; moves to that state |
| `stays` | accepted; drains the steps ahead, may be undone, keeps the state |
| `yes` | accepted; handled in place, pipelines |
| `at once` | answered without waiting behind anything |
| `connection` | answered by the connection, whatever the state ([protocol.md](protocol.md)) |
| empty | refused with IllegalMessage, which lists what is accepted |

{matrix}"""


def generated_pages() -> dict[str, str]:
    """Return file names and contents."""
    lifecycle = _LIFECYCLE.format(
        diagram=mermaid(TABLES),
        matrix=legality_table(TABLES),
        faulted=State.FAULTED.value,
    )
    schema = msgspec.json.format(msgspec.json.encode(json_schema()), indent=2).decode()
    vectors = msgspec.json.format(msgspec.json.encode(protocol_vectors()), indent=1).decode()
    return {
        "lifecycle.md": lifecycle,
        "messages.md": message_reference(),
        "messages.schema.json": schema + "\n",
        "protocol.md": protocol_page(),
        "protocol.vectors.json": vectors + "\n",
    }


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "docs",
        help="write the pages that derive from the tables",
        description="Write the protocol, the messages and the lifecycle into a directory.",
        examples="  gpuworker docs docs\n  gpuworker docs --check docs",
    )
    parser.add_argument("directory", type=Path, help="where the pages live, for example docs")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 when a page is out of date"
    )
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory
    stale = [
        name
        for name, text in generated_pages().items()
        if not (directory / name).is_file() or (directory / name).read_text() != text
    ]
    if arguments.check:
        for name in stale:
            print(f"{directory / name} is out of date; run: make docs", file=sys.stderr)
        return 1 if stale else 0
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in generated_pages().items():
        (directory / name).write_text(text)
    return 0
