"""A scheduler in another language, which shares no code with ours, drives a real worker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from gpuworker import messages as m
from gpuworker.cli.demo_model import ensure_demo_model
from gpuworker.config import (
    CacheConfig,
    DeviceConfig,
    LimitsConfig,
    ModelConfig,
    WorkerConfig,
)
from gpuworker.engine import Engine
from gpuworker.engine.bring_up import bring_up
from gpuworker.errors import CheckpointError, ConnectionLost
from gpuworker.ipc import connect
from gpuworker.ipc.vectors import protocol_vectors
from gpuworker.launch import WorkerProcess
from gpuworker.lifecycle import State
from gpuworker.step import SamplingParams
from ipc_serving import raw_router
from real_worker import real_worker, tiny_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "javascript"
REQUIRED = os.environ.get("GPUWORKER_REQUIRE_JAVASCRIPT", "") == "1"
PROMPT = [7, 8, 9, 10, 11]
# The demo's question in the model's chat template, and its answer (tests/cases has the goldens).
CAPITAL = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531,
    198,
]  # fmt: skip
PARIS = [504, 3575, 282, 4649, 314, 7042, 30, 2]


def _node() -> str:
    node = shutil.which("node")
    missing = "node" if node is None else ""
    if not missing and not (EXAMPLE / "node_modules" / "zeromq").is_dir():
        missing = "its packages (npm ci --ignore-scripts in examples/javascript)"
    if missing and REQUIRED:
        pytest.fail(f"the JavaScript example needs {missing}")
    if missing:
        pytest.skip(f"the JavaScript example needs {missing}")
    assert node is not None
    return node


async def _run(
    node: str, *arguments: str, script: str = "scheduler.mjs"
) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [node, str(EXAMPLE / script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


async def _drive(
    node: str, config: WorkerConfig, prompt: Sequence[int], count: int
) -> dict[str, list[int]]:
    async with WorkerProcess(config) as process:
        result = await _run(node, process.endpoint, json.dumps(list(prompt)), str(count))
        assert (result.returncode, result.stderr) == (0, "")
        assert await process.wait() == 0  # it was shut down in order
    return json.loads(result.stdout)


async def test_it_generates_what_the_reference_engine_does(tiny_model: Path) -> None:
    node = _node()
    config = tiny_config(tiny_model)
    generated = await _drive(node, config, PROMPT, 12)
    expected: list[int] = []
    async with real_worker(config, State.SERVING) as worker, Engine(worker) as engine:
        greedy = SamplingParams(temperature=0.0)
        async for delta in engine.generate(PROMPT, sampling=greedy, max_tokens=12):
            expected += delta.token_ids
    assert generated["before"] == generated["after"] == expected


async def test_it_gives_the_answer_of_the_demo() -> None:
    node = _node()
    try:
        directory = ensure_demo_model()
    except CheckpointError as error:
        pytest.skip(f"the demo's model cannot be fetched: {error}")
    config = WorkerConfig(
        model=ModelConfig(model=str(directory)),
        device=DeviceConfig(num_threads=1),
        cache=CacheConfig(block_size=16),
        limits=LimitsConfig(max_num_seqs=4, max_num_batched_tokens=256),
    )
    generated = await _drive(node, config, CAPITAL, len(PARIS))
    assert generated["before"] == generated["after"] == PARIS


async def test_it_takes_over_a_worker_that_serves(tiny_model: Path) -> None:
    node = _node()
    async with (
        WorkerProcess(tiny_config(tiny_model)) as process,
        connect(process.endpoint, epoch=41) as before,
    ):
        await bring_up(before)
        result = await _run(node, process.endpoint, json.dumps(PROMPT), "4")
        assert result.returncode == 0, result.stderr
        with pytest.raises(ConnectionLost):  # it shut the worker down, too
            await before.ask(m.ExecuteDummyBatch())


async def test_it_reads_the_prompt_from_a_file(tiny_model: Path, tmp_path: Path) -> None:
    node = _node()
    prompt = tmp_path / "prompt.json"
    prompt.write_text(json.dumps(PROMPT))
    async with WorkerProcess(tiny_config(tiny_model)) as process:
        result = await _run(node, process.endpoint, str(prompt), "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(json.loads(result.stdout)["before"]) == 2


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([10**9], "outside the vocabulary"),  # this request is refused
        ([7] * 65, "max_num_batched_tokens is 64"),  # the step, and the one behind it is aborted
    ],
)
async def test_a_refusal_is_printed_by_its_code(
    tiny_model: Path, prompt: list[int], reason: str
) -> None:
    node = _node()
    async with WorkerProcess(tiny_config(tiny_model)) as process:
        result = await _run(node, process.endpoint, json.dumps(prompt), "4")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("invalid_request: ")
    assert reason in result.stderr
    assert result.stderr.count("\n") == 1


async def test_it_ends_when_the_worker_goes_away() -> None:
    node = _node()
    with raw_router() as (router, endpoint):
        run = asyncio.create_task(_run(node, endpoint, json.dumps(PROMPT)))
        await asyncio.to_thread(router.recv_multipart)
        router.close(linger=0)
        result = await run
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == "connection_lost: the worker went away\n"


async def test_another_msgpack_reads_the_byte_examples_and_writes_the_same_headers(
    tmp_path: Path,
) -> None:
    node = _node()
    vectors = protocol_vectors()
    current, wrong = tmp_path / "current.json", tmp_path / "wrong.json"
    current.write_bytes(msgspec.json.encode(vectors))
    result = await _run(node, str(current), script="vectors.mjs")
    groups = (group for name, group in vectors.items() if name not in ("version", "refused"))
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{sum(map(len, groups))} examples\n"
    vectors["replies"][0]["body"][1] += 1
    wrong.write_bytes(msgspec.json.encode(vectors))
    result = await _run(node, str(wrong), script="vectors.mjs")
    assert result.returncode == 1
    assert "replies: welcome" in result.stderr
