"""From nothing to serving: seconds and bytes of each message."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from benchmarks.models import add_model_options, model_directory, worker_config
from benchmarks.report import Report, benchmark_parser, median
from gpuworker.actor import GPUWorker
from gpuworker.config import WorkerConfig
from gpuworker.engine import BringUpStep, bring_up
from gpuworker.messages import message_tag


async def _once(config: WorkerConfig) -> list[BringUpStep]:
    steps: list[BringUpStep] = []
    async with GPUWorker(config) as worker:
        await bring_up(worker, on_step=steps.append)
    return steps


def main() -> None:
    """Run the benchmark."""
    parser = benchmark_parser(__doc__ or "")
    add_model_options(parser)
    arguments = parser.parse_args()
    report = Report("bring_up", arguments.output)
    directory = model_directory(arguments)
    config = worker_config(
        directory,
        dtype="float32",
        num_threads=arguments.num_threads,
        max_num_seqs=32,
        max_model_len=512,
        kv_cache_memory_bytes=256 << 20,
    )
    seconds: dict[str, list[float]] = defaultdict(list)
    last: dict[str, BringUpStep] = {}
    whole: list[float] = []
    for _ in range(1 if arguments.quick else 5):
        steps = asyncio.run(_once(config))
        whole.append(sum(step.seconds for step in steps))
        for step in steps:
            name = message_tag(type(step.request).__name__)
            seconds[name].append(step.seconds)
            last[name] = step
    for name, samples in seconds.items():
        status = last[name].status
        report.figure(
            "time to answer",
            median(samples),
            "s",
            samples=samples,
            message=name,
            state=status.state,
            resident_bytes=sum(use.resident_bytes for use in status.memory),
            process_bytes=status.process_bytes,
            model=directory.name,
        )
    report.figure("time to serving", median(whole), "s", samples=whole, model=directory.name)


if __name__ == "__main__":
    main()
