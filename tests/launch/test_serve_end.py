"""How `gpuworker serve` ends: what it answers before, what it removes, and its exit status."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fake_serve import fake_serve
from gpuworker import messages as m
from gpuworker.cli import main
from gpuworker.errors import WorkerClosed
from gpuworker.ipc import RemoteWorker, connect
from gpuworker.launch import ExitCode, WorkerProcess
from gpuworker.testing import empty_step
from processes import fake_config, observe, until, walk

SIGNALS = [signal.SIGTERM, signal.SIGINT]


@asynccontextmanager
async def _stepping(
    behaviour: str, **supervision: object
) -> AsyncIterator[tuple[WorkerProcess, RemoteWorker, asyncio.Future[m.StepOutput]]]:
    """Start a worker in which a step runs."""
    process = WorkerProcess(fake_config(**supervision), command=fake_serve(behaviour))
    async with (
        process,
        connect(process.endpoint) as worker,
        observe(process.endpoint) as health,
    ):
        await walk(worker)
        step = worker.submit(empty_step(1))

        async def runs() -> bool:
            return (await health()).running_step_id == 1

        await until(runs)
        yield process, worker, step


async def _signal(process: WorkerProcess, worker: RemoteWorker, number: int) -> None:
    """Send a signal and wait until the worker has queued its end."""
    os.kill(process.pid, number)

    async def has_queued() -> bool:
        return (await worker.ask(m.GetStatus())).moving == "shutdown"

    await until(has_queued)


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_lets_the_steps_ahead_finish_and_answers_what_waits(
    tmp_path: Path, number: signal.Signals
) -> None:
    release = tmp_path / "release"
    async with _stepping(f"step until {release}") as (process, worker, step):
        ahead = worker.submit(empty_step(2))
        await _signal(process, worker, number)
        behind = [worker.submit(m.GetLimits()) for _ in range(20)]
        await worker.ask(m.GetHealth())  # the worker has read them
        release.touch()
        assert (await step).step_id == 1
        assert (await ahead).step_id == 2
        for reply in behind:
            with pytest.raises(WorkerClosed):
                await reply
        await until(lambda: process.returncode is not None)
        assert process.returncode == ExitCode.ORDERLY
        assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()


async def test_a_second_signal_ends_at_once_and_removes_the_files() -> None:
    async with _stepping("step") as (process, worker, step):
        await _signal(process, worker, signal.SIGTERM)
        os.kill(process.pid, signal.SIGINT)
        await until(lambda: process.returncode is not None)
        assert process.returncode == ExitCode.INTERRUPTED
        assert "SIGINT again" in process.last_words()
        assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()
        await asyncio.wait([step])
        step.exception()


async def test_an_end_that_takes_too_long_is_cut_short_with_4() -> None:
    async with _stepping("step", drain_limit_s=0.3) as (process, _, step):
        os.kill(process.pid, signal.SIGTERM)
        await until(lambda: process.returncode is not None)
        assert process.returncode == ExitCode.GIVEN_UP
        assert "not at its end 0.3 s after SIGTERM" in process.last_words()
        assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()
        await asyncio.wait([step])
        step.exception()


async def test_shutdown_ends_the_process_with_0() -> None:
    async with WorkerProcess(fake_config(), command=fake_serve("plain")) as process:
        async with connect(process.endpoint) as worker:
            await worker.ask(m.Shutdown())
        await until(lambda: process.returncode is not None)
        assert await process.stop() == ExitCode.ORDERLY
        assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()


async def test_a_worker_follows_any_process(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        process = WorkerProcess(fake_config(), command=fake_serve("plain"), die_with=[other.pid])
        async with process:
            other.communicate(b"\n")
            await until(lambda: process.returncode is not None)
            assert process.returncode == ExitCode.ORDERLY  # in time, in order
            assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()


async def test_a_worker_that_follows_a_dead_process_does_not_start() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait()
    result = await asyncio.to_thread(
        subprocess.run,
        [*fake_serve("plain"), "--config", "-", "--die-with", str(other.pid)],
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == ExitCode.ORPHANED
    assert f"process {other.pid} died before there was a worker" in result.stderr


@pytest.mark.parametrize(
    ("text", "arguments", "words"),
    [
        ("{", (), "the configuration on stdin"),
        ('{"model": {"model": ""}}', (), "model.model is empty"),
        ("{}", (), "model"),
        ('{"model": {"model": "m"}}', ("--max-model-len", "0"), "model.max_model_len is 0"),
        ('{"model": {"model": "m"}}', ("--die-with", "0"), "0 is no process id"),
    ],
)
def test_a_wrong_configuration_on_stdin_is_a_line_and_status_2(
    text: str,
    arguments: tuple[str, ...],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    before = [signal.getsignal(number) for number in SIGNALS]
    assert main(["serve", "--config", "-", *arguments]) == ExitCode.USAGE
    assert words in capsys.readouterr().err
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_the_help_names_every_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "-h"])
    text = capsys.readouterr().out
    for code in ExitCode:
        assert f"{code.value:>3}  {code.meaning}" in text
