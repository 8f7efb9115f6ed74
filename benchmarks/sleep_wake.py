"""Sleep and wake: seconds, bytes that really went, and the speed of the copies."""

from __future__ import annotations

import asyncio
from collections import defaultdict

from benchmarks.models import add_model_options, model_directory, worker_config
from benchmarks.report import Report, benchmark_parser, median
from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import WorkerConfig
from gpuworker.engine import bring_up


async def _cycles(config: WorkerConfig, num_cycles: int) -> dict[str, list[dict[str, float]]]:
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    async with GPUWorker(config) as worker:
        await bring_up(worker)

        async def resident_bytes() -> int:
            return sum(u.resident_bytes for u in (await worker.ask(m.GetStatus())).memory)

        async def sleep(name: str, request: m.Sleep) -> None:
            before = await resident_bytes()
            asleep = await worker.ask(request)
            found[name].append(
                {
                    "seconds": asleep.sleep_s,
                    "freed_bytes": before - await resident_bytes(),
                    "freed_process_bytes": asleep.freed_bytes,
                    "copied_bytes": asleep.spilled_bytes,
                }
            )

        async def wake(name: str) -> None:
            awake = await worker.ask(m.WakeUp())
            found[name].append({"seconds": awake.wake_s, "back_bytes": await resident_bytes()})

        for _ in range(num_cycles):
            await worker.ask(m.ReloadWeights())  # a new version: the kept copy is void
            await sleep("level 1, changed weights", m.Sleep(level=1))
            await wake("wake from level 1")
            await sleep("level 1, unchanged weights", m.Sleep(level=1))
            await wake("wake from level 1")
            await sleep("level 2", m.Sleep(level=2))
            await worker.ask(m.ResumePools(tags=("weights",)))
            reloaded = await worker.ask(m.ReloadWeights())
            found["reload"].append(
                {"seconds": reloaded.load_s, "back_bytes": reloaded.weight_bytes}
            )
            await wake("wake from level 2, weights loaded")
    return found


def main() -> None:
    """Run the benchmark."""
    parser = benchmark_parser(__doc__ or "")
    add_model_options(parser)
    arguments = parser.parse_args()
    report = Report("sleep_wake", arguments.output)
    directory = model_directory(arguments)
    config = worker_config(
        directory,
        dtype="float32",
        num_threads=arguments.num_threads,
        max_num_seqs=32,
        max_model_len=512,
        kv_cache_memory_bytes=256 << 20,
    )
    found = asyncio.run(_cycles(config, 1 if arguments.quick else 7))
    for name, rows in found.items():
        samples = [row["seconds"] for row in rows]
        facts = {key: median(row[key] for row in rows) for key in rows[0] if key != "seconds"}
        moved = facts.get("copied_bytes") or facts.get("back_bytes", 0.0)
        report.figure(
            name,
            median(samples),
            "s",
            samples=samples,
            model=directory.name,
            gb_per_s=round(moved / median(samples) / 1e9, 2),
            **facts,
        )


if __name__ == "__main__":
    main()
