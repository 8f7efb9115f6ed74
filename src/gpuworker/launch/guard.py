"""Layer 5. A child that does not outlive its parent."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies, and go at once if it is dead already.

    parent_pid is who the parent should be; another one means that it died in between. The
    kernel takes the end of the thread that started this process for the end of its parent, so
    start it from one that lives as long. Linux only; elsewhere this raises OSError.
    """
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"a child cannot follow its parent on {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)
