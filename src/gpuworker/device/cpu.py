"""Layer 1. The CPU as a device: its name, its compute threads, its frozen heap."""

from __future__ import annotations

import gc
import platform
from pathlib import Path

import torch

__all__ = ["ComputeThreads", "FrozenHeap", "cpu_name"]


def cpu_name() -> str:
    """Return the model name that the system reports."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


class ComputeThreads:
    """Sets the number of torch's compute threads, which the whole process shares."""

    def __init__(self, num_threads: int | None) -> None:
        """Set the number; None leaves torch's choice."""
        self._before = torch.get_num_threads()
        if num_threads is not None:
            torch.set_num_threads(num_threads)

    def restore(self) -> None:
        """Set the number that was found."""
        torch.set_num_threads(self._before)


class FrozenHeap:
    """Takes what lives now out of the garbage collector's rounds; the process shares it."""

    def __init__(self) -> None:
        """Collect, then freeze what is left."""
        gc.collect()
        gc.freeze()

    def thaw(self) -> None:
        """Let the collector see everything again, so that a model can be freed."""
        gc.unfreeze()
