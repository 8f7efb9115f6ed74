"""Layer 5. Workers as processes."""

from __future__ import annotations

from gpuworker.launch.guard import die_with_parent
from gpuworker.launch.process import WorkerProcess

__all__ = ["WorkerProcess", "die_with_parent"]
