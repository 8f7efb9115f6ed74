"""Layer 5. How numbers and progress look; progress goes to stderr and only to a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

__all__ = ["format_bytes", "format_seconds", "print_json", "stderr", "stdout", "working"]

stdout = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)


def format_bytes(num_bytes: int) -> str:
    """Write a byte count with a binary unit."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def format_seconds(seconds: float) -> str:
    """Write a duration with three digits."""
    if seconds < 1:
        return f"{seconds * 1000:.1f} ms"
    return f"{seconds:.2f} s"


def print_json(document: object) -> None:
    """Write one JSON document on one line of stdout."""
    print(json.dumps(document), flush=True)


@contextmanager
def working(what: str, *, quiet: bool = False) -> Iterator[Progress]:
    """Show a spinner with the elapsed time while something of unknown length goes on."""
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=stderr,
        transient=True,
        disable=quiet or not stderr.is_terminal,
    )
    with progress:
        progress.add_task(what, total=None)
        yield progress
