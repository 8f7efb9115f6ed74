"""The decoder against transformers' own models."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from gpuworker.kernels.attention import AttentionBackend
from gpuworker.model.description import ModelDescription, describe
from paged_decoding import PagedDecoding, load_params

NUM_TOKENS = 32


@pytest.fixture(autouse=True)
def _inference() -> object:
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield


def _prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(3, 160, (n,), generator=generator).tolist() for n in lengths]


def _model(
    name: str, dtype: torch.dtype = torch.float32
) -> tuple[ModelDescription, dict[str, torch.Tensor]]:
    description = describe(tiny_models.config_dict(name))
    return description, load_params(tiny_models.checkpoint(name), description, dtype)


def _assert_matches_oracle(name: str, run: PagedDecoding, steps: list[list[torch.Tensor]]) -> None:
    model = tiny_models.oracle(name)
    for sequence, logits in zip(run.sequences, steps, strict=True):
        expected = model(torch.tensor([sequence])).logits[0, -len(logits) - 1 : -1]
        torch.testing.assert_close(torch.stack(logits), expected, rtol=0, atol=1e-4)
        assert expected.argmax(-1).tolist() == sequence[-len(logits) :]


@pytest.mark.parametrize("name", [n for n in tiny_models.MODELS if "dynamic" not in n])
@pytest.mark.parametrize("scattered", [False, True])
def test_greedy_tokens_and_logits_equal_transformers(name: str, scattered: bool) -> None:
    # Lengths stay on one side of the context limit of longrope (64), where a model that decodes
    # step by step and one that sees the whole sequence agree.
    lengths = (1, 5, 17, 30) if "longrope" in name else (1, 5, 17, 33, 60)
    description, params = _model(name)
    run = PagedDecoding(description, params, _prompts(lengths), max_len=112, scattered=scattered)
    _assert_matches_oracle(name, run, run.greedy(NUM_TOKENS, chunk=13))


@pytest.mark.parametrize("name", ["llama-dynamic", "llama-longrope", "phi3-longrope"])
@pytest.mark.parametrize("length", [40, 64, 65, 100])
def test_length_dependent_rope_equals_transformers_for_a_whole_prompt(
    name: str, length: int
) -> None:
    description, params = _model(name)
    prompts = _prompts((length, 20))
    run = PagedDecoding(description, params, prompts, max_len=128, scattered=True)
    logits = run.step(chunk=128)
    for row, prompt in enumerate(prompts):
        # Fresh, because transformers' dynamic rope remembers the longest sequence it has seen.
        expected = tiny_models.fresh_oracle(name)(torch.tensor([prompt])).logits[0, -1]
        torch.testing.assert_close(logits[row], expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", ["gemma2", "mistral"])
def test_every_attention_backend_serves_the_decoder(name: str, backend: AttentionBackend) -> None:
    description, params = _model(name)
    run = PagedDecoding(
        description, params, _prompts((3, 40)), max_len=64, scattered=True, backend=backend
    )
    _assert_matches_oracle(name, run, run.greedy(8, chunk=9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2-moe", "olmo3"])
def test_sixteen_bit_types_are_close_to_float32(name: str, dtype: torch.dtype) -> None:
    description, params = _model(name, dtype)
    prompts = _prompts((7, 40))
    run = PagedDecoding(description, params, prompts, max_len=64, scattered=True)
    logits = run.step(chunk=64)
    for row, prompt in enumerate(prompts):
        expected = tiny_models.oracle(name)(torch.tensor([prompt])).logits[0, -1]
        assert logits[row].dtype is torch.float32
        error = (logits[row] - expected).norm() / expected.norm()
        assert error < (0.1 if dtype is torch.bfloat16 else 0.02)


def test_weights_changed_in_place_are_used() -> None:
    description, params = _model("gemma3")
    prompts = _prompts((9,))
    run = PagedDecoding(description, params, prompts, max_len=64, scattered=False)
    before = run.step(chunk=64)[0]
    for param in params.values():
        param.mul_(1.1)
    again = PagedDecoding(description, params, prompts, max_len=64, scattered=False)
    reloaded = PagedDecoding(description, params, prompts, max_len=64, scattered=False)
    reloaded.decoder = run.decoder
    after = reloaded.step(chunk=64)[0]
    assert not torch.equal(before, after)
    assert torch.equal(after, again.step(chunk=64)[0])
