"""Layer 5. `gpuworker demo`: the whole lifecycle on a real model, over ZeroMQ, in one command."""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import msgspec

from gpuworker import messages as m
from gpuworker.cli.demo_report import DemoResult, Residency, Show
from gpuworker.cli.generate import Answer, stream_answer
from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.cli.output import print_json
from gpuworker.config import CacheConfig, DeviceConfig, LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.engine import Engine, Tokenizer, bring_up
from gpuworker.errors import CheckpointNotFound, ConfigError
from gpuworker.ipc import RemoteWorker, connect
from gpuworker.launch import WorkerProcess
from gpuworker.model.hub import resolve_model
from gpuworker.step import SamplingParams

__all__ = ["add_parser"]

_KV_CACHE_BYTES = 256 << 20
"""Enough for questions; what the profile leaves would be half of the machine."""
_PROMPT = "What is the capital of France?"


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "demo",
        help="the whole lifecycle on a real model",
        description=(
            "Fetch SmolLM2-135M-Instruct once, start a worker as a process of its own, lead it\n"
            "through every state over ZeroMQ, stream an answer, put it to sleep and wake it, and\n"
            "check that it answers the same. Without a network a generated tiny model is used."
        ),
        examples=(
            "  gpuworker demo\n"
            "  gpuworker demo --prompt 'Name a river.' --dtype bfloat16\n"
            "  gpuworker demo --model ~/models/Qwen3-0.6B --json"
        ),
    )
    parser.add_argument("--model", metavar="DIR_OR_REPO", help="another model")
    parser.add_argument("--prompt", default=_PROMPT, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="float32",
        help="default: %(default)s, in which answers are exact",
    )
    parser.add_argument("--num-threads", type=int, metavar="N", help="compute threads")
    parser.add_argument("--offline", action="store_true", help="use the generated tiny model")
    parser.add_argument("--cache-dir", type=Path, metavar="DIR", help="where the model is kept")
    parser.add_argument("--json", action="store_true", help="one JSON document, nothing else")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    show = Show(quiet=arguments.json)
    with ExitStack() as stack:
        directory = _model(arguments, show, stack)
        result = asyncio.run(_demo(arguments, directory, show))
    if arguments.json:
        print_json(msgspec.to_builtins(result))
    else:
        show.summary(result)
    return 0 if result.passed else 1


def _model(arguments: argparse.Namespace, show: Show, stack: ExitStack) -> Path:
    if arguments.model is not None:
        return resolve_model(arguments.model, None)
    # These two need the extra gpuworker[demo]; a model of one's own does not.
    try:
        from gpuworker.cli.demo_model import ensure_demo_model
        from gpuworker.cli.tiny_model import make_tiny_model
    except ImportError as error:
        raise ConfigError(
            f"the demo's model needs the package {error.name}: pip install 'gpuworker[demo]', or "
            "name a model of your own with --model"
        ) from error
    if not arguments.offline:
        try:
            with show.working("looking for SmolLM2-135M-Instruct") as say:
                return ensure_demo_model(arguments.cache_dir, say)
        except CheckpointNotFound as error:
            show.note(f"SmolLM2 cannot be fetched: {error}")
    show.note(
        "using a tiny generated model with random weights: every state is real, the text is noise"
    )
    return make_tiny_model(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "tiny")


async def _demo(arguments: argparse.Namespace, directory: Path, show: Show) -> DemoResult:
    tokenizer = Tokenizer.from_directory(directory)
    config = WorkerConfig(
        model=ModelConfig(model=str(directory), dtype=arguments.dtype),
        device=DeviceConfig(num_threads=arguments.num_threads),
        cache=CacheConfig(kv_cache_memory_bytes=_KV_CACHE_BYTES),
        limits=LimitsConfig(max_num_seqs=4, max_num_batched_tokens=256),
    )
    result = DemoResult(model=directory.name, prompt=arguments.prompt, dtype=arguments.dtype)
    process = WorkerProcess(config)
    with show.working("starting a worker process"):
        await process.__aenter__()
    try:
        result.endpoint = process.endpoint
        show.note(f"worker process {process.pid} on {process.endpoint}")
        async with connect(process.endpoint, client="gpuworker demo") as worker:
            await _drive(worker, tokenizer, arguments, show, result)
    finally:
        await process.stop()
    return result


async def _drive(
    worker: RemoteWorker,
    tokenizer: Tokenizer,
    arguments: argparse.Namespace,
    show: Show,
    result: DemoResult,
) -> None:
    with show.states() as add_state:
        await bring_up(worker, on_step=lambda step: add_state(result.add_state(step)))
    async with Engine(worker) as engine:

        async def answer(title: str) -> Answer:
            show.title(title)
            return await stream_answer(
                engine,
                tokenizer,
                arguments.prompt,
                chat=tokenizer.has_chat_template,
                sampling=SamplingParams(temperature=0.0),
                max_tokens=arguments.max_tokens,
                echo=not arguments.json,
            )

        result.first = await answer(f"> {arguments.prompt}")
        levels: tuple[Literal[1, 2], ...] = (1, 2)
        for level in levels:
            report = await _sleep_and_wake(worker, engine, level, show)
            report.answer = await answer("the same question again")
            result.sleeps.append(report)
    result.judge()


async def _sleep_and_wake(
    worker: RemoteWorker, engine: Engine, level: Literal[1, 2], show: Show
) -> Residency:
    before = await worker.ask(m.GetStatus())
    with show.working(f"falling asleep, level {level}"):
        asleep = await engine.sleep(level)
    during = await worker.ask(m.GetStatus())
    with show.working("waking up"):
        if during.weights != "defined":
            await worker.ask(m.ResumePools(tags=("weights",)))
            reloaded = await worker.ask(m.ReloadWeights())
            load_s = reloaded.load_s
        else:
            load_s = 0.0
        awake = await engine.wake_up()
    after = await worker.ask(m.GetStatus())
    report = Residency(
        level=level,
        sleep_s=asleep.sleep_s,
        reload_s=load_s,
        wake_s=awake.wake_s,
        process_bytes_before=before.process_bytes,
        process_bytes_asleep=during.process_bytes,
        process_bytes_after=after.process_bytes,
        arena_bytes_before=sum(use.resident_bytes for use in before.memory),
        arena_bytes_asleep=sum(use.resident_bytes for use in during.memory),
        arena_bytes_after=sum(use.resident_bytes for use in after.memory),
    )
    show.residency(report)
    return report
