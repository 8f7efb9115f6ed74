"""Layer 5. One worker as a process of its own: start, wait until it answers, stop for sure."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import anyio
import msgspec

from gpuworker.config import WorkerConfig
from gpuworker.errors import ConfigError, ConnectionLost
from gpuworker.ipc import connect, default_endpoint
from gpuworker.ipc.endpoint import ipc_path
from gpuworker.ipc.lock import owned
from gpuworker.launch.host import endpoint_files
from gpuworker.launch.output import Output
from gpuworker.messages import GetHealth

__all__ = ["ReadyLine", "WorkerProcess"]

_KEPT_LINES = 20
_POLL_S = 0.01
_LAST_CHANCE_S = 2.0


class ReadyLine(msgspec.Struct, frozen=True):
    """What a worker process prints on a line of its own, as JSON, once it can be connected to."""

    endpoint: str
    pid: int


class WorkerProcess:
    """A worker in a child process; an async context manager.

    Entering starts `python -m gpuworker serve`, waits for its ready line and for its answer to
    GetHealth; a child that dies before raises ConnectionLost with its last words. Leaving sends
    SIGTERM, which lets the steps ahead finish, then SIGINT, which does not, then SIGKILL to its
    whole process group, each with its time; a cancelled scope does not cut this short.

    The child follows this process and those of die_with: when one of them dies, in whatever
    way, it ends by itself and removes its files. Nothing of what passes between the two has a
    name on disk.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        endpoint: str | None = None,
        command: Sequence[str] = (sys.executable, "-m", "gpuworker", "serve"),
        environment: Mapping[str, str] | None = None,
        die_with: Iterable[int] = (),
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        """Describe the process; die_with names the pids it follows besides this one."""
        self.endpoint = endpoint or default_endpoint()
        self._path = ipc_path(self.endpoint)
        self._is_private = endpoint is None
        self._config = config
        self._command = tuple(command)
        self._environment = {**os.environ, **(environment or {})}
        self._die_with = tuple(die_with)
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._last_words = ""
        self._stdout: Output
        self._stderr: Output
        self._process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the worker, see ExitCode; None while it lives."""
        return self._process.returncode

    async def __aenter__(self) -> Self:
        self._stdout, self._stderr = Output(), Output()
        try:
            await self._start()
            try:
                await self._wait_until_ready()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._end()
                    self._remove_leftovers()
                raise
        except BaseException:
            self._close_output()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with anyio.CancelScope(shield=True):
            await self.stop()

    async def wait(self) -> int:
        """Wait until the worker ends by itself, as after Shutdown; return its exit status."""
        return await self._process.wait()

    async def stop(self) -> int:
        """Stop the worker and return its exit status. Idempotent."""
        await self._end()
        self._close_output()
        self._remove_leftovers()
        assert self._process.returncode is not None
        return self._process.returncode

    def last_words(self) -> str:
        """Return the last lines that the worker wrote to stderr; they are kept after stop."""
        try:
            return self._stderr.last_lines(_KEPT_LINES)
        except ValueError:  # closed
            return self._last_words

    async def _start(self) -> None:
        follow = [
            word for pid in (os.getpid(), *self._die_with) for word in ("--die-with", f"{pid}")
        ]
        with tempfile.TemporaryFile() as config:  # a pipe would need somebody to feed it
            config.write(msgspec.json.encode(self._config))
            config.seek(0)
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--config",
                "-",
                "--endpoint",
                self.endpoint,
                *follow,
                "--json",
                stdin=config,
                stdout=self._stdout.fileno(),
                stderr=self._stderr.fileno(),
                env=self._environment,
                start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
            )

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self.endpoint = await self._read_endpoint()
                async with connect(
                    self.endpoint, observe=True, connect_timeout_s=self._start_timeout_s
                ) as worker:
                    await worker.ask(GetHealth())
        except TimeoutError as error:
            raise ConnectionLost(
                f"the worker process was not ready within {self._start_timeout_s:g} s:\n"
                f"{self.last_words()}"
            ) from error

    async def _read_endpoint(self) -> str:
        has_ended = False
        while not has_ended:
            has_ended = self._process.returncode is not None
            for line in self._stdout.new_lines():
                with suppress(msgspec.DecodeError):  # libraries print, too
                    return msgspec.json.decode(line, type=ReadyLine).endpoint
            await asyncio.sleep(_POLL_S)
        raise ConnectionLost(
            f"the worker process ended with status {self._process.returncode} before it was "
            f"ready:\n{self.last_words()}"
        )

    async def _end(self) -> None:
        in_order = (signal.SIGTERM, self._stop_timeout_s)
        at_once = (signal.SIGINT, _LAST_CHANCE_S)
        for number, limit_s in (in_order, at_once):
            if self._process.returncode is None:
                with suppress(ProcessLookupError):
                    os.kill(self._process.pid, number)
                await self._wait(limit_s)
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads its group
            await self._process.wait()

    async def _wait(self, limit_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._process.wait()

    def _close_output(self) -> None:
        self._last_words = self.last_words()
        self._stdout.close()
        self._stderr.close()

    def _remove_leftovers(self) -> None:
        """Remove what a worker leaves that was killed; nothing of another one."""
        if self._path is None or not self._path.parent.is_dir():
            return
        with suppress(ConfigError), owned(self._path):  # removes the socket and the lock
            for path in endpoint_files(self._path)[1:-1]:
                path.unlink(missing_ok=True)
        if self._is_private:
            shutil.rmtree(self._path.parent, ignore_errors=True)
