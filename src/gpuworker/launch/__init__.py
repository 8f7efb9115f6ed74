"""Layer 5. Workers as processes."""

from __future__ import annotations

from gpuworker.launch.exit_code import ExitCode
from gpuworker.launch.guard import Guard, die_with_parent
from gpuworker.launch.host import host_worker
from gpuworker.launch.process import ReadyLine, WorkerProcess

__all__ = ["ExitCode", "Guard", "ReadyLine", "WorkerProcess", "die_with_parent", "host_worker"]
