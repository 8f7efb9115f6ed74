"""Decode on a CPU: the engine, transformers' generate, and the matmuls alone, in one run.

All three use the same weights, type, batch, number of threads, and the same thread: OpenMP keeps a
pool per thread that computes, and with more pool threads than cores its workers sleep between
operations instead of spinning, which costs everybody a third. The floor multiplies what a decode
step multiplies (the merged projections of every layer and the head) and nothing else. Its ratio
says how much of a step is not matmul, as long as torch's matmul is the best there is; where it is
not, the engine multiplies otherwise, and "matmuls as the engine does them" is the second floor.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from benchmarks.models import add_model_options, model_directory, worker_config
from benchmarks.report import OtherLoad, Report, benchmark_parser, median
from benchmarks.step_parts import clocked_steps
from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import DType
from gpuworker.engine import Engine, bring_up
from gpuworker.kernels.linear import Linear
from gpuworker.step import SamplingParams
from gpuworker.torch_runtime import TorchRuntime

_PROMPT_TOKENS = 100
_NEW_TOKENS = 64
_DTYPES: dict[DType, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FLOOR_STEPS = 12
_FLOOR = "matmuls alone"
_OURS = "gpuworker"
_THEIRS = f"transformers {transformers.__version__}"
_Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_GREEDY = SamplingParams(temperature=0.0)


def _prompts(batch: int, vocab_size: int, salt: int) -> list[list[int]]:
    """Random prompts; another salt makes others, so that no prefix is found in the cache."""
    generator = torch.Generator().manual_seed(1000 * salt + batch)
    return torch.randint(3, vocab_size, (batch, _PROMPT_TOKENS), generator=generator).tolist()


class _Steps:
    """A worker that notes the rows of each step and how long it took on the device."""

    def __init__(self, worker: GPUWorker) -> None:
        self._worker = worker
        self.noted: list[tuple[int, float]] = []

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
                self.noted.append((output.num_rows, output.step_s))

    def decode_s(self, batch: int) -> float:
        """Return the median seconds of the steps with every row, nearly all of them decodes."""
        return median(seconds for num_rows, seconds in self.noted if num_rows == batch)


def _steady(arrivals: list[list[float]], new_tokens: int) -> tuple[float, float]:
    """Return when every prompt had a token, and the rate until the first one was finished.

    In between every step computes one token of each, which is what the floor computes.
    """
    if any(len(times) != new_tokens for times in arrivals):
        raise RuntimeError(f"{new_tokens} tokens were asked for, {[*map(len, arrivals)]} came")
    begin, end = max(times[0] for times in arrivals), min(times[-1] for times in arrivals)
    num_tokens = sum(begin < moment <= end for times in arrivals for moment in times)
    return begin, num_tokens / (end - begin)


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
    all_begun, rate = _steady(arrivals, new_tokens)
    return all_begun - started, rate


def _load_peer(directory: Path, dtype: torch.dtype) -> Any:
    peer: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="sdpa"
    )
    # No stop tokens: everybody generates as many as were asked for.
    peer.generation_config.eos_token_id = None
    return peer.eval()


class _Moments(transformers.StoppingCriteria):
    """Never stops, but is asked after every token."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(
        self, input_ids: torch.LongTensor, scores: Any, **keywords: Any
    ) -> torch.BoolTensor:
        self.moments.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)  # type: ignore[return-value]


def _theirs(model: Any, prompts: list[list[int]], new_tokens: int) -> tuple[float, float]:
    """The same with transformers, whose prompts all get a token at the same time."""
    input_ids = torch.tensor(prompts)
    moments = _Moments()
    started = time.perf_counter()
    tokens = model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        max_new_tokens=new_tokens,
        do_sample=False,
        use_cache=True,
        pad_token_id=0,
        stopping_criteria=[moments],
    )
    if tokens.shape[1] != input_ids.shape[1] + new_tokens:
        raise RuntimeError(f"{new_tokens} tokens were asked for, {tuple(tokens.shape)} came")
    all_begun, rate = _steady([moments.moments] * len(prompts), new_tokens)
    return all_begun - started, rate


def _floor(worker: GPUWorker, batch: int, multiply: _Multiply) -> Callable[[], float]:
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
                multiply(inputs[weight.shape[1]], weight)
        return time.perf_counter() - started

    return lambda: median(step() for _ in range(_FLOOR_STEPS))


async def _profile(
    worker: GPUWorker, engine: Engine, batch: int, report: Report, facts: dict[str, Any]
) -> None:
    """Say where a decode step spends its time: by part of the step, and by operation of torch."""
    vocab_size = engine.limits.vocab_size
    with clocked_steps() as clock:
        await _ours(engine, _prompts(batch, vocab_size, 98), _NEW_TOKENS)
    parts = clock.mean_by_part(batch, _NEW_TOKENS // 2)
    whole_s = sum(parts.values())
    for part, seconds in sorted(parts.items(), key=lambda item: -item[1]):
        share = round(seconds / whole_s, 4)
        report.figure("part of a step", seconds * 1e3, "ms", part=part, share=share, **facts)
    report.figure("a step, clocked", whole_s * 1e3, "ms", **facts)
    profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    await worker._device.run(profiler.start)
    await _ours(engine, _prompts(batch, vocab_size, 99), 16)
    await worker._device.run(profiler.stop)
    averages = profiler.key_averages()
    total = sum(row.self_cpu_time_total for row in averages)
    for row in sorted(averages, key=lambda row: -row.self_cpu_time_total)[:14]:
        report.figure(
            "share of the profiled time, prefill included",
            row.self_cpu_time_total / total,
            "1",
            operation=row.key,
            num_calls=row.count,
            **facts,
        )


@dataclass
class _Rounds:
    """What the rounds of one batch size gave, turn by turn."""

    rates: dict[str, list[float]]
    prefill_s: dict[str, list[float]]
    step_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    other_cores: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class _Options:
    num_rounds: int
    new_tokens: int
    num_threads: int
    profile: bool


async def _measure_batch(
    worker: GPUWorker, steps: _Steps, engine: Engine, peer: Any, batch: int, options: _Options
) -> _Rounds:
    linear = Linear(next(peer.parameters()).dtype, torch.device("cpu"))
    floors = {
        _FLOOR: _floor(worker, batch, functional.linear),
        "matmuls as the engine does them": _floor(worker, batch, linear),
    }
    rates: dict[str, list[float]] = {name: [] for name in (*floors, _OURS, _THEIRS)}
    rounds = _Rounds(rates, {_OURS: [], _THEIRS: []})
    for turn in range(options.num_rounds + 1):
        prompts = _prompts(batch, engine.limits.vocab_size, turn)
        load = OtherLoad()
        found = {name: batch / await worker._device.run(floor) for name, floor in floors.items()}
        steps.noted.clear()
        first_s, found[_OURS] = await _ours(engine, prompts, options.new_tokens)
        their_first_s, found[_THEIRS] = await worker._device.run(
            _theirs, peer, prompts, options.new_tokens
        )
        if turn == 0:
            continue  # everybody's first time
        for name, rate in found.items():
            rates[name].append(rate)
        rounds.prefill_s[_OURS].append(first_s)
        rounds.prefill_s[_THEIRS].append(their_first_s)
        rounds.step_s.append(steps.decode_s(batch))
        rounds.between_s.append(batch / found[_OURS] - rounds.step_s[-1])
        rounds.other_cores.append(load.cores())
    return rounds


async def _measure(
    report: Report, directory: Path, dtype: DType, batches: list[int], options: _Options
) -> None:
    config = worker_config(
        directory,
        dtype=dtype,
        num_threads=options.num_threads,
        max_num_seqs=max(batches),
        max_model_len=_PROMPT_TOKENS + _NEW_TOKENS + 16,
    )
    async with GPUWorker(config) as worker:
        await bring_up(worker)
        steps = _Steps(worker)
        peer = await worker._device.run(_load_peer, directory, _DTYPES[dtype])
        async with Engine(steps) as engine:
            for batch in batches:
                rounds = await _measure_batch(worker, steps, engine, peer, batch, options)
                facts: dict[str, Any] = {
                    "model": directory.name,
                    "batch": batch,
                    "dtype": dtype,
                    "num_threads": options.num_threads,
                    "prompt_tokens": _PROMPT_TOKENS,
                    "new_tokens": options.new_tokens,
                    "other_cores": round(max(rounds.other_cores), 3),
                }
                report.compare("decode", rounds.rates, "tokens/s", baseline=_FLOOR, **facts)
                ours = {name: rounds.rates[name] for name in (_THEIRS, _OURS)}
                report.compare(
                    "decode against transformers", ours, "tokens/s", baseline=_THEIRS, **facts
                )
                report.compare(
                    "seconds until every prompt has a token",
                    rounds.prefill_s,
                    "s",
                    baseline=_THEIRS,
                    **facts,
                )
                for name, seconds in (
                    ("matmuls of a step", [batch / rate for rate in rounds.rates[_FLOOR]]),
                    ("a step on the device", rounds.step_s),
                    ("between two steps", rounds.between_s),
                ):
                    samples = [1e3 * value for value in seconds]
                    report.figure(name, median(samples), "ms", samples=samples, **facts)
                if options.profile:
                    facts["new_tokens"] = _NEW_TOKENS
                    await _profile(worker, engine, batch, report, facts)


def main() -> None:
    """Run the benchmark."""
    parser = benchmark_parser((__doc__ or "").splitlines()[0])
    add_model_options(parser)
    parser.add_argument("--batch", type=int, action="append", help="default: 1, 8 and 32")
    parser.add_argument("--dtype", choices=list(_DTYPES), action="append", help="default: both")
    parser.add_argument("--num-rounds", type=int, help="default: 5, and 1 with --quick")
    parser.add_argument("--profile", action="store_true", help="where the time of a step goes")
    arguments = parser.parse_args()
    report = Report("generation", arguments.output)
    directory = model_directory(arguments)
    torch.set_num_threads(arguments.num_threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    options = _Options(
        num_rounds=arguments.num_rounds or (1 if arguments.quick else 5),
        new_tokens=8 if arguments.quick else _NEW_TOKENS,
        num_threads=arguments.num_threads,
        profile=arguments.profile,
    )
    batches = arguments.batch or ([1, 2] if arguments.quick else [1, 8, 32])
    for dtype in arguments.dtype or list(_DTYPES):
        asyncio.run(_measure(report, directory, dtype, batches, options))


if __name__ == "__main__":
    main()
