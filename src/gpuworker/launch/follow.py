"""Layer 5. Another process whose end can be waited for, whoever its parent is."""

from __future__ import annotations

import os
import select
from contextlib import suppress

from gpuworker.errors import ConfigError

__all__ = ["POLL_S", "FollowedProcess"]

POLL_S = 0.25
"""How often to look at processes where the system has no descriptors for them."""


class FollowedProcess:
    """A process that was there before this one, held by a pidfd where the system has them.

    Unlike the parent-death signal this follows the process and not the thread of it that
    started us, works for any process, and does not lose the news when nobody listens.
    """

    def __init__(self, pid: int) -> None:
        """Begin to follow; one that is gone has ended. Raises ConfigError for an impossible pid."""
        if pid < 1:
            raise ConfigError(f"{pid} is no process id; name the process to follow, for example $$")
        self.pid = pid
        self.descriptor: int | None = None
        """Readable once the process has ended; None where has_ended must be asked."""
        with suppress(AttributeError, OSError):  # an old kernel, a sandbox, another system
            self.descriptor = os.pidfd_open(pid)
        self._is_another = _is_younger(pid)

    def has_ended(self) -> bool:
        """Say whether the process has ended; one that waits to be reaped has."""
        if self._is_another:
            return True
        if self.descriptor is not None:
            poller = select.poll()
            poller.register(self.descriptor, select.POLLIN)
            return bool(poller.poll(0))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            return False
        status = _status(self.pid)
        return status is not None and status[0] in ("Z", "X")

    def close(self) -> None:
        """Stop following."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def _is_younger(pid: int) -> bool:
    """Say whether a pid belongs to a process that began after us.

    A process that is to be followed was there first, so its number has been given away again.
    """
    theirs, ours = _status(pid), _status(os.getpid())
    return theirs is not None and ours is not None and int(theirs[19]) > int(ours[19])


def _status(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; None without them.

    Field 22 of proc_pid_stat(5), here number 19, is the start time in clock ticks.
    """
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None
