"""Layer 5. A log of everything that a worker was told and answered, and its replay."""

from __future__ import annotations

from gpuworker.steplog.compare import LOGPROB_TOLERANCE
from gpuworker.steplog.origin import header_of
from gpuworker.steplog.reader import Exchange, LogReader
from gpuworker.steplog.recording import RecordingStatistics, RecordingWorker
from gpuworker.steplog.replay import Difference, ReplayReport, replay
from gpuworker.steplog.writer import FsyncMode, LogStatistics, LogWriter

__all__ = [
    "LOGPROB_TOLERANCE",
    "Difference",
    "Exchange",
    "FsyncMode",
    "LogReader",
    "LogStatistics",
    "LogWriter",
    "RecordingStatistics",
    "RecordingWorker",
    "ReplayReport",
    "header_of",
    "replay",
]
