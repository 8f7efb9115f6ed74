"""Layer 5. The thread that ends a process for sure, whatever its other threads are doing."""

from __future__ import annotations

import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Self

from gpuworker.launch.exit_code import ExitCode
from gpuworker.launch.follow import POLL_S, FollowedProcess

__all__ = ["ORPHAN_GRACE_S", "Guard", "die_with_parent"]

ORPHAN_GRACE_S = 5.0
"""How long a process may take to end in order after one that it follows has died."""
_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CLOSE, _LOOK = 0, 255  # no signals have these numbers
_SAME_S = 1.0
"""SIGTERM again so soon is the same: a service manager and a launcher send it both."""
_TICK_S = 1.0
_MIN_SILENCE_S = 2.0
"""Below this the ticks are too coarse to tell a frozen loop from a late one."""
_MESSAGE_BYTES = 512
"""A pipe that can be written to takes this much without waiting (POSIX PIPE_BUF)."""

_Owned = tuple[Path, os.stat_result]


class Guard:
    """Asks for the orderly end of this process, and sees to it that it ends; a context manager.

    It asks when SIGTERM or SIGINT arrives or a followed process dies. When the process is still
    there after the time for that, or gets a second signal, the files it owns are removed and it
    ends without ceremony. All of this happens on a thread of its own, so it works while the
    event loop is blocked, a step runs or a library is being imported; only code that never
    releases the interpreter lock can hold it up. Enter it from the main thread, first of all.
    """

    def __init__(
        self, follow: Iterable[int] = (), *, orphan_grace_s: float = ORPHAN_GRACE_S
    ) -> None:
        """Name the processes to follow by pid; raises ConfigError for an impossible one."""
        self.drain_limit_s = 30.0
        """How long the orderly end may take that a signal asks for."""
        self._followed = [FollowedProcess(pid) for pid in follow]
        self._orphan_grace_s = orphan_grace_s
        self._lock = threading.Lock()
        self._ask: Callable[[], None] | None = None
        self._owned: list[_Owned] = []
        self._directory: Path | None = None
        self._deadline = math.inf
        self._last_code = ExitCode.GIVEN_UP
        self._reason = ""
        self._signal: tuple[signal.Signals, float] | None = None
        self._num_beats = 0
        self._silence_limit_s = math.inf
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def __enter__(self) -> Self:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        # The interpreter writes the number of a signal here at once, even when the main thread
        # does not come round to the handler.
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        self._handlers_before = {number: signal.signal(number, _noted) for number in _SIGNALS}
        os.register_at_fork(after_in_child=_let_go)
        self._thread.start()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._wake(_CLOSE)
        self._thread.join()
        for process in self._followed:
            process.close()
        os.close(self._write_end)
        os.close(self._read_end)

    def ask_by(self, ask: Callable[[], None]) -> None:
        """Say how to ask for the orderly end, from another thread, perhaps more than once.

        Before this was said there is nothing to end in order, so the process ends at once.
        """
        with self._lock:
            self._ask = ask

    def own(self, files: Iterable[Path], directory: Path | None = None) -> None:
        """Name the files to remove when there is no orderly end, and an emptied directory.

        Only what is there now counts, not what somebody else may put in its place.
        """
        with self._lock:
            for path in files:
                with suppress(FileNotFoundError):
                    self._owned.append((path, path.lstat()))
            self._directory = directory

    def disown(self) -> None:
        """Forget the files; they are gone."""
        with self._lock:
            self._owned.clear()
            self._directory = None

    def end_within(self, limit_s: float, code: ExitCode, reason: str) -> None:
        """End the process with a code when it is still there after limit_s. Any thread.

        The earliest of all such limits counts.
        """
        deadline = time.monotonic() + limit_s
        with self._lock:
            if deadline < self._deadline:
                self._deadline, self._last_code, self._reason = deadline, code, reason
        self._wake(_LOOK)

    def expect_beats(self, silence_limit_s: float) -> None:
        """End the process when beat is not called for so long from now on; math.inf, never."""
        self.beat()
        self._silence_limit_s = max(silence_limit_s, _MIN_SILENCE_S)

    def beat(self) -> None:
        """Show that the event loop lives."""
        self._num_beats += 1

    def leave(self, code: ExitCode, reason: str) -> NoReturn:
        """Remove the files and end the process here and now. Any thread."""
        with self._lock:
            self._remove_files()
            _say(f"gpuworker: {reason}; exit status {code.value}\n")
            os._exit(code)

    # -- the guard's own thread --------------------------------------------------------------

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._read_end, select.POLLIN)
        for process in self._followed:
            if process.descriptor is not None:
                poller.register(process.descriptor, select.POLLIN)
        alive = list(self._followed)
        beats, silent_s = 0, 0.0
        while True:
            limit_s = min(_TICK_S, max(self._deadline - time.monotonic(), 0.0))
            if any(process.descriptor is None for process in alive):
                limit_s = min(limit_s, POLL_S)
            # Dead before we began to wait counts, too, so look first.
            for process in [process for process in alive if process.has_ended()]:
                alive.remove(process)
                if process.descriptor is not None:
                    poller.unregister(process.descriptor)
                self._orphaned(process.pid)
            before = time.monotonic()
            poller.poll(math.ceil(limit_s * 1000))
            for number in self._read():
                if number == _CLOSE:
                    return
                if number in _SIGNALS:  # other handlers write here, too
                    self._signalled(signal.Signals(number))
            # What counts is time in which we ran: a process that was stopped is not silent.
            passed_s = min(time.monotonic() - before, _TICK_S)
            silent_s = silent_s + passed_s if self._num_beats == beats else 0.0
            beats = self._num_beats
            if silent_s >= self._silence_limit_s:
                self.leave(ExitCode.GIVEN_UP, f"the event loop has not moved for {silent_s:.0f} s")
            if time.monotonic() >= self._deadline:
                self.leave(self._last_code, self._reason)

    def _signalled(self, number: signal.Signals) -> None:
        now = time.monotonic()
        before, self._signal = self._signal, (number, now)
        if before is not None:
            if number == before[0] == signal.SIGTERM and now - before[1] < _SAME_S:
                return
            self.leave(ExitCode.INTERRUPTED, f"{number.name} again, ending at once")
        reason = f"not at its end {self.drain_limit_s:g} s after {number.name}"
        self.end_within(self.drain_limit_s, ExitCode.GIVEN_UP, reason)
        self._ask_now(ExitCode.ORDERLY, f"{number.name} before there was a worker")

    def _orphaned(self, pid: int) -> None:
        reason = f"process {pid} died, and this was not at its end {self._orphan_grace_s:g} s later"
        self.end_within(self._orphan_grace_s, ExitCode.ORPHANED, reason)
        self._ask_now(ExitCode.ORPHANED, f"process {pid} died before there was a worker")

    def _ask_now(self, code_without: ExitCode, reason_without: str) -> None:
        # Under the lock: from ask_by on, whatever is made will be removed in order.
        with self._lock:
            if self._ask is not None:
                self._ask()
                return
            _say(f"gpuworker: {reason_without}; exit status {code_without.value}\n")
            os._exit(code_without)

    def _remove_files(self) -> None:
        for path, status in self._owned:
            with suppress(OSError):
                if os.path.samestat(status, path.lstat()):
                    path.unlink()
        if self._directory is not None:
            with suppress(OSError):  # not empty: somebody else uses it
                self._directory.rmdir()

    def _wake(self, number: int) -> None:
        with suppress(BlockingIOError):  # full of signals: it is awake
            os.write(self._write_end, bytes([number]))

    def _read(self) -> bytes:
        try:
            return os.read(self._read_end, 64)
        except BlockingIOError:
            return b""


def die_with_parent(parent_pid: int, *, grace_s: float = ORPHAN_GRACE_S) -> None:
    """Send this process SIGTERM when its parent dies, and end it when it is still there later.

    For a process of one's own between launcher and worker; a worker process has a Guard. The
    second blow, grace_s after the first, comes with ExitCode.ORPHANED and no clean-up.
    parent_pid is who the parent should be; when it is another one, or gone, SIGTERM comes at
    once. Raises ConfigError for an impossible pid.
    """
    parent = FollowedProcess(parent_pid)
    is_orphan = os.getppid() != parent_pid or parent.has_ended()
    threading.Thread(
        target=_outlive, args=(parent, is_orphan, grace_s), name="follows the parent", daemon=True
    ).start()
    if is_orphan:
        os.kill(os.getpid(), signal.SIGTERM)


def _outlive(parent: FollowedProcess, is_orphan: bool, grace_s: float) -> None:
    if not is_orphan:
        if parent.descriptor is not None:
            poller = select.poll()
            poller.register(parent.descriptor, select.POLLIN)
            poller.poll()
        while not parent.has_ended():
            time.sleep(POLL_S)
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    _say(f"gpuworker: the parent {parent.pid} died; exit status {ExitCode.ORPHANED.value}\n")
    os._exit(ExitCode.ORPHANED)


def _noted(number: int, frame: FrameType | None) -> None:
    """Do nothing: the guard's thread has been told through the wakeup descriptor."""


def _let_go() -> None:
    """Make a forked child forget the guard; its signals are its own."""
    for number in _SIGNALS:
        if signal.getsignal(number) is _noted:
            signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)


def _say(text: str) -> None:
    """Write to stderr unless that would block; its reader may be gone or asleep."""
    with suppress(OSError):
        if select.select([], [2], [], 0)[1]:
            os.write(2, text.encode()[:_MESSAGE_BYTES])
