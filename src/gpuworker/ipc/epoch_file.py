"""Layer 0. The highest session epoch that was ever seen, across restarts of the worker."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gpuworker.errors import ConfigError
from gpuworker.ipc.endpoint import EPOCH_SUFFIX, ipc_path

__all__ = ["EpochFile", "epoch_path"]

_GENERATED = re.compile(r"/gpuworker-[0-9a-f]{12}/worker")

_MAX_EPOCH = 2**53 - 1
_MAX_BYTES = 32


class EpochFile:
    """Remembers one number; without a path, only as long as the process lives.

    Writing is atomic and durable: a crash leaves the old number or the new one.
    """

    def __init__(self, path: Path | None) -> None:
        """Read the number; raises ConfigError for a file that holds something else."""
        self._path = path
        self.highest = 0 if path is None else _read(path)

    def raise_to(self, epoch: int) -> None:
        """Write a higher number; raises ConfigError when it cannot be written."""
        assert epoch > self.highest
        if self._path is not None:
            _write(self._path, epoch)
        self.highest = epoch


def epoch_path(endpoint: str) -> Path | None:
    """Return where the epoch of an endpoint is kept; None for one that is never used again.

    Beside the socket of an ipc endpoint; for tcp under XDG_STATE_HOME (~/.local/state). Names
    of default_endpoint and ports that the system chooses do not come back.
    """
    path = ipc_path(endpoint)
    if path is not None:
        return None if _GENERATED.search(str(path)) else Path(f"{path}{EPOCH_SUFFIX}")
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if port in ("*", "0"):
        return None
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    name = re.sub("[^0-9A-Za-z.]", "_", host)
    return Path(state) / "gpuworker" / f"tcp-{name}-{port}{EPOCH_SUFFIX}"


def _read(path: Path) -> int:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise ConfigError(f"cannot read the epoch file {path}: {error.strerror}") from error
    number = text.strip()
    if len(text) > _MAX_BYTES or not number.isdigit() or int(number) > _MAX_EPOCH:
        raise ConfigError(
            f"{path} does not hold an epoch; if no old scheduler can be alive, remove it"
        )
    return int(number)


def _write(path: Path, epoch: int) -> None:
    scratch = Path(f"{path}.new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, f"{epoch}\n".encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        scratch.replace(path)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
    except OSError as error:
        raise ConfigError(f"cannot write the epoch file {path}: {error.strerror}") from error
