"""Every family from its directory through the whole worker: transformers' greedy tokens."""

from __future__ import annotations

import asyncio

import pytest
import torch

import tiny_models
from gpuworker.actor import GPUWorker
from gpuworker.config import DeviceConfig, LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.engine import Engine, bring_up
from gpuworker.step import SamplingParams

NUM_TOKENS = 32
# Rope that depends on the length is compared in tests/model, for lengths on one side of it.
NAMES = [name for name in tiny_models.MODELS if "dynamic" not in name]


@pytest.mark.parametrize("name", NAMES)
async def test_a_batch_of_mixed_lengths_generates_what_transformers_would(name: str) -> None:
    longest = 30 if "longrope" in name else 60
    generator = torch.Generator().manual_seed(23)
    prompts = [
        torch.randint(3, 160, (length,), generator=generator).tolist()
        for length in (1, 5, 17, longest)
    ]
    config = WorkerConfig(
        model=ModelConfig(model=str(tiny_models.checkpoint(name)), max_model_len=96),
        device=DeviceConfig(num_threads=1),
        # Room for two chunks a step, so that prefill and decode mix.
        limits=LimitsConfig(max_num_seqs=4, max_num_batched_tokens=20),
    )
    async with GPUWorker(config) as worker:
        await bring_up(worker, num_blocks=30)
        async with Engine(worker) as engine:

            async def greedy(prompt: list[int]) -> list[int]:
                tokens: list[int] = []
                async for delta in engine.generate(
                    prompt,
                    sampling=SamplingParams(temperature=0.0),
                    max_tokens=NUM_TOKENS,
                    stop_token_ids=(),
                ):
                    tokens += delta.token_ids
                return tokens

            answers = await asyncio.gather(*map(greedy, prompts))
    model = tiny_models.oracle(name)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer
