"""Layer 1. Memory of a CPU rank, read from Linux's proc and cgroup files."""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

__all__ = ["ProcMemoryReader"]

_SAMPLE_INTERVAL_S = 0.002
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
_V2 = ("memory.max", "memory.current", "")


class ProcMemoryReader:
    """Implements MemoryReader for this process and its cgroups.

    Total and available memory are bounded by the limit of every cgroup (v1 and v2) that contains
    the process. File cache counts as available, since the kernel takes it back on demand. The
    peak is the kernel's own high-water mark where it may be reset; otherwise a thread samples
    the resident size between reset_peak and peak_bytes. proc and cgroup name the two mounts.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._proc = proc
        self._cgroup = cgroup
        self._sampler: _PeakSampler | None = None

    def total_bytes(self) -> int:
        """Return MemTotal or the smallest cgroup limit."""
        return min([self._meminfo("MemTotal"), *(limit for limit, _ in self._cgroups())])

    def available_bytes(self) -> int:
        """Return MemAvailable or the smallest room that a cgroup leaves; never negative."""
        rooms = (limit - used for limit, used in self._cgroups())
        return max(0, min([self._meminfo("MemAvailable"), *rooms]))

    def process_bytes(self) -> int:
        """Return the resident set size."""
        return self._status("VmRSS")

    def reset_peak(self) -> None:
        """Start a new span; see the class for how it is measured."""
        if self._sampler is not None:
            self._sampler.stop()
            self._sampler = None
        try:
            (self._proc / "self" / "clear_refs").write_text("5")
        except OSError:
            self._sampler = _PeakSampler(self._proc)

    def peak_bytes(self) -> int:
        """Return the largest resident set since reset_peak, or since the process started.

        Ends the span where it is sampled: a later call returns the same until reset_peak.
        """
        if self._sampler is not None:
            return self._sampler.stop()
        return self._status("VmHWM")

    def _status(self, key: str) -> int:
        return _kib_field(self._proc / "self" / "status", key)

    def _meminfo(self, key: str) -> int:
        return _kib_field(self._proc / "meminfo", key)

    def _cgroups(self) -> list[tuple[int, int]]:
        """Return (limit, bytes in use that cannot be reclaimed) of every cgroup with a limit."""
        found: list[tuple[int, int]] = []
        for line in _lines(self._proc / "self" / "cgroup"):
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                root, names = self._cgroup, _V2
            elif "memory" in controllers.split(","):
                root, names = self._cgroup / "memory", _V1
            else:
                continue
            # Inside a container the path may be the host's; its parents then do not exist here,
            # and the mount's root is the container's own group.
            group = root / path.lstrip("/")
            for directory in (group, *group.parents):
                found += _limit_and_use(directory, *names)
                if directory == root:
                    break
        return found


class _PeakSampler:
    """Samples the resident set on a thread until it is stopped; then keeps the maximum."""

    def __init__(self, proc: Path) -> None:
        self._statm = proc / "self" / "statm"
        self._ended = threading.Event()
        self._peak_bytes = 0
        self._thread = threading.Thread(target=self._sample, name="peak-sampler", daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """End the span, once, and return its peak."""
        self._ended.set()
        self._thread.join()
        return self._peak_bytes

    def _sample(self) -> None:
        has_ended = False
        while not has_ended:
            has_ended = self._ended.wait(_SAMPLE_INTERVAL_S)
            # Once more after the end, so that what is there then counts in any case.
            pages = int(self._statm.read_text().split()[1])
            self._peak_bytes = max(self._peak_bytes, pages * mmap.PAGESIZE)


def _limit_and_use(
    directory: Path, limit_name: str, use_name: str, stat_prefix: str
) -> list[tuple[int, int]]:
    limit_text = _lines(directory / limit_name)
    use_text = _lines(directory / use_name)
    if not limit_text or not use_text or limit_text[0] == "max":
        return []
    cache_keys = {f"{stat_prefix}inactive_file", f"{stat_prefix}active_file"}
    cache_bytes = sum(
        int(value)
        for key, value in (line.split() for line in _lines(directory / "memory.stat"))
        if key in cache_keys
    )
    return [(int(limit_text[0]), max(0, int(use_text[0]) - cache_bytes))]


def _lines(path: Path) -> list[str]:
    """Return a file's lines; none where the file does not exist or may not be read."""
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _kib_field(path: Path, key: str) -> int:
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    raise OSError(f"{os.fspath(path)} has no field {key}; the kernel is not supported")
