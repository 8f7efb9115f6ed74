"""Decode on a CPU: the engine, transformers' generate, and the matmuls alone, in one run.

All three use the same weights, type, batch, number of threads, and the same thread: OpenMP keeps a
pool per thread that computes, and with more pool threads than cores its workers sleep between
operations instead of spinning, which costs everybody a third. The floor multiplies what a decode
step multiplies (the merged projections of every layer and the head) and nothing else. Its ratio
says how much of a step is not matmul.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from benchmarks.models import add_model_options, model_directory, worker_config
from benchmarks.report import Report, benchmark_parser, median
from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import DType
from gpuworker.engine import Engine, bring_up
from gpuworker.step import SamplingParams
from gpuworker.torch_runtime import TorchRuntime

_PROMPT_TOKENS = 100
_NEW_TOKENS = 64
_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_GREEDY = SamplingParams(temperature=0.0)


def _prompts(batch: int, vocab_size: int, salt: int) -> list[list[int]]:
    """Random prompts; another salt makes others, so that no prefix is found in the cache."""
    generator = torch.Generator().manual_seed(1000 * salt + batch)
    return torch.randint(3, vocab_size, (batch, _PROMPT_TOKENS), generator=generator).tolist()


class _Steps:
    """A worker that notes how long each step took on the device."""

    def __init__(self, worker: GPUWorker) -> None:
        self._worker = worker
        self.seconds: list[float] = []

    async def ask(self, request: m.Request[m.ReplyT]) -> m.ReplyT:
        return await self._worker.ask(request)

    def submit(self, request: m.Request[m.ReplyT]) -> asyncio.Future[m.ReplyT]:
        reply = self._worker.submit(request)
        reply.add_done_callback(self._note)
        return reply

    def _note(self, reply: asyncio.Future[m.ReplyT]) -> None:
        if not reply.cancelled() and reply.exception() is None:
            output = reply.result()
            if isinstance(output, m.StepOutput):
                self.seconds.append(output.step_s)


async def _ours(engine: Engine, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """Return the seconds until every prompt has a token, and the decode rate after that."""
    arrivals: list[list[float]] = [[] for _ in prompts]

    async def one(index: int, prompt: list[int]) -> None:
        async for delta in engine.generate(
            prompt, sampling=_GREEDY, max_tokens=new_tokens, stop_token_ids=()
        ):
            arrivals[index] += [time.perf_counter()] * len(delta.token_ids)

    started = time.perf_counter()
    await asyncio.gather(*(one(index, prompt) for index, prompt in enumerate(prompts)))
    all_begun = max(times[0] for times in arrivals)
    later = [moment for times in arrivals for moment in times if moment > all_begun]
    return all_begun - started, len(later) / (max(later) - all_begun)


def _load_peer(directory: Path, dtype: torch.dtype) -> Any:
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa"
    )
    return peer.eval()


def _theirs(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """The same with transformers: one token, then all, so that prefill can be told apart."""
    input_ids = torch.tensor(prompts)

    def generate(num_tokens: int) -> float:
        started = time.perf_counter()
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    first, all_of_them = generate(1), generate(new_tokens)
    return first, len(prompts) * (new_tokens - 1) / (all_of_them - first)


def _floor(worker: GPUWorker, batch: int) -> Callable[[], float]:
    """Return what measures the seconds of one decode step's matmuls."""
    runtime = worker._runtime
    assert isinstance(runtime, TorchRuntime)
    assert runtime._weights is not None
    params = runtime._weights.params
    names = [
        name
        for name, value in params.items()
        if value.ndim == 2 and (name != "embed.weight" or "lm_head.weight" not in params)
    ]
    dtype = params["embed.weight"].dtype
    inputs = {
        params[n].shape[1]: torch.randn(batch, params[n].shape[1], dtype=dtype) for n in names
    }

    def step() -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            for name in names:
                weight = params[name]
                functional.linear(inputs[weight.shape[1]], weight)
        return time.perf_counter() - started

    return step


async def _profile(
    worker: GPUWorker, engine: Engine, batch: int, report: Report, dtype: str
) -> None:
    """Say which operations a decode step spends its time in."""
    vocab_size = engine.limits.vocab_size
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    await worker._device.run(profiler.start)
    await _ours(engine, _prompts(batch, vocab_size, 99), 16)
    await worker._device.run(profiler.stop)
    averages = profiler.key_averages()
    total = sum(row.self_cpu_time_total for row in averages)
    for row in sorted(averages, key=lambda row: -row.self_cpu_time_total)[:14]:
        report.figure(
            "share of the profiled time",
            row.self_cpu_time_total / total,
            "1",
            operation=row.key,
            num_calls=row.count,
            batch=batch,
            dtype=dtype,
        )


async def _measure(
    report: Report, directory: Path, dtype: DType, batches: list[int], options: dict[str, int]
) -> None:
    num_rounds, new_tokens, num_threads = (
        options["num_rounds"],
        options["new_tokens"],
        options["num_threads"],
    )
    config = worker_config(
        directory,
        dtype=dtype,
        num_threads=num_threads,
        max_num_seqs=max(batches),
        max_model_len=_PROMPT_TOKENS + new_tokens + 16,
    )
    async with GPUWorker(config) as worker:
        await bring_up(worker)
        steps = _Steps(worker)
        peer = await worker._device.run(_load_peer, directory, _DTYPES[dtype])
        async with Engine(steps) as engine:
            for batch in batches:
                floor_step = _floor(worker, batch)
                rates: dict[str, list[float]] = {"matmuls alone": [], "gpuworker": []}
                rates[f"transformers {transformers.__version__}"] = []
                prefill: dict[str, list[float]] = {"gpuworker": [], "transformers": []}
                step_s: list[float] = []
                for turn in range(num_rounds + 1):
                    prompts = _prompts(batch, engine.limits.vocab_size, turn)
                    floor = await worker._device.run(
                        lambda: median(floor_step() for _ in range(12))  # noqa: B023
                    )
                    steps.seconds.clear()
                    first, rate = await _ours(engine, prompts, new_tokens)
                    if turn == 0:
                        continue  # everybody's first time
                    step_s.append(median(steps.seconds[-new_tokens // 2 :]))
                    their_first, their_rate = await worker._device.run(
                        _theirs, peer, prompts, new_tokens
                    )
                    for name, value in zip(rates, (batch / floor, rate, their_rate), strict=True):
                        rates[name].append(value)
                    prefill["gpuworker"].append(first)
                    prefill["transformers"].append(their_first)
                facts: dict[str, Any] = {"batch": batch, "dtype": dtype, "num_threads": num_threads}
                report.compare(
                    "decode",
                    rates,
                    "tokens/s",
                    baseline="matmuls alone",
                    model=directory.name,
                    prompt_tokens=_PROMPT_TOKENS,
                    new_tokens=new_tokens,
                    **facts,
                )
                report.compare(
                    "seconds until every prompt has a token",
                    prefill,
                    "s",
                    baseline="gpuworker",
                    prompt_tokens=_PROMPT_TOKENS,
                    **facts,
                )
                matmul_s = batch / median(rates["matmuls alone"])
                between_s = batch / median(rates["gpuworker"]) - median(step_s)
                report.figure("matmuls of a step", matmul_s * 1e3, "ms", **facts)
                report.figure("a step on the device", median(step_s) * 1e3, "ms", **facts)
                report.figure("between two steps", between_s * 1e3, "ms", **facts)
                if options["profile"]:
                    await _profile(worker, engine, batch, report, dtype)


def main() -> None:
    """Run the benchmark."""
    parser = benchmark_parser((__doc__ or "").splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8 and 32")
    parser.add_argument("--dtype", choices=list(_DTYPES), action="append", help="default: both")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    arguments = parser.parse_args()
    report = Report("generation", arguments.output)
    directory = model_directory(arguments)
    torch.set_num_threads(arguments.num_threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options = {
        "num_rounds": 1 if arguments.quick else 3,
        "new_tokens": 8 if arguments.quick else _NEW_TOKENS,
        "num_threads": arguments.num_threads,
        "profile": arguments.profile,
    }
    batches = arguments.batch or ([1, 2] if arguments.quick else [1, 8, 32])
    for dtype in arguments.dtype or list(_DTYPES):
        asyncio.run(_measure(report, directory, dtype, batches, options))


if __name__ == "__main__":
    main()
