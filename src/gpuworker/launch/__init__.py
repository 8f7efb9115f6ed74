"""Layer 5. Workers as processes."""

from __future__ import annotations

from gpuworker.launch.guard import die_with_parent
from gpuworker.launch.process import ReadyLine, WorkerProcess

__all__ = ["ReadyLine", "WorkerProcess", "die_with_parent"]
