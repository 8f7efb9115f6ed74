"""Layer 5. One worker as a process of its own: start, wait until it answers, stop for sure."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import msgspec

from gpuworker.config import WorkerConfig
from gpuworker.errors import ClientError, ConnectionLost, WorkerError
from gpuworker.ipc import connect, default_endpoint
from gpuworker.ipc.endpoint import ipc_path
from gpuworker.messages import GetStatus, Shutdown

__all__ = ["ReadyLine", "WorkerProcess"]

_KEPT_LINES = 20
_CONNECT_TIMEOUT_S = 2.0
_POLL_S = 0.01


class ReadyLine(msgspec.Struct, frozen=True):
    """What a worker process prints on a line of its own, as JSON, once it can be connected to."""

    endpoint: str
    pid: int


class WorkerProcess:
    """A worker in a child process; an async context manager.

    Entering starts `python -m gpuworker serve`, waits for its ready line and for its answer to
    GetStatus; a child that dies before raises ConnectionLost with its last words. Leaving sends
    Shutdown, then SIGTERM, then SIGKILL to its whole process group, each with its time, and
    removes its files; a cancelled scope does not cut this short. The child dies with this
    process.
    """

    def __init__(
        self,
        config: WorkerConfig,
        *,
        endpoint: str | None = None,
        command: Sequence[str] = (sys.executable, "-m", "gpuworker", "serve"),
        environment: Mapping[str, str] | None = None,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 10.0,
    ) -> None:
        private = default_endpoint()
        path = ipc_path(private)
        assert path is not None
        self.endpoint = endpoint or private
        self._directory = path.parent  # short and private: holds the child's files, too
        self._config = config
        self._command = tuple(command)
        self._environment = {**os.environ, **(environment or {})}
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._last_words = ""
        self._process: asyncio.subprocess.Process

    @property
    def pid(self) -> int:
        """Process id of the worker."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit status of the worker; None while it lives."""
        return self._process.returncode

    async def __aenter__(self) -> Self:
        self._directory.mkdir(mode=0o700)
        try:
            config_file = self._directory / "worker.json"
            config_file.write_bytes(msgspec.json.encode(self._config))
            # Files, not pipes: whatever the child prints, nobody has to read it for it to go on.
            with (
                (self._directory / "stdout").open("wb") as stdout,
                (self._directory / "stderr").open("wb") as stderr,
            ):
                self._process = await asyncio.create_subprocess_exec(
                    *self._command,
                    "--config",
                    str(config_file),
                    "--endpoint",
                    self.endpoint,
                    "--die-with-parent",
                    str(os.getpid()),
                    "--json",
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env=self._environment,
                    start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
                )
            try:
                await self._wait_until_ready()
            except BaseException:
                with anyio.CancelScope(shield=True):
                    await self._kill()
                raise
        except BaseException:
            self._remove_files()
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

    async def stop(self) -> int:
        """Stop the worker and return its exit status. Idempotent."""
        if self._process.returncode is None:
            try:
                async with connect(self.endpoint, connect_timeout_s=_CONNECT_TIMEOUT_S) as worker:
                    await worker.ask(Shutdown(), timeout_s=self._stop_timeout_s)
            except (WorkerError, ClientError):
                pass  # it may be gone, or stuck: the signals decide
            if not await self._wait(self._stop_timeout_s):
                await self._kill()
        self._last_words = self.last_words()
        self._remove_files()
        assert self._process.returncode is not None
        return self._process.returncode

    def last_words(self) -> str:
        """Return the last lines that the worker wrote to stderr; they are kept after stop."""
        try:
            text = (self._directory / "stderr").read_text(errors="replace")
        except FileNotFoundError:
            return self._last_words
        return "\n".join(text.splitlines()[-_KEPT_LINES:])

    async def _wait_until_ready(self) -> None:
        try:
            async with asyncio.timeout(self._start_timeout_s):
                self.endpoint = await self._read_endpoint(self._directory / "stdout")
                async with connect(
                    self.endpoint, connect_timeout_s=self._start_timeout_s
                ) as worker:
                    await worker.ask(GetStatus())
        except TimeoutError as error:
            raise ConnectionLost(
                f"the worker process was not ready within {self._start_timeout_s:g} s:\n"
                f"{self.last_words()}"
            ) from error

    async def _read_endpoint(self, stdout: Path) -> str:
        has_ended = False
        while not has_ended:
            has_ended = self._process.returncode is not None
            if (endpoint := _ready_endpoint(stdout)) is not None:
                return endpoint
            await asyncio.sleep(_POLL_S)
        raise ConnectionLost(
            f"the worker process ended with status {self._process.returncode} before it was "
            f"ready:\n{self.last_words()}"
        )

    async def _wait(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _kill(self) -> None:
        if self._process.returncode is None:
            self._process.terminate()
            if not await self._wait(self._stop_timeout_s):
                os.killpg(self._process.pid, signal.SIGKILL)  # it leads its group
                await self._wait(self._stop_timeout_s)

    def _remove_files(self) -> None:
        # A killed worker leaves its socket and its lock there.
        shutil.rmtree(self._directory, ignore_errors=True)


def _ready_endpoint(stdout: Path) -> str | None:
    for line in stdout.read_bytes().splitlines():
        with suppress(msgspec.DecodeError):  # libraries print, too; a line may be half written
            return msgspec.json.decode(line, type=ReadyLine).endpoint
    return None
