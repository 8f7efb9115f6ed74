"""One JSON line per figure, with the machine it was measured on."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpuworker import __version__
from gpuworker.device.proc_memory import ProcMemoryReader

__all__ = [
    "OtherLoad",
    "Report",
    "benchmark_parser",
    "interleave",
    "median",
    "percentile",
    "timed",
]

Parameter = str | int | float | bool | None


class Report:
    """Prints figures, and appends them to a file when one is named."""

    def __init__(self, benchmark: str, output: Path | None) -> None:
        self._benchmark = benchmark
        self._output = output
        self._environment = _environment()

    def figure(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        samples: Sequence[float] = (),
        **parameters: Parameter,
    ) -> None:
        """Emit one figure.

        samples add p10, p50 and p90. The other keywords say what was measured.
        """
        line: dict[str, object] = {
            "benchmark": self._benchmark,
            "figure": name,
            "value": _rounded(value),
            "unit": unit,
            **parameters,
        }
        if samples:
            for percent in (10, 50, 90):
                line[f"p{percent}"] = _rounded(percentile(samples, percent))
            line["num_samples"] = len(samples)
        line |= self._environment
        text = json.dumps(line)
        print(text, flush=True)
        if self._output is not None:
            self._output.parent.mkdir(parents=True, exist_ok=True)
            with self._output.open("a") as file:
                file.write(text + "\n")

    def compare(
        self,
        figure: str,
        rounds: Mapping[str, Sequence[float]],
        unit: str,
        *,
        baseline: str,
        **parameters: Parameter,
    ) -> None:
        """Emit the median of each variant and its median ratio to the baseline, round by round."""
        reference = rounds[baseline]
        for variant, values in rounds.items():
            ratios = [value / other for value, other in zip(values, reference, strict=True)]
            self.figure(
                figure,
                median(values),
                unit,
                samples=values,
                variant=variant,
                baseline=baseline,
                ratio_to_baseline=_rounded(median(ratios)),
                **parameters,
            )


class OtherLoad:
    """Tells how many cores other processes kept busy since it was made.

    Above a few hundredths a figure says as much about the neighbours as about itself. For a
    benchmark that computes in one process: running children count as others.
    """

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self._before = self._others_s()

    def cores(self) -> float:
        """Return the mean number of cores; the counters tick in hundredths of a second."""
        elapsed_s = time.perf_counter() - self._started
        return max(self._others_s() - self._before, 0.0) / elapsed_s

    @staticmethod
    def _others_s() -> float:
        """Return what the machine spent on others: busy and stolen time without our own."""
        ticks = [
            int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
        ]
        idle = ticks[3] + ticks[4]
        own = os.times()
        return (sum(ticks) - idle) / os.sysconf("SC_CLK_TCK") - own.user - own.system


def benchmark_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with what every benchmark takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few rounds: shows that it runs")
    parser.add_argument("--output", type=Path, metavar="FILE", help="also append the lines here")
    return parser


def interleave(
    variants: Mapping[str, Callable[[], float]], num_rounds: int
) -> dict[str, list[float]]:
    """Measure the variants in turn, round after round, so that the machine's moods hit all."""
    rounds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(num_rounds):
        for name, measure in variants.items():
            rounds[name].append(measure())
    return rounds


def timed(call: Callable[[], object], num_calls: int) -> float:
    """Return the seconds per call."""
    started = time.perf_counter()
    for _ in range(num_calls):
        call()
    return (time.perf_counter() - started) / num_calls


def median(values: Iterable[float]) -> float:
    """Return the median."""
    return statistics.median(values)


def percentile(values: Sequence[float], percent: int) -> float:
    """Return a percentile by linear interpolation."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def _environment() -> dict[str, Parameter]:
    cpu = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    memory_gib = ProcMemoryReader().total_bytes() / (1 << 30)
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M"),
        "machine": f"{cpu}, {len(os.sched_getaffinity(0))} cores, {memory_gib:.0f} GiB",
        "python": platform.python_version(),
        "torch": _version("torch"),
        "gpuworker": __version__,
        "commit": _commit(),
        "command": " ".join(
            ["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]]
        ),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit, with -dirty when files differ from it; "" where git knows nothing."""
    try:
        result = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return result.stdout.strip()
