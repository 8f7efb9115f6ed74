"""A worker as a process: it starts, answers, stops, and does not outlive its parent."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from gpuworker import messages as m
from gpuworker.errors import ConnectionLost
from gpuworker.ipc import connect
from gpuworker.launch import WorkerProcess
from real_worker import tiny_config


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"


async def test_a_worker_process_serves_and_leaves_nothing_behind(tiny_model: Path) -> None:
    async with WorkerProcess(tiny_config(tiny_model)) as process:
        directory = Path(process.endpoint.removeprefix("ipc://")).parent
        async with connect(process.endpoint) as worker:
            for request in (m.InitDevice(), m.LoadModel(), m.ProfileMemory()):
                await worker.ask(request)
            assert (await worker.ask(m.GetStatus())).state == "profiled"
        assert directory.is_dir()
    assert process.returncode == 0
    assert not directory.exists()
    assert not _is_alive(process.pid)


async def test_sigterm_ends_a_worker_in_order(tiny_model: Path) -> None:
    async with WorkerProcess(tiny_config(tiny_model)) as process:
        async with connect(process.endpoint) as worker:
            await worker.ask(m.InitDevice())
        os.kill(process.pid, signal.SIGTERM)
        assert await process.stop() == 0
        assert not Path(process.endpoint.removeprefix("ipc://")).exists()


async def test_a_killed_worker_is_noticed_and_stop_does_not_hang(tiny_model: Path) -> None:
    async with WorkerProcess(tiny_config(tiny_model)) as process:
        directory = Path(process.endpoint.removeprefix("ipc://")).parent
        assert directory.is_dir()
        os.kill(process.pid, signal.SIGKILL)
        assert await process.stop() == -signal.SIGKILL
        assert not directory.exists()


async def test_a_process_that_ends_early_is_reported_with_its_last_words(tiny_model: Path) -> None:
    script = "import sys; print('the reason', file=sys.stderr); sys.exit(3)"
    process = WorkerProcess(tiny_config(tiny_model), command=(sys.executable, "-c", script))
    with pytest.raises(ConnectionLost, match=r"status 3 (.|\n)*the reason"):
        async with process:
            pass


async def test_a_process_that_never_gets_ready_is_stopped(tiny_model: Path) -> None:
    script = "import threading; threading.Event().wait()"
    process = WorkerProcess(
        tiny_config(tiny_model), command=(sys.executable, "-c", script), start_timeout_s=0.5
    )
    with pytest.raises(ConnectionLost, match="not ready within"):
        async with process:
            pass
    assert not _is_alive(process.pid)
