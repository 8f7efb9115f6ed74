"""Layer 5. A random model small enough for anything, made without a network."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import pre_tokenizers

from gpuworker.cli.gguf_llama import (
    byte_level_tokenizer,
    tokenizer_config,
    write_json,
    write_safetensors,
)

__all__ = ["make_tiny_model"]

_NUM_LAYERS = 2
_HIDDEN_SIZE = 64
_INTERMEDIATE_SIZE = 128
_NUM_HEADS = 4
_NUM_KV_HEADS = 2
_HEAD_DIM = _HIDDEN_SIZE // _NUM_HEADS
_MAX_POSITIONS = 512
_SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def make_tiny_model(directory: Path, *, seed: int = 0) -> Path:
    """Write a random float32 Llama with a vocabulary of bytes, and return its directory.

    The same seed gives the same files. It has every part of a real model directory: config,
    safetensors, tokenizer with a chat template, generation config.
    """
    directory.mkdir(parents=True, exist_ok=True)
    bytes_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate(_SPECIAL_TOKENS + bytes_alphabet)}
    tokenizer = byte_level_tokenizer(vocab, [], _SPECIAL_TOKENS, split_digits=False)
    tokenizer.save(str(directory / "tokenizer.json"))
    bos, eos = vocab["<|im_start|>"], vocab["<|im_end|>"]
    write_safetensors(_weights(len(vocab), seed), directory / "model.safetensors")
    write_json(directory / "config.json", _config(len(vocab), bos, eos))
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": eos},
    )
    write_json(
        directory / "tokenizer_config.json",
        tokenizer_config(
            chat_template=_CHAT_TEMPLATE,
            bos_token="<|im_start|>",
            eos_token="<|im_end|>",
            max_length=_MAX_POSITIONS,
        ),
    )
    return directory


def _config(vocab_size: int, bos: int, eos: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "head_dim": _HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": _HIDDEN_SIZE,
        "intermediate_size": _INTERMEDIATE_SIZE,
        "max_position_embeddings": _MAX_POSITIONS,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": _NUM_HEADS,
        "num_hidden_layers": _NUM_LAYERS,
        "num_key_value_heads": _NUM_KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "vocab_size": vocab_size,
    }


def _weights(vocab_size: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    kv_rows = _NUM_KV_HEADS * _HEAD_DIM
    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab_size, _HIDDEN_SIZE, generator=generator),
        "model.norm.weight": torch.ones(_HIDDEN_SIZE),
        # Three times the usual size: flat logits would make greedy decoding a matter of rounding.
        "lm_head.weight": 3 * matrix(vocab_size, _HIDDEN_SIZE),
    }
    for layer in range(_NUM_LAYERS):
        prefix = f"model.layers.{layer}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": torch.ones(_HIDDEN_SIZE),
            f"{prefix}.self_attn.q_proj.weight": matrix(_HIDDEN_SIZE, _HIDDEN_SIZE),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_rows, _HIDDEN_SIZE),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_rows, _HIDDEN_SIZE),
            f"{prefix}.self_attn.o_proj.weight": matrix(_HIDDEN_SIZE, _HIDDEN_SIZE),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(_HIDDEN_SIZE),
            f"{prefix}.mlp.gate_proj.weight": matrix(_INTERMEDIATE_SIZE, _HIDDEN_SIZE),
            f"{prefix}.mlp.up_proj.weight": matrix(_INTERMEDIATE_SIZE, _HIDDEN_SIZE),
            f"{prefix}.mlp.down_proj.weight": matrix(_HIDDEN_SIZE, _INTERMEDIATE_SIZE),
        }
    return tensors
