"""How long the device waits between steps, by the number of steps in flight."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import subprocess
import sys
import time
from collections import deque
from typing import Any

from benchmarks.report import Report, benchmark_parser, median, percentile
from gpuworker import messages as m
from gpuworker.config import LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.ipc import Server, connect, default_endpoint
from gpuworker.lifecycle import State
from gpuworker.testing import FakeRuntime, empty_step, fake_worker, walk_to

_DEPTHS = (1, 2, 3, 4)
_CONFIG = WorkerConfig(model=ModelConfig(model="fake"), limits=LimitsConfig(window=max(_DEPTHS)))


def _work(seconds: float) -> None:
    """Be a scheduler that computes, without releasing the interpreter."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


async def _schedule(endpoint: str, depth: int, num_steps: int, scheduler_s: float) -> None:
    in_flight: deque[asyncio.Future[m.StepOutput]] = deque()
    async with connect(endpoint) as worker:
        for step_id in range(num_steps):
            if len(in_flight) == depth:
                await in_flight.popleft()
            _work(scheduler_s)
            in_flight.append(worker.submit(empty_step(step_id)))
            await asyncio.sleep(0)  # let the client send it
        await asyncio.gather(*in_flight)


async def _gaps_ms(depth: int, step_s: float, scheduler_s: float, num_steps: int) -> list[float]:
    """Serve here, schedule in another process, and note when the device has nothing to do."""
    spans: list[tuple[float, float]] = []

    def compute(step: m.ExecuteModel) -> None:
        started = time.perf_counter()
        time.sleep(step_s)  # as a kernel does, without the interpreter lock
        spans.append((started, time.perf_counter()))

    async with fake_worker(_CONFIG) as worker:
        await walk_to(worker, State.SERVING)
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)
        runtime.before_step = compute
        ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        server = asyncio.create_task(Server(worker, default_endpoint()).run(ready.set_result))
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "benchmarks.step_pipeline", "--schedule", await ready,
            str(depth), str(num_steps), str(scheduler_s),
        )  # fmt: skip
        if await child.wait():
            raise subprocess.CalledProcessError(child.returncode or 1, "the scheduler")
        server.cancel()
        await asyncio.wait([server])
    ordered = spans[2:]  # the first ones fill the pipeline
    return [(b[0] - a[1]) * 1e3 for a, b in itertools.pairwise(ordered)]


def main() -> None:
    """Run the benchmark."""
    parser = benchmark_parser(__doc__ or "")
    parser.add_argument("--schedule", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.schedule is not None:
        endpoint, depth, num_steps, scheduler_s = arguments.schedule
        asyncio.run(_schedule(endpoint, int(depth), int(num_steps), float(scheduler_s)))
        return
    report = Report("step_pipeline", arguments.output)
    num_rounds, num_steps = (1, 12) if arguments.quick else (5, 40)
    cases = [(0.005, 0.0), (0.005, 0.002), (0.02, 0.0), (0.02, 0.002)]
    for step_s, scheduler_s in cases[:1] if arguments.quick else cases:
        rounds: dict[str, list[float]] = {f"depth {depth}": [] for depth in _DEPTHS}
        all_gaps: dict[str, list[float]] = {variant: [] for variant in rounds}
        for _ in range(num_rounds):
            for depth, variant in zip(_DEPTHS, rounds, strict=True):
                gaps = asyncio.run(_gaps_ms(depth, step_s, scheduler_s, num_steps))
                rounds[variant].append(median(gaps))
                all_gaps[variant] += gaps
        case: dict[str, Any] = {"step_ms": step_s * 1e3, "scheduler_ms": scheduler_s * 1e3}
        report.compare("idle gap of the device", rounds, "ms", baseline="depth 1", **case)
        for variant, gaps in all_gaps.items():
            report.figure(
                "idle gap of the device p99", percentile(gaps, 99), "ms", variant=variant, **case
            )


if __name__ == "__main__":
    main()
