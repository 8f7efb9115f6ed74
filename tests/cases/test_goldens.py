"""SmolLM2-135M-Instruct answers the six golden prompts token by token in float32."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.cli.demo_model import ensure_demo_model
from gpuworker.config import LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.engine import Engine, Tokenizer, bring_up
from gpuworker.errors import CheckpointNotFound
from gpuworker.step import SamplingParams

GOLDENS = json.loads((Path(__file__).parent / "smollm2_goldens.json").read_text())["cases"]

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    try:
        return ensure_demo_model()
    except CheckpointNotFound as error:
        pytest.skip(f"the model cannot be fetched: {error}")


async def _generate(engine: Engine, case: dict[str, list[int]]) -> list[int]:
    token_ids: list[int] = []
    async for delta in engine.generate(
        case["prompt_token_ids"],
        sampling=SamplingParams(temperature=0.0),
        max_tokens=len(case["greedy_token_ids"]),
    ):
        token_ids += delta.token_ids
    return token_ids


@pytest.mark.timeout(300)
async def test_the_six_golden_answers_survive_batching_sleep_and_reload(smollm2: Path) -> None:
    config = WorkerConfig(
        model=ModelConfig(model=str(smollm2), dtype="float32", max_model_len=512),
        # Prompts of 35 to 40 tokens are computed in chunks of at most 32, mixed with decodes.
        limits=LimitsConfig(max_num_seqs=6, max_num_batched_tokens=32),
    )
    tokenizer = Tokenizer.from_directory(smollm2)
    async with GPUWorker(config) as worker:
        await bring_up(worker)
        async with Engine(worker) as engine:
            together = await asyncio.gather(*(_generate(engine, case) for case in GOLDENS))
            for case, token_ids in zip(GOLDENS, together, strict=True):
                chat = [{"role": "user", "content": case["prompt"]}]
                assert tokenizer.apply_chat_template(chat) == case["prompt_token_ids"]
                assert token_ids == case["greedy_token_ids"], case["prompt"]
                assert tokenizer.decode(token_ids, skip_special_tokens=False) == case["text"]

            before = (await worker.ask(m.GetStatus())).process_bytes
            held = sum(use.resident_bytes for use in (await worker.ask(m.GetStatus())).memory)
            await engine.sleep(level=1)
            asleep = (await worker.ask(m.GetStatus())).process_bytes
            assert before - asleep >= 0.9 * held
            await engine.wake_up()
            assert (await worker.ask(m.GetStatus())).process_bytes - asleep >= 0.9 * held
            assert await _generate(engine, GOLDENS[0]) == GOLDENS[0]["greedy_token_ids"]

            await engine.sleep(level=2)
            await worker.ask(m.ResumePools(tags=("weights",)))
            await worker.ask(m.ReloadWeights())
            await engine.wake_up()
            assert await _generate(engine, GOLDENS[0]) == GOLDENS[0]["greedy_token_ids"]
            alone = [await _generate(engine, case) for case in GOLDENS[1:3]]
            assert alone == [case["greedy_token_ids"] for case in GOLDENS[1:3]]
