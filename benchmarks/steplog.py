"""What recording costs a step: the same steps with and without a step log, in turns."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

from benchmarks.report import Report, benchmark_parser
from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.lifecycle import State
from gpuworker.step import NewRequest, StepRow, pack_step
from gpuworker.steplog import FsyncMode, LogWriter, RecordingWorker, header_of
from gpuworker.testing import fake_worker, walk_to

_NUM_REQUESTS = 256
_PROMPT = 512
_BASELINE = "not recorded"
_RECORDED: tuple[FsyncMode, ...] = ("close", "interval", "always")
_Ask = Callable[[m.Request[m.StepOutput]], Awaitable[m.StepOutput]]


def _step(num_new: int) -> m.ExecuteModel:
    """One running request in 16 gets a block; the last num_new are new, with whole prompts."""
    num_running = _NUM_REQUESTS - num_new
    rows = [
        StepRow(slot, 1, 7 * slot, (slot,) if slot % 16 == 0 else ()) for slot in range(num_running)
    ]
    new = []
    for slot in range(num_running, _NUM_REQUESTS):
        rows.append(StepRow(slot, _PROMPT, 0, range(32 * slot, 32 * slot + _PROMPT // 16)))
        new.append(NewRequest(request_id=f"request-{slot}", slot=slot, num_prompt_tokens=_PROMPT))
    tokens = [token % 150_000 for token in range(_PROMPT * num_new)]
    return m.ExecuteModel(
        step_id=1,
        kv_epoch=0,
        num_rows=len(rows),
        num_block_ids=sum(len(row.new_block_ids) for row in rows),
        num_token_ids=len(tokens),
        new_requests=tuple(new),
        buffer=pack_step(rows, tokens),
    )


async def _us_per_step(ask: _Ask, step: m.ExecuteModel, num_steps: int) -> float:
    started = time.perf_counter()
    for number in range(num_steps):
        await ask(msgspec.structs.replace(step, step_id=number))
    return (time.perf_counter() - started) / num_steps * 1e6


async def _measure(report: Report, worker: GPUWorker, num_rounds: int, num_steps: int) -> None:
    for num_new in (0, 8):
        step = _step(num_new)
        with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
            asks: dict[str, _Ask] = {_BASELINE: worker.ask}
            for fsync in _RECORDED:
                log = stack.enter_context(closing(LogWriter(Path(directory) / fsync, fsync=fsync)))
                log.begin(header_of(worker.config))
                asks[f"recorded, fsync {fsync}"] = RecordingWorker(worker, log).ask
            rounds: dict[str, list[float]] = {name: [] for name in asks}
            for _ in range(num_rounds):
                for name, ask in asks.items():
                    rounds[name].append(await _us_per_step(ask, step, num_steps))
            report.compare(
                "one step, there and back",
                rounds,
                "us",
                baseline=_BASELINE,
                num_requests=_NUM_REQUESTS,
                num_new=num_new,
            )
            size = (Path(directory) / "close").stat().st_size
            report.figure(
                "size of the log",
                size / (num_rounds * num_steps),
                "bytes/step",
                num_requests=_NUM_REQUESTS,
                num_new=num_new,
            )


async def _run(report: Report, num_rounds: int, num_steps: int) -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        await _measure(report, worker, num_rounds, num_steps)


def main() -> None:
    """Run the benchmark."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    rounds, steps = (2, 20) if arguments.quick else (9, 500)
    asyncio.run(_run(Report("steplog", arguments.output), rounds, steps))


if __name__ == "__main__":
    main()
