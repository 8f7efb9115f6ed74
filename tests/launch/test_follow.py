"""Following a process: with a pidfd and without, dead before, dead later, number given away."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from gpuworker.errors import ConfigError
from gpuworker.launch import ExitCode
from gpuworker.launch.follow import FollowedProcess
from gpuworker.launch.output import Output
from processes import has_ended, until


def _no_pidfd(pid: int, flags: int = 0) -> int:
    raise OSError("an old kernel")


@pytest.fixture(params=["pidfd", "polling"])
def _means(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "polling":
        monkeypatch.setattr(os, "pidfd_open", _no_pidfd)


@pytest.mark.usefixtures("_means")
def test_the_end_of_a_process_is_seen_although_nobody_reaped_it() -> None:
    # Started from here, so it is younger than we are; we follow it from a child's view.
    script = (
        "import os, sys\n"
        "from gpuworker.launch.follow import FollowedProcess\n"
        + ("" if os.pidfd_open is not _no_pidfd else "del os.pidfd_open\n")
        + "followed = FollowedProcess(int(sys.argv[1]))\n"
        "print(followed.descriptor is not None, followed.has_ended(), flush=True)\n"
        "input()\n"
        "print(followed.has_ended(), flush=True)\n"
        "followed.close()\n"
    )
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with other:
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(other.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with child:
            assert child.stdout is not None
            has_descriptor = os.pidfd_open is not _no_pidfd
            assert child.stdout.readline() == f"{has_descriptor} False\n"
            other.kill()
            os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, not reaped
            answer, _ = child.communicate("\n")
    assert answer == "True\n"


@pytest.mark.usefixtures("_means")
def test_a_process_that_is_gone_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as other:
        other.wait()
    followed = FollowedProcess(other.pid)
    assert followed.has_ended()
    followed.close()


@pytest.mark.usefixtures("_means")
def test_a_number_that_was_given_to_a_younger_process_has_ended() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as younger:
        followed = FollowedProcess(younger.pid)
        assert followed.has_ended()
        followed.close()
        younger.communicate(b"\n")


@pytest.mark.usefixtures("_means")
def test_a_process_of_somebody_else_can_be_followed() -> None:
    followed = FollowedProcess(1)
    assert not followed.has_ended()
    followed.close()


@pytest.mark.parametrize("pid", [0, -1])
def test_an_impossible_pid_is_refused(pid: int) -> None:
    with pytest.raises(ConfigError, match=f"{pid} is no process id"):
        FollowedProcess(pid)


GUARDED = """
import signal, sys, threading
from gpuworker.launch import die_with_parent
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
die_with_parent(int(sys.argv[1]), grace_s=0.2)
print("alive", flush=True)
"""
WAITING = GUARDED + "threading.Event().wait()\n"


@pytest.mark.parametrize(
    ("options", "status"), [((), -signal.SIGTERM), (("stubborn",), ExitCode.ORPHANED)]
)
def test_a_child_whose_parent_died_before_it_could_say_so_ends(
    options: tuple[str, ...], status: int
) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WAITING, str(os.getppid()), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == status
    assert result.stdout == ("alive\n" if options else "")


@pytest.mark.parametrize("options", [(), ("stubborn",)])
async def test_a_child_ends_with_the_process_that_started_it(options: tuple[str, ...]) -> None:
    middle = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', {WAITING!r}, str(os.getpid()), *sys.argv[1:]]\n"
        "child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)\n"
        "assert child.stdout.readline() == 'alive\\n'\n"
        "print(child.pid, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", middle, *options],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not has_ended(pid)
        parent.kill()
        await until(lambda: has_ended(pid))


def test_the_end_of_a_thread_is_not_the_end_of_its_process() -> None:
    # The parent-death signal of the kernel would take it for that.
    script = GUARDED + "sys.stdin.readline()\nprint('still alive', flush=True)\n"
    children: list[subprocess.Popen[str]] = []

    def start() -> None:
        child = subprocess.Popen(
            [sys.executable, "-c", script, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        children.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "alive\n"

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    with children[0] as child:
        assert child.communicate("\n")[0] == "still alive\n"
    assert child.returncode == 0


def test_output_is_read_line_by_line_and_from_its_end() -> None:
    output = Output()
    os.write(output.fileno(), b"first\nsecond\nhal")
    assert output.new_lines() == [b"first", b"second"]
    assert output.new_lines() == []
    os.write(output.fileno(), b"f\n")
    assert output.new_lines() == [b"half"]
    assert output.last_lines(2) == "second\nhalf"
    os.write(output.fileno(), b"x" * 100_000 + b"\nlast \xff\n")
    assert output.last_lines(1) == "last \N{REPLACEMENT CHARACTER}"
    assert len(output.last_lines(20)) < 1 << 16
    output.close()
    output.close()
