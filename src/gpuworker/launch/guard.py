"""Layer 5. A child that does not outlive its parent."""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel for SIGTERM when the parent dies, and go at once if it is dead already.

    parent_pid is who the parent should be; another one means that it died in between. Linux
    only; elsewhere this raises OSError.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGTERM)
