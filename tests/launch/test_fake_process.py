"""Processes that behave badly, started in place of a worker: all of them end, and say why."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import anyio
import pytest

from fake_serve import fake_serve
from gpuworker import messages as m
from gpuworker.errors import ConnectionLost
from gpuworker.ipc import connect
from gpuworker.launch import ExitCode, WorkerProcess
from processes import fake_config, has_ended, until

CONFIG = fake_config()


def _process(*command: str, **limits: float) -> WorkerProcess:
    return WorkerProcess(CONFIG, command=command, **limits)


def _script(text: str, **limits: float) -> WorkerProcess:
    return _process(sys.executable, "-c", text, **limits)


def _directory(process: WorkerProcess) -> Path:
    return Path(process.endpoint.removeprefix("ipc://")).parent


async def test_a_worker_that_prints_does_not_fill_its_pipe() -> None:
    async with _process(*fake_serve("noise")) as process:
        async with connect(process.endpoint) as worker:
            await worker.ask(m.InitDevice())  # prints much more than a pipe holds
            assert (await worker.ask(m.GetStatus())).state == "device_ready"
        assert process.last_words().endswith("x" * 100)
    assert process.returncode == ExitCode.ORDERLY


async def test_a_worker_that_ignores_everything_is_killed_with_its_children() -> None:
    stubborn = (
        "import signal, subprocess, sys, threading\n"
        "import fake_serve\n"
        "wait = 'import threading\\nthreading.Event().wait()'\n"
        "child = subprocess.Popen([sys.executable, '-c', wait])\n"
        "print(child.pid, file=sys.stderr, flush=True)\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, signal.SIG_IGN)\n"
        "signal.signal = lambda number, handler: None\n"
        "fake_serve.main('plain', *sys.argv[1:])\n"
    )
    process = WorkerProcess(
        CONFIG,
        command=(sys.executable, "-c", stubborn),
        environment={"PYTHONPATH": os.pathsep.join(sys.path)},
        stop_timeout_s=0.1,
    )
    async with process:
        child = int(process.last_words())
        assert not has_ended(child)
        assert await process.stop() == -signal.SIGKILL
        assert not _directory(process).exists()
    await until(lambda: has_ended(child))
    assert process.last_words() == str(child)  # kept after its file is gone


async def test_a_cancelled_scope_stops_the_worker_all_the_same() -> None:
    with anyio.CancelScope() as scope:
        async with _process(*fake_serve("plain")) as process:
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert process.returncode == ExitCode.ORDERLY
    assert not _directory(process).exists()


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    process = _script("import threading\nthreading.Event().wait()")
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await until(lambda: "_process" in vars(process))
                scope.cancel()

            group.start_soon(cancel)
            async with process:
                pass
    assert process.returncode == -signal.SIGTERM
    assert not _directory(process).exists()


async def test_a_start_is_stopped_at_once_while_there_is_nothing_to_end_in_order() -> None:
    process = _process(*fake_serve("import"))
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                await until(lambda: "_process" in vars(process))
                await until(lambda: "hangs: import" in process.last_words())
                scope.cancel()

            group.start_soon(cancel)
            async with process:
                pass
    assert process.returncode == ExitCode.ORDERLY
    assert "SIGTERM before there was a worker" in process.last_words()


async def test_an_endpoint_that_was_chosen_by_the_system_is_known_after_the_start() -> None:
    process = WorkerProcess(CONFIG, endpoint="tcp://127.0.0.1:*", command=fake_serve("plain"))
    async with process, connect(process.endpoint, observe=True) as worker:
        assert int(process.endpoint.rpartition(":")[2]) > 0
        assert (await worker.ask(m.GetStatus())).state == "uninit"


async def test_a_worker_that_is_bound_but_does_not_answer_is_not_ready() -> None:
    silent = (
        "import json, sys, threading, zmq, os\n"
        "endpoint = sys.argv[sys.argv.index('--endpoint') + 1]\n"
        "os.mkdir(os.path.dirname(endpoint.removeprefix('ipc://')))\n"
        "socket = zmq.Context().socket(zmq.ROUTER)\n"
        "socket.bind(endpoint)\n"
        "print(json.dumps({'endpoint': endpoint, 'pid': 1}), flush=True)\n"
        "threading.Event().wait()\n"
    )
    process = _script(silent, start_timeout_s=1.0)
    with pytest.raises(ConnectionLost, match="not ready within"):
        async with process:
            pass
    assert process.returncode == -signal.SIGTERM
    assert not _directory(process).exists()


async def test_the_configuration_passes_through_no_file_and_no_argument() -> None:
    script = (
        "import json, os, sys\n"
        "print(sys.argv, file=sys.stderr)\n"
        "print(json.load(sys.stdin)['model']['model'], file=sys.stderr)\n"
        "print([os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1, 2)], file=sys.stderr)\n"
    )
    process = _script(script)
    with pytest.raises(ConnectionLost, match="status 0 before it was ready"):
        async with process:
            pass
    arguments, model, files = process.last_words().splitlines()
    assert f"'--config', '-', '--endpoint', '{process.endpoint}'" in arguments
    assert f"'--die-with', '{os.getpid()}'" in arguments
    assert model == "fake"
    assert files.count("(deleted)") == 3


@pytest.mark.parametrize("is_new", [True, False])
async def test_stop_removes_what_a_killed_worker_left_at_a_chosen_endpoint(
    tmp_path: Path, is_new: bool
) -> None:
    directory = tmp_path / "run"
    if not is_new:
        directory.mkdir(mode=0o700)
    process = WorkerProcess(
        CONFIG, endpoint=f"ipc://{directory}/rank0", command=fake_serve("plain")
    )
    async with process, connect(process.endpoint, client="a scheduler"):
        os.kill(process.pid, signal.SIGKILL)
        assert await process.stop() == -signal.SIGKILL
    # The highest epoch is kept for the next worker there.
    assert [path.name for path in directory.iterdir()] == ["rank0.epoch"]


async def test_stop_leaves_the_files_of_a_worker_that_lives_there_now(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/run/rank0"
    first = WorkerProcess(CONFIG, endpoint=endpoint, command=fake_serve("plain"))
    second = WorkerProcess(CONFIG, endpoint=endpoint, command=fake_serve("plain"))
    async with first:
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: first.returncode is not None)
        async with second:
            await first.stop()
            async with connect(endpoint, observe=True) as worker:
                assert (await worker.ask(m.GetStatus())).state == "uninit"
        third = WorkerProcess(CONFIG, endpoint=endpoint, command=fake_serve("plain"))
        async with third:
            with pytest.raises(ConnectionLost, match="a worker lives on"):
                async with second:
                    pass
            async with connect(endpoint, observe=True) as worker:
                assert (await worker.ask(m.GetStatus())).state == "uninit"
