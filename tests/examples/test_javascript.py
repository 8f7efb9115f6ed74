"""A scheduler in another language, which shares no code with ours, drives a real worker."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

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
from gpuworker.launch import WorkerProcess
from gpuworker.lifecycle import State
from gpuworker.step import SamplingParams
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


async def _run(node: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return await asyncio.to_thread(
        subprocess.run,
        [node, str(EXAMPLE / "scheduler.mjs"), *arguments],
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


async def test_a_refusal_is_printed_by_its_code(tiny_model: Path) -> None:
    node = _node()
    async with WorkerProcess(tiny_config(tiny_model)) as process:
        result = await _run(node, process.endpoint, json.dumps([10**9]), "4")
    assert result.returncode == 1
    assert "refused" in result.stderr
