"""Layer 1. A timeline of what a rank computes, in the format that Perfetto opens."""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

from gpuworker.errors import ConfigError, InvalidRequest

__all__ = ["Tracer"]


class Tracer:
    """Records with torch's profiler; start and stop are idempotent.

    Belongs to the device thread. Without a directory both verbs are refused.
    """

    def __init__(self, directory: str | None, rank: int) -> None:
        self._directory = Path(directory) if directory is not None else None
        self._rank = rank
        self._num_traces = 0
        self._profile: torch.profiler.profile | None = None

    def start(self) -> bool:
        """Start recording; returns False when a trace is recording already."""
        directory = self._require_directory()
        if self._profile is not None:
            return False
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"supervision.trace_dir {directory} cannot be created: {error}"
            ) from error
        # One cycle from start to stop; without acc_events torch 2.11 warns that it keeps no other.
        profile = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True
        )
        profile.start()
        self._profile = profile
        return True

    def stop(self) -> str:
        """Stop recording, write one file and return its path; empty when nothing records."""
        self._require_directory()
        return self.close()

    def close(self) -> str:
        """Like stop, without asking whether traces are configured."""
        if self._profile is None or self._directory is None:
            return ""
        profile, self._profile = self._profile, None
        profile.stop()
        self._num_traces += 1
        name = f"rank{self._rank}.{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
        path = self._directory / name
        profile.export_chrome_trace(str(path))
        return str(path)

    def _require_directory(self) -> Path:
        if self._directory is None:
            raise InvalidRequest(
                "traces are not configured; set supervision.trace_dir to a directory"
            )
        return self._directory
