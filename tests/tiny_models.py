"""Tiny random checkpoints of every supported family, written by transformers itself."""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

__all__ = ["MODELS", "checkpoint", "config_dict", "fresh_oracle", "oracle"]

_DIRECTORY = tempfile.TemporaryDirectory(prefix="tiny-models-")
atexit.register(_DIRECTORY.cleanup)

_BASE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def _longrope(num_frequencies: int) -> dict[str, object]:
    return {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(num_frequencies)],
        "long_factor": [2.0 + 0.5 * i for i in range(num_frequencies)],
    }


def _make(name: str, **options: object) -> Callable[[], transformers.PreTrainedConfig]:
    return lambda: getattr(transformers, f"{name}Config")(**{**_BASE, **options})


MODELS: dict[str, Callable[[], transformers.PreTrainedConfig]] = {
    "llama": _make("Llama"),
    "llama-tied": _make("Llama", tie_word_embeddings=True),
    "llama-bias": _make("Llama", attention_bias=True, mlp_bias=True, head_dim=16),
    "llama-linear": _make("Llama", rope_scaling={"type": "linear", "factor": 2.5}),
    "llama-dynamic": _make(
        "Llama", rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64
    ),
    "llama-llama3": _make("Llama", rope_scaling=_LLAMA3),
    "llama-yarn": _make("Llama", rope_scaling=_YARN),
    "llama-longrope": _make(
        "Llama", rope_scaling={**_longrope(4), "original_max_position_embeddings": 64}
    ),
    "mistral": _make("Mistral", sliding_window=24),
    "qwen2": _make("Qwen2", use_sliding_window=True, sliding_window=20, max_window_layers=2),
    "qwen3": _make("Qwen3", head_dim=16, attention_bias=True),
    "phi3": _make("Phi3", partial_rotary_factor=0.5, sliding_window=40),
    "phi3-longrope": _make("Phi3", rope_scaling=_longrope(4), original_max_position_embeddings=64),
    "gemma": _make("Gemma", head_dim=16),
    "gemma2": _make("Gemma2", head_dim=16, sliding_window=18, query_pre_attn_scalar=24),
    "gemma3": _make(
        "Gemma3Text",
        head_dim=16,
        sliding_window=18,
        query_pre_attn_scalar=24,
        sliding_window_pattern=3,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    ),
    "smollm3": _make("SmolLM3", no_rope_layers=[1, 0, 1]),
    "granite": _make(
        "Granite",
        embedding_multiplier=3.0,
        residual_multiplier=0.4,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    ),
    "olmo2": _make("Olmo2"),
    "olmo3": _make(
        "Olmo3",
        num_hidden_layers=4,
        sliding_window=18,
        rope_scaling={**_YARN, "attention_factor": 1.2},
    ),
    "mixtral": _make("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen2-moe": _make(
        "Qwen2Moe",
        num_experts=5,
        num_experts_per_tok=3,
        moe_intermediate_size=24,
        shared_expert_intermediate_size=40,
        mlp_only_layers=[1],
    ),
    "qwen3-moe": _make(
        "Qwen3Moe",
        head_dim=16,
        num_experts=6,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    ),
}


def _randomize(model: torch.nn.Module) -> None:
    """Give every parameter values of a size that makes each of them matter."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "embed_tokens" in name:
                parameter.copy_(noise * 0.5)
            elif parameter.ndim >= 2:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise * 0.2)


@functools.cache
def checkpoint(name: str) -> Path:
    """Write the model once per process and return its directory; do not change the files."""
    directory = Path(_DIRECTORY.name) / name
    model = transformers.AutoModelForCausalLM.from_config(MODELS[name](), dtype=torch.float32)
    _randomize(model)
    model.save_pretrained(directory)
    return directory


def config_dict(name: str) -> dict[str, Any]:
    """Return the config.json that transformers wrote."""
    loaded: dict[str, Any] = json.loads((checkpoint(name) / "config.json").read_text())
    return loaded


def fresh_oracle(name: str) -> Any:
    """Return transformers' own float32 model with eager attention, newly loaded."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint(name), attn_implementation="eager", dtype=torch.float32
    ).eval()


@functools.cache
def oracle(name: str) -> Any:
    """Return fresh_oracle, loaded once per process."""
    return fresh_oracle(name)
