"""Sleep and wake: seconds, bytes that really went, and the speed of the copies."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from typing import Literal

from benchmarks.models import add_model_options, model_directory, worker_config
from benchmarks.report import Report, benchmark_parser, median
from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import WorkerConfig
from gpuworker.engine import bring_up

Row = dict[str, float]


async def _cycles(config: WorkerConfig, num_cycles: int) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = defaultdict(list)
    async with GPUWorker(config) as worker:
        await bring_up(worker)

        async def resident_bytes() -> int:
            return sum(u.resident_bytes for u in (await worker.ask(m.GetStatus())).memory)

        async def take(name: str, request: m.Request[m.ReplyT]) -> tuple[m.ReplyT, Row]:
            """Ask, and note the seconds that the asker waits and the bytes that went or came."""
            before = await resident_bytes()
            started = time.perf_counter()
            reply = await worker.ask(request)
            row: Row = {"seconds": time.perf_counter() - started}
            change = await resident_bytes() - before
            if isinstance(request, m.Sleep):
                row["freed_bytes"] = -change
            else:
                row["back_bytes"] = change
            found[name].append(row)
            return reply, row

        async def sleep(name: str, level: Literal[1, 2]) -> None:
            asleep, row = await take(name, m.Sleep(level=level))
            row["freed_process_bytes"] = asleep.freed_bytes
            row["copied_bytes"] = asleep.spilled_bytes

        for _ in range(num_cycles):
            await worker.ask(m.ReloadWeights())  # a new version: the kept copy is void
            await sleep("level 1, changed weights", 1)
            await take("wake from level 1", m.WakeUp())
            await sleep("level 1, unchanged weights", 1)
            await take("wake from level 1", m.WakeUp())
            await sleep("level 2", 2)
            _, resumed = await take("level 2: weight memory back", m.ResumePools(tags=("weights",)))
            reply, reloaded = await take("level 2: reload", m.ReloadWeights())
            reloaded["copied_bytes"] = reply.weight_bytes
            _, awake = await take("level 2: wake", m.WakeUp())
            parts = (resumed, reloaded, awake)
            found["wake from level 2, in all"].append(
                {
                    "seconds": sum(row["seconds"] for row in parts),
                    "back_bytes": sum(row["back_bytes"] for row in parts),
                    "copied_bytes": reply.weight_bytes,
                }
            )
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
        if moved:  # giving pages back copies nothing and has no bandwidth
            facts["gb_per_s"] = round(moved / median(samples) / 1e9, 2)
        report.figure(name, median(samples), "s", samples=samples, model=directory.name, **facts)


if __name__ == "__main__":
    main()
