"""Processes that behave badly, started in place of a worker: all of them end, and say why."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest

from gpuworker import messages as m
from gpuworker.config import ModelConfig, WorkerConfig
from gpuworker.errors import ConnectionLost
from gpuworker.ipc import connect
from gpuworker.launch import WorkerProcess

SERVE = """
import argparse, asyncio, json, os, signal, subprocess, sys, threading
from gpuworker.config import load_config
from pathlib import Path
from gpuworker.ipc import serve
from gpuworker.launch import die_with_parent
from gpuworker.testing import fake_worker
parser = argparse.ArgumentParser()
parser.add_argument("--config", type=Path)
parser.add_argument("--endpoint")
parser.add_argument("--die-with-parent", type=int)
parser.add_argument("--json", action="store_true")
arguments = parser.parse_args()
die_with_parent(arguments.die_with_parent)
def ready(endpoint):
    print("some library has something to say")
    print(json.dumps({"endpoint": endpoint, "pid": os.getpid()}), flush=True)
    after_ready()
def after_ready():
    pass
async def main():
    async with fake_worker(load_config(arguments.config)) as worker:
        await serve(worker, arguments.endpoint, on_ready=ready)
"""
RUN = "asyncio.run(main())\n"
CONFIG = WorkerConfig(model=ModelConfig(model="fake"))


def _process(script: str, **limits: float) -> WorkerProcess:
    return WorkerProcess(CONFIG, command=(sys.executable, "-c", script), **limits)


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


async def _wait_until_ended(pid: int) -> None:
    async with asyncio.timeout(30):
        while not _has_ended(pid):
            await asyncio.sleep(0.01)


async def test_a_worker_that_prints_does_not_fill_its_pipe() -> None:
    noise = "def after_ready():\n    print('x' * 1_000_000, flush=True)\n"
    async with _process(SERVE + noise + RUN) as process, connect(process.endpoint) as worker:
        assert (await worker.ask(m.GetStatus())).state == "uninit"
    assert process.returncode == 0


async def test_a_worker_that_ignores_everything_is_killed_with_its_children() -> None:
    stubborn = (
        "def after_ready():\n"
        "    child = subprocess.Popen([sys.executable, '-c', 'import threading\\n"
        "threading.Event().wait()'])\n"
        "    print(child.pid, file=sys.stderr, flush=True)\n"
        "    signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    )
    stuck = "threading.Event().wait()\n"  # after Shutdown was answered
    process = _process(SERVE + stubborn + RUN + stuck, stop_timeout_s=0.5)
    async with process:
        child = int(process.last_words())
        assert not _has_ended(child)
        assert await process.stop() == -signal.SIGKILL
    await _wait_until_ended(child)
    assert process.last_words() == str(child)  # kept after its file is gone


async def test_a_cancelled_scope_stops_the_worker_all_the_same() -> None:
    with anyio.CancelScope() as scope:
        async with _process(SERVE + RUN) as process:
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert process.returncode == 0
    assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()


async def test_a_start_that_is_cancelled_leaves_no_process() -> None:
    process = _process("import threading\nthreading.Event().wait()")
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                while "_process" not in vars(process):
                    await anyio.sleep(0.001)
                scope.cancel()

            group.start_soon(cancel)
            async with process:
                pass
    assert process.returncode == -signal.SIGTERM
    assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()


async def test_an_endpoint_that_was_chosen_by_the_system_is_known_after_the_start() -> None:
    process = WorkerProcess(
        CONFIG, endpoint="tcp://127.0.0.1:*", command=(sys.executable, "-c", SERVE + RUN)
    )
    async with process, connect(process.endpoint) as worker:
        assert int(process.endpoint.rpartition(":")[2]) > 0
        assert (await worker.ask(m.GetStatus())).state == "uninit"


async def test_a_worker_that_is_bound_but_does_not_answer_is_not_ready() -> None:
    silent = (
        "import json, sys, threading, zmq\n"
        "endpoint = sys.argv[sys.argv.index('--endpoint') + 1]\n"
        "socket = zmq.Context().socket(zmq.ROUTER)\n"
        "socket.bind(endpoint)\n"
        "print(json.dumps({'endpoint': endpoint, 'pid': 1}), flush=True)\n"
        "threading.Event().wait()\n"
    )
    process = _process(silent, start_timeout_s=1.0)
    with pytest.raises(ConnectionLost, match="not ready within"):
        async with process:
            pass
    assert process.returncode == -signal.SIGTERM


GUARDED = """
import os, sys, threading
from gpuworker.launch import die_with_parent
die_with_parent(int(sys.argv[1]))
print("alive", flush=True)
threading.Event().wait()
"""


def test_a_child_whose_parent_died_before_it_could_say_so_ends_at_once() -> None:
    other = os.getppid()
    result = subprocess.run(
        [sys.executable, "-c", GUARDED, str(other)], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (-signal.SIGTERM, "")


def test_a_child_ends_with_the_process_that_started_it() -> None:
    middle = (
        "import json, os, subprocess, sys\n"
        f"child = subprocess.Popen([sys.executable, '-c', {GUARDED!r}, str(os.getpid())],"
        " stdout=subprocess.PIPE, text=True)\n"
        "assert child.stdout.readline() == 'alive\\n'\n"
        "print(json.dumps(child.pid), flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", middle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(json.loads(parent.stdout.readline()))
        assert not _has_ended(pid)
        parent.kill()
    ended = threading.Event()
    for _ in range(3000):
        if _has_ended(pid):
            break
        ended.wait(0.01)
    assert _has_ended(pid)
