"""The guard's signals: its own only, and not those of a forked child."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from gpuworker.launch import ExitCode


def _run(body: str) -> subprocess.CompletedProcess[str]:
    head = (
        "import os, signal, sys, threading, time\n"
        "from gpuworker.launch import ExitCode, Guard\n"
        "asked = threading.Event()\n"
    )
    return subprocess.run(
        [sys.executable, "-c", head + body], capture_output=True, text=True, check=False
    )


def test_other_signals_do_not_ask_for_the_end() -> None:
    result = _run(
        "with Guard() as guard:\n"
        "    guard.ask_by(asked.set)\n"
        "    signal.signal(signal.SIGUSR1, lambda number, frame: None)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"  # read after them, and the first of its kind
        "    assert asked.wait(10)\n"
        "    print('alive')\n"
    )
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


def test_the_signals_of_a_forked_child_are_its_own() -> None:
    result = _run(
        "with Guard() as guard:\n"
        "    guard.ask_by(asked.set)\n"
        "    read_end, write_end = os.pipe()\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        os.write(write_end, b'x')\n"
        "        while True:\n"
        "            threading.Event().wait()\n"
        "    os.read(read_end, 1)\n"
        "    os.kill(child, signal.SIGTERM)\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "print(asked.is_set())\n"  # the guard has read everything by now
    )
    assert result.stdout == f"{-signal.SIGTERM}\nFalse\n", result.stderr


@pytest.mark.parametrize("first", ["SIGTERM", "SIGINT"])
def test_a_second_signal_counts_although_the_main_thread_handles_none(first: str) -> None:
    result = _run(
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, signal.SIGINT])\n"
        "def interrupt():\n"
        "    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGINT])\n"
        f"    os.kill(os.getpid(), signal.{first})\n"
        "    assert asked.wait(10)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "with Guard() as guard:\n"
        "    guard.ask_by(asked.set)\n"
        "    threading.Thread(target=interrupt).start()\n"
        "    while True:\n"
        "        pass\n"
    )
    assert result.returncode == ExitCode.INTERRUPTED, result.stderr
    assert result.stderr == "gpuworker: SIGINT again, ending at once; exit status 130\n"


def test_sigterm_from_two_sides_at_a_time_is_one() -> None:
    result = _run(
        "with Guard() as guard:\n"
        "    guard.ask_by(asked.set)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    assert asked.wait(10)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "print('alive')\n"  # the guard has read both by now
    )
    assert (result.returncode, result.stdout) == (0, "alive\n"), result.stderr


def test_a_limit_ends_the_process_with_its_code_and_removes_only_its_own_files() -> None:
    result = _run(
        "from pathlib import Path\n"
        "import tempfile\n"
        "directory = Path(tempfile.mkdtemp())\n"
        "mine, other = directory / 'mine', directory / 'other'\n"
        "mine.touch(), other.touch()\n"
        "with Guard() as guard:\n"
        "    guard.own([mine, other, directory / 'missing'], directory)\n"
        "    replacement = directory / 'new'\n"
        "    replacement.touch()\n"
        "    replacement.rename(other)\n"  # another worker's by now
        "    print(directory, flush=True)\n"
        "    guard.end_within(60.0, ExitCode.FAULTED, 'too late to count')\n"
        "    guard.end_within(0.0, ExitCode.ORPHANED, 'the reason')\n"
        "    threading.Event().wait()\n"
    )
    assert result.returncode == ExitCode.ORPHANED
    assert result.stderr == "gpuworker: the reason; exit status 5\n"
    listing = subprocess.run(
        ["ls", result.stdout.strip()], capture_output=True, text=True, check=True
    )
    assert listing.stdout == "other\n"
    subprocess.run(["rm", "-r", result.stdout.strip()], check=True)
