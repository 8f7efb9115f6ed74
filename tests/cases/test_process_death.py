"""Public case B17: whoever launched a worker is killed; the worker goes, whatever it is doing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from fake_serve import fake_serve
from gpuworker.config import WorkerConfig
from processes import TO_SERVING, WALK, fake_config, has_ended, until
from real_worker import tiny_config

TESTS = Path(__file__).parents[1]
LAUNCHER = str(TESTS / "launcher.py")
GONE_WITHIN_S = 10.0
Task = tuple[tuple[str, ...] | None, WorkerConfig, int | None, str]

STATES: dict[str, Task] = {
    name: (fake_serve("plain"), fake_config(), num_moves, "")
    for num_moves, name in enumerate(
        (
            "uninit",
            "device_ready",
            "device_ready with a model",
            "profiled",
            "kv_allocated",
            "warmed_up",
            "serving",
            "sleeping",
        )
    )
}
assert len(STATES) == len(WALK) + 1
WORK: dict[str, Task] = {
    "importing": (fake_serve("import"), fake_config(), None, "hangs"),
    "loading": (fake_serve("load"), fake_config(), 1, "hangs"),
    "a step of 5 s": (fake_serve("long step"), fake_config(), TO_SERVING, "step"),
    "a step for ever": (fake_serve("step"), fake_config(), TO_SERVING, "step"),
    "faulted": (fake_serve("faulting step"), fake_config(), TO_SERVING, "fault"),
    "frozen event loop": (fake_serve("loop"), fake_config(), TO_SERVING, "hangs"),
}


@pytest.fixture
def temp_dir() -> Iterator[Path]:
    """A short one: sockets have short names."""
    with tempfile.TemporaryDirectory(prefix="gw") as directory:
        yield Path(directory)


def _launch(tasks: list[Task], temp_dir: Path, *options: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "TMPDIR": str(temp_dir)}
    environment.pop("XDG_RUNTIME_DIR", None)
    return subprocess.Popen(
        [sys.executable, LAUNCHER, json.dumps(msgspec.to_builtins(tasks)), *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )


@asynccontextmanager
async def _killed(tasks: list[Task], temp_dir: Path) -> AsyncIterator[list[dict[str, object]]]:
    """Launch workers, kill their launcher, and yield what there was."""
    with _launch(tasks, temp_dir) as launcher:
        assert launcher.stdout is not None
        try:
            found = json.loads(await asyncio.to_thread(launcher.stdout.readline))
            assert not [one for one in found if has_ended(one["pid"])]
        finally:
            launcher.kill()
        yield found


async def _all_gone(pids: dict[str, int]) -> None:
    """Wait until all have ended; fails with the names of those that live on."""
    try:
        await until(lambda: all(has_ended(pid) for pid in pids.values()), GONE_WITHIN_S)
    except TimeoutError:
        alive = {name: pid for name, pid in pids.items() if not has_ended(pid)}
        for pid in alive.values():
            os.kill(pid, signal.SIGKILL)
        pytest.fail(f"still alive {GONE_WITHIN_S:g} s after the launcher was killed: {alive}")


@pytest.mark.parametrize("situations", [STATES, WORK], ids=["states", "work"])
async def test_workers_go_with_their_launcher_and_leave_no_files(
    situations: dict[str, Task], temp_dir: Path
) -> None:
    async with _killed(list(situations.values()), temp_dir) as found:
        pids = {name: int(str(one["pid"])) for name, one in zip(situations, found, strict=True)}
        await _all_gone(pids)
    assert list(temp_dir.rglob("*")) == []


async def test_a_real_worker_goes_from_serving_and_from_its_imports(
    tiny_model: Path, temp_dir: Path
) -> None:
    config = tiny_config(tiny_model)
    tasks: list[Task] = [(None, config, TO_SERVING, ""), (None, config, None, "starting")]
    async with _killed(tasks, temp_dir) as found:
        pids = {str(one["endpoint"]): int(str(one["pid"])) for one in found}
        await _all_gone(pids)
    assert list(temp_dir.rglob("*")) == []


OUTER = """
import subprocess, sys, threading
manager = subprocess.Popen(sys.argv[1:])
print(manager.pid, flush=True)
manager.wait()
threading.Event().wait()
"""


@pytest.mark.parametrize("victim", ["launcher", "manager"])
async def test_a_worker_goes_with_its_manager_and_with_the_launcher_of_that(
    victim: str, temp_dir: Path
) -> None:
    # The manager ignores SIGTERM: the worker must not depend on it, and it goes itself.
    tasks = json.dumps(msgspec.to_builtins([STATES["serving"], WORK["a step for ever"]]))
    launcher = subprocess.Popen(
        [sys.executable, "-c", OUTER, sys.executable, LAUNCHER, tasks, "managed"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temp_dir), "XDG_RUNTIME_DIR": ""},
    )
    assert launcher.stdout is not None
    with launcher:
        try:
            pids = {"manager": int(await asyncio.to_thread(launcher.stdout.readline))}
            found = json.loads(await asyncio.to_thread(launcher.stdout.readline))
            pids |= {f"worker {number}": one["pid"] for number, one in enumerate(found)}
            assert not [name for name, pid in pids.items() if has_ended(pid)]
            os.kill(launcher.pid if victim == "launcher" else pids["manager"], signal.SIGKILL)
            await _all_gone(pids)
        finally:
            launcher.kill()
    assert list(temp_dir.rglob("*")) == []
