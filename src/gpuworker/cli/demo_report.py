"""Layer 5. What the demo found, and how it is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import msgspec
from rich.console import Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from gpuworker.cli.generate import Answer
from gpuworker.cli.output import format_bytes, format_seconds, stderr, stdout, working
from gpuworker.engine import BringUpStep
from gpuworker.messages import message_tag

__all__ = ["DemoResult", "Residency", "Show", "StateRow"]


class StateRow(msgspec.Struct, frozen=True):
    """One step of the way up."""

    message: str
    state: str
    seconds: float
    resident_bytes: int
    """Weights and KV cache that are physically there."""
    process_bytes: int


class Residency(msgspec.Struct):
    """One sleep: times, and memory as measured before, asleep and after."""

    level: int
    sleep_s: float
    reload_s: float
    wake_s: float
    process_bytes_before: int
    process_bytes_asleep: int
    process_bytes_after: int
    arena_bytes_before: int
    arena_bytes_asleep: int
    arena_bytes_after: int
    answer: Answer | None = None


class DemoResult(msgspec.Struct):
    """Everything the demo saw; --json prints it."""

    model: str
    prompt: str
    dtype: str
    endpoint: str = ""
    states: list[StateRow] = []
    first: Answer | None = None
    sleeps: list[Residency] = []
    passed: bool = False

    def add_state(self, step: BringUpStep) -> StateRow:
        """Keep a step of the way up."""
        row = StateRow(
            message=message_tag(type(step.request).__name__),
            state=step.status.state,
            seconds=step.seconds,
            resident_bytes=sum(use.resident_bytes for use in step.status.memory),
            process_bytes=step.status.process_bytes,
        )
        self.states.append(row)
        return row

    def same_answer(self, residency: Residency) -> bool:
        """Say whether the answer after a sleep has the token ids of the first one."""
        first, again = self.first, residency.answer
        return first is not None and again is not None and first.token_ids == again.token_ids

    def judge(self) -> None:
        """Decide whether the demo passed."""
        self.passed = len(self.sleeps) == 2 and all(map(self.same_answer, self.sleeps))


class Show:
    """Prints what happens; quiet prints nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet

    def note(self, text: str) -> None:
        """Say something that is no result."""
        if not self._quiet:
            stderr.print(text, style="dim")

    def title(self, text: str) -> None:
        """Head what is streamed next."""
        if not self._quiet:
            stdout.print(f"\n{text}", style="bold")

    @contextmanager
    def working(self, what: str) -> Iterator[Callable[[str], None]]:
        """Show that something goes on; yields a function that says what exactly."""
        with working(what, quiet=self._quiet) as progress:

            def say(line: str) -> None:
                progress.update(progress.task_ids[0], description=line)

            yield say

    @contextmanager
    def states(self) -> Iterator[Callable[[StateRow], None]]:
        """Show a table that grows by a row for each message."""
        table = Table("message", "state", "seconds", "weights + KV", "process", box=None)
        for column in table.columns[2:]:
            column.justify = "right"

        def add(row: StateRow) -> None:
            table.add_row(
                row.message,
                row.state,
                format_seconds(row.seconds),
                format_bytes(row.resident_bytes),
                format_bytes(row.process_bytes),
            )

        if self._quiet:
            yield add
        elif stdout.is_terminal:
            rows = Group(table, Spinner("dots", "leading the worker to serving"))
            with Live(rows, console=stdout, refresh_per_second=8) as live:
                yield add
                live.update(table)
        else:
            yield add
            stdout.print(table)

    def residency(self, report: Residency) -> None:
        """Show what a sleep gave back."""
        if self._quiet:
            return
        stdout.print(f"\nsleep level {report.level}", style="bold")
        table = Table("", "before", "asleep", "awake", box=None)
        for column in table.columns[1:]:
            column.justify = "right"
        table.add_row(
            "process",
            format_bytes(report.process_bytes_before),
            format_bytes(report.process_bytes_asleep),
            format_bytes(report.process_bytes_after),
        )
        table.add_row(
            "weights + KV",
            format_bytes(report.arena_bytes_before),
            format_bytes(report.arena_bytes_asleep),
            format_bytes(report.arena_bytes_after),
        )
        stdout.print(table)

    def summary(self, result: DemoResult) -> None:
        """Show the table that ends the demo."""
        table = Table("", "result", title="summary", title_justify="left", box=None)
        table.add_row("model", f"{result.model}, {result.dtype}")
        table.add_row("to serving", format_seconds(sum(row.seconds for row in result.states)))
        if result.first is not None:
            table.add_row("first token", format_seconds(result.first.ttft_s))
            table.add_row("decode", f"{result.first.decode_tokens_per_s:.1f} tokens/s")
        for report in result.sleeps:
            reload = f", reload {format_seconds(report.reload_s)}" if report.reload_s else ""
            freed = report.process_bytes_before - report.process_bytes_asleep
            same = "same tokens" if result.same_answer(report) else "DIFFERENT TOKENS"
            table.add_row(
                f"sleep level {report.level}",
                f"{format_seconds(report.sleep_s)}, freed {format_bytes(freed)}{reload}, "
                f"wake {format_seconds(report.wake_s)}: {same}",
            )
        table.add_row("checks", "passed" if result.passed else "FAILED")
        stdout.print()
        stdout.print(table)
