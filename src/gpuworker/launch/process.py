"""Layer 5. One worker as a process of its own: start, wait until it answers, stop for sure."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from gpuworker.config import WorkerConfig
from gpuworker.errors import ClientError, ConnectionLost, WorkerError
from gpuworker.ipc import connect, default_endpoint
from gpuworker.ipc.endpoint import ipc_path
from gpuworker.messages import Shutdown

__all__ = ["ReadyLine", "WorkerProcess"]

_KEPT_LINES = 20


class ReadyLine(msgspec.Struct, frozen=True):
    """What a worker process prints on its first line, as JSON, once it can be connected to."""

    endpoint: str
    pid: int


class WorkerProcess:
    """A worker in a child process; an async context manager.

    Entering starts `python -m gpuworker serve` and waits for its ready line; a child that dies
    before raises ConnectionLost with its last words. Leaving sends Shutdown, then SIGTERM, then
    SIGKILL, each with its time, and removes what the child left. The child dies with this
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
        self.endpoint = endpoint or default_endpoint()
        self._own_directory = ipc_path(self.endpoint) if endpoint is None else None
        self._config = config
        self._command = tuple(command)
        self._environment = {**os.environ, **(environment or {})}
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._files: tempfile.TemporaryDirectory[str] | None = None
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
        self._files = tempfile.TemporaryDirectory(prefix="gpuworker-")
        directory = Path(self._files.name)
        config_file = directory / "worker.json"
        config_file.write_bytes(msgspec.json.encode(self._config))
        try:
            with (directory / "stderr").open("wb") as stderr:
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
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    env=self._environment,
                    start_new_session=True,  # a Ctrl-C in the terminal is ours to handle
                )
            try:
                await self._wait_until_ready()
            except BaseException:
                await self._kill()
                raise
        except BaseException:
            self._clean_up()
            raise
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def stop(self) -> int:
        """Stop the worker and return its exit status. Idempotent."""
        assert self._files is not None
        if self._process.returncode is None:
            try:
                async with connect(self.endpoint, connect_timeout_s=2.0) as worker:
                    await worker.ask(Shutdown(), timeout_s=self._stop_timeout_s)
            except (WorkerError, ClientError):
                pass  # it may be gone, or stuck: the signals decide
            if not await self._wait(self._stop_timeout_s):
                await self._kill()
        self._clean_up()
        assert self._process.returncode is not None
        return self._process.returncode

    def last_words(self) -> str:
        """Return the last lines that the worker wrote to stderr."""
        assert self._files is not None
        text = (Path(self._files.name) / "stderr").read_text(errors="replace")
        return "\n".join(text.splitlines()[-_KEPT_LINES:])

    def _clean_up(self) -> None:
        """Remove our files, and the socket's directory that a killed worker could not remove."""
        if self._files is not None:
            self._files.cleanup()
        if self._own_directory is not None:
            shutil.rmtree(self._own_directory.parent, ignore_errors=True)

    async def _wait_until_ready(self) -> None:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(self._start_timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError as error:
            raise ConnectionLost(
                f"the worker process was not ready within {self._start_timeout_s:g} s:\n"
                f"{self.last_words()}"
            ) from error
        try:
            self.endpoint = msgspec.json.decode(line, type=ReadyLine).endpoint
        except msgspec.DecodeError as error:
            await self._wait(self._stop_timeout_s)
            raise ConnectionLost(
                f"the worker process ended with status {self._process.returncode} before it was "
                f"ready:\n{self.last_words()}"
            ) from error

    async def _wait(self, limit_s: float) -> bool:
        try:
            async with asyncio.timeout(limit_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _kill(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            if self._process.returncode is not None:
                return
            self._process.send_signal(number)
            if await self._wait(self._stop_timeout_s):
                return
