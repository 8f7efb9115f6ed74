"""Layer 5. `gpuworker generate`: text from a model directory, or from a running worker."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from gpuworker.actor import GPUWorker
from gpuworker.cli.options import Subparsers, add_verb, add_worker_options, worker_config
from gpuworker.cli.output import print_json, working
from gpuworker.cli.session import add_key_options, add_session_options, check_free, client_keys
from gpuworker.config import LimitsConfig, WorkerConfig
from gpuworker.engine import Engine, StreamDecoder, Tokenizer, WorkerLike, bring_up
from gpuworker.errors import ConfigError
from gpuworker.ipc import connect
from gpuworker.model.hub import resolve_model
from gpuworker.step import SamplingParams

__all__ = ["Answer", "add_parser", "stream_answer"]

_MAX_NUM_SEQS = 8
_MAX_NUM_BATCHED_TOKENS = 512


class Answer(msgspec.Struct, frozen=True):
    """One generated text, and how long it took."""

    prompt: str
    num_prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: str
    ttft_s: float
    """Time to the first token."""
    decode_tokens_per_s: float
    """Rate after the first token; 0 when there is only one."""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "generate",
        help="generate text",
        description=(
            "Generate text from prompts, embedded: a worker in this process, the reference engine\n"
            "on top. With --endpoint a running worker is used, and brought up where needed."
        ),
        examples=(
            '  gpuworker generate ~/models/SmolLM2-135M-Instruct "What is the sea?"\n'
            '  gpuworker generate DIR "Once upon a time" --raw --temperature 0.8 --seed 7\n'
            "  cat prompts.txt | gpuworker generate DIR - --json\n"
            '  gpuworker generate DIR "Hello" --endpoint ipc:///tmp/w/rank0'
        ),
    )
    parser.add_argument("model", metavar="DIR_OR_REPO", help="model (or tokenizer) directory")
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="- reads a line each")
    parser.add_argument("--endpoint", help="a running worker instead of one in this process")
    parser.add_argument(
        "--raw", action="store_true", help="do not wrap the prompt in the chat template"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="default: %(default)s")
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="default: %(default)s, which is greedy"
    )
    parser.add_argument("--top-k", type=int, default=0, help="default: %(default)s, which is off")
    parser.add_argument("--top-p", type=float, default=1.0, help="default: %(default)s")
    parser.add_argument("--min-p", type=float, default=0.0, help="default: %(default)s")
    parser.add_argument("--sample-seed", type=int, metavar="N", help="same seed, same text")
    parser.add_argument(
        "--stop-token",
        type=int,
        action="append",
        metavar="ID",
        help="ends a text; default: the model's own",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document per prompt")
    add_session_options(parser)
    add_key_options(parser)
    add_worker_options(parser)
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    prompts = list(_prompts(arguments.prompts))
    if not prompts:
        raise ConfigError("there is no prompt; give one, or - and lines on stdin")
    directory = resolve_model(arguments.model, arguments.revision)
    tokenizer = Tokenizer.from_directory(directory)
    sampling = SamplingParams(
        temperature=arguments.temperature,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        seed=arguments.sample_seed,
    )
    asyncio.run(_generate(arguments, directory, tokenizer, sampling, prompts))
    return 0


def _prompts(given: list[str]) -> list[str]:
    if given == ["-"]:
        return [line.rstrip("\n") for line in sys.stdin if line.strip()]
    return given


async def _generate(
    arguments: argparse.Namespace,
    directory: Path,
    tokenizer: Tokenizer,
    sampling: SamplingParams,
    prompts: list[str],
) -> None:
    chat = tokenizer.has_chat_template and not arguments.raw
    async with _worker(arguments, directory) as worker:
        with working("bringing the worker up", quiet=arguments.json):
            await bring_up(worker)
        async with Engine(worker) as engine:

            async def answer(prompt: str, *, echo: bool) -> Answer:
                return await stream_answer(
                    engine,
                    tokenizer,
                    prompt,
                    chat=chat,
                    sampling=sampling,
                    max_tokens=arguments.max_tokens,
                    stop_token_ids=arguments.stop_token,
                    echo=echo,
                )

            if len(prompts) == 1 and not arguments.json:
                await answer(prompts[0], echo=True)
                return
            for result in await asyncio.gather(*(answer(p, echo=False) for p in prompts)):
                if arguments.json:
                    print_json(msgspec.to_builtins(result))
                else:
                    print(f"> {result.prompt}\n{result.text}\n")


async def stream_answer(
    engine: Engine,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    chat: bool,
    sampling: SamplingParams,
    max_tokens: int,
    stop_token_ids: list[int] | None = None,
    echo: bool = False,
) -> Answer:
    """Generate the answer to a prompt; echo writes the text to stdout as it comes."""
    prompt_token_ids = (
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        if chat
        else tokenizer.encode(prompt)
    )
    decoder = StreamDecoder(tokenizer)
    token_ids: list[int] = []
    text = finish_reason = ""
    started = first = last = time.perf_counter()
    async for delta in engine.generate(
        prompt_token_ids,
        sampling=sampling,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
    ):
        last = time.perf_counter()
        first = first if token_ids else last
        token_ids += delta.token_ids
        piece = decoder.push(delta.token_ids)
        if delta.finish_reason is not None:
            finish_reason = delta.finish_reason
            piece += decoder.flush()
        text += piece
        if echo:
            print(piece, end="", flush=True)
    if echo:
        print()
    return Answer(
        prompt=prompt,
        num_prompt_tokens=len(prompt_token_ids),
        token_ids=token_ids,
        text=text,
        finish_reason=finish_reason,
        ttft_s=first - started,
        decode_tokens_per_s=(len(token_ids) - 1) / (last - first) if last > first else 0.0,
    )


@asynccontextmanager
async def _worker(arguments: argparse.Namespace, directory: Path) -> AsyncIterator[WorkerLike]:
    if arguments.endpoint is not None:
        await asyncio.to_thread(check_free, arguments)
        async with connect(
            arguments.endpoint,
            epoch=arguments.epoch,
            client="gpuworker generate",
            keys=client_keys(arguments),
        ) as remote:
            yield remote
        return
    async with GPUWorker(_config(arguments, directory)) as worker:
        yield worker


def _config(arguments: argparse.Namespace, directory: Path) -> WorkerConfig:
    """Limits for one person's prompts where none are given: a server's cost memory."""
    options: dict[str, Any] = {**vars(arguments), "model": str(directory)}
    config = worker_config(argparse.Namespace(**options))
    if config.limits == LimitsConfig():
        limits = LimitsConfig(
            max_num_seqs=_MAX_NUM_SEQS, max_num_batched_tokens=_MAX_NUM_BATCHED_TOKENS
        )
        config = msgspec.structs.replace(config, limits=limits)
    return config
