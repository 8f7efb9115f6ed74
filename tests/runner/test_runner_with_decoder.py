"""The runner over the real decoder: tokens as transformers chooses them."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from gpuworker.config import LimitsConfig
from gpuworker.kernels.attention import kv_cache_shape
from gpuworker.kernels.batch import LayerKV
from gpuworker.model.decoder import Decoder
from gpuworker.model.description import describe
from gpuworker.runner.kv_spec import kv_layers
from gpuworker.runner.runner import ModelRunner
from gpuworker.step import SamplingParams
from paged_decoding import load_params
from runner_toys import ToyScheduler

GREEDY = SamplingParams(temperature=0.0)
NUM_BLOCKS = 40
BLOCK_SIZE = 8
PROMPTS = {"a": [3, 14, 15, 92, 65, 35, 89, 79, 32], "b": [27], "c": [18, 28, 18, 28, 45, 90]}


def runner_of(name: str) -> ModelRunner:
    description = describe(tiny_models.config_dict(name))
    params = load_params(tiny_models.checkpoint(name), description, torch.float32)
    runner = ModelRunner(
        Decoder(description, params, max_model_len=96, attention_backend="auto"),
        vocab_size=description.vocab_size,
        kv_layers=kv_layers(description, torch.float32),
        limits=LimitsConfig(max_num_seqs=4, max_num_batched_tokens=64, max_logprobs=5),
        max_model_len=96,
        block_size=BLOCK_SIZE,
        seed=0,
        device=torch.device("cpu"),
    )
    shape = kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, description.num_kv_heads, description.head_size)
    # What was never written must never be read.
    kv = tuple(
        LayerKV(torch.full(shape, float("nan")), torch.full(shape, float("nan")))
        for _ in range(description.num_layers)
    )
    runner.bind_kv_cache(kv, NUM_BLOCKS)
    return runner


@torch.inference_mode()
def greedy_tokens(name: str, prompt: list[int], num_tokens: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(num_tokens):
        logits = tiny_models.oracle(name)(torch.tensor([sequence])).logits[0, -1]
        sequence.append(int(logits.argmax()))
    return sequence[len(prompt) :]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_chunks_neighbours_and_preemption_give_the_tokens_of_transformers(name: str) -> None:
    runner = runner_of(name)
    assert runner.profile_run() > 0
    runner.dummy_run(9)
    runner.warm_up()
    scheduler = ToyScheduler(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    scheduler.add("a", PROMPTS["a"], GREEDY)
    scheduler.step({"a": 4})
    scheduler.add("b", PROMPTS["b"], GREEDY)
    scheduler.step({"b": 1, "a": 5})
    scheduler.add("c", PROMPTS["c"], GREEDY)
    scheduler.generate("a", 8)
    scheduler.preempt("b")
    scheduler.step({"a": 1, "c": 1})
    scheduler.generate("b", 24)
    for request_id, prompt in PROMPTS.items():
        output = scheduler.live[request_id].output
        assert output == greedy_tokens(name, prompt, len(output))


def test_seeded_tokens_repeat_and_report_the_raw_logprobs() -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=5, logprobs=3)
    runs = []
    for neighbours in (False, True):
        runner = runner_of("llama")
        scheduler = ToyScheduler(runner, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        if neighbours:
            scheduler.add("b", PROMPTS["b"], SamplingParams())
        scheduler.add("a", PROMPTS["a"], sampling)
        output = scheduler.step()
        assert output.logprobs is not None
        row = 1 if neighbours else 0
        value = output.logprobs.values.cast("f")[row * output.logprobs.num_columns]
        token = scheduler.live["a"].output[0]
        with torch.inference_mode():
            logits = tiny_models.oracle("llama")(torch.tensor([PROMPTS["a"]])).logits[0, -1]
        assert value == pytest.approx(float(logits.log_softmax(-1)[token]), abs=1e-4)
        runs.append(list(scheduler.generate("a", 16)))
    assert runs[0] == runs[1]
