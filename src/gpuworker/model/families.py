"""Layer 1. What each supported architecture does beyond what its config says.

A Family holds the facts that are in a model's code rather than in its config.json. Field
defaults are those of the architecture's own config class, because config files leave out what
equals the default.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = ["FAMILIES", "MODEL_TYPES", "Family", "WindowRule"]

WindowRule = Literal["none", "all", "flagged", "layer_types", "qwen2"]
"""Which layers see only a window: none; every layer; every layer if use_sliding_window; those
that layer_types names (or the family's period); as layer_types, if use_sliding_window."""


@dataclass(frozen=True, slots=True)
class Family:
    """Facts of one architecture."""

    model_type: str
    window: WindowRule = "none"
    window_period: int = 0
    """Without layer_types, every window_period-th layer attends fully and the others do not."""
    norm_position: Literal["pre", "post", "sandwich"] = "pre"
    norm_one_plus: bool = False
    """Norms multiply by 1 + weight, in float32."""
    qk_norm: Literal["none", "head", "full"] = "none"
    qkv_bias: bool = False
    """The q, k and v projections have a bias whatever the config says."""
    has_attention_bias: bool = False
    """attention_bias of the config gives q, k, v and o a bias."""
    has_mlp_bias: bool = False
    embedding_scaled: bool = False
    """Embeddings are multiplied by the square root of the hidden size."""
    query_scalar: bool = False
    """Attention scores are scaled by query_pre_attn_scalar ** -0.5."""
    has_multipliers: bool = False
    nope_layers: bool = False
    moe: Literal["none", "mixtral", "qwen"] = "none"
    theta: float = 10_000.0
    local_theta: float | None = None
    """Rope base of the sliding layers where it is their own."""
    defaults: Mapping[str, object] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("model.", "")
    """Prefixes that checkpoints put before embed_tokens, layers and norm."""
    ignored: tuple[str, ...] = ()
    """Prefixes of checkpoint tensors that belong to parts that are not run."""


_QWEN_WINDOW: Mapping[str, object] = {"sliding_window": 4096, "max_window_layers": 28}
_GEMMA: Mapping[str, object] = {
    "tie_word_embeddings": True,
    "hidden_act": "gelu_pytorch_tanh",
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
}
_GEMMA3: Mapping[str, object] = {
    **_GEMMA,
    "max_position_embeddings": 131_072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 26,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "vocab_size": 262_208,
}
_GEMMA3_FAMILY = Family(
    "gemma3_text",
    window="layer_types",
    window_period=6,
    norm_position="sandwich",
    norm_one_plus=True,
    qk_norm="head",
    has_attention_bias=True,
    embedding_scaled=True,
    query_scalar=True,
    theta=1_000_000.0,
    local_theta=10_000.0,
    defaults=_GEMMA3,
    prefixes=("model.", "language_model.model.", "model.language_model.", ""),
    ignored=(
        "model.multi_modal_projector.",
        "model.vision_tower.",
        "multi_modal_projector.",
        "vision_tower.",
    ),
)

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(
        "llama",
        has_attention_bias=True,
        has_mlp_bias=True,
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    "MistralForCausalLM": Family(
        "mistral",
        window="all",
        defaults={
            "sliding_window": 4096,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "eos_token_id": 2,
        },
    ),
    "Qwen2ForCausalLM": Family(
        "qwen2",
        window="qwen2",
        qkv_bias=True,
        defaults={**_QWEN_WINDOW, "max_position_embeddings": 32_768},
    ),
    "Qwen3ForCausalLM": Family(
        "qwen3",
        window="qwen2",
        qk_norm="head",
        has_attention_bias=True,
        defaults={**_QWEN_WINDOW, "head_dim": 128, "max_position_embeddings": 32_768},
    ),
    "Phi3ForCausalLM": Family(
        "phi3",
        window="all",
        defaults={
            "original_max_position_embeddings": 4096,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 32_000,
        },
    ),
    "GemmaForCausalLM": Family(
        "gemma",
        norm_one_plus=True,
        has_attention_bias=True,
        embedding_scaled=True,
        defaults=_GEMMA,
    ),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        window="layer_types",
        window_period=2,
        norm_position="sandwich",
        norm_one_plus=True,
        has_attention_bias=True,
        embedding_scaled=True,
        query_scalar=True,
        defaults={
            **_GEMMA,
            "query_pre_attn_scalar": 256,
            "sliding_window": 4096,
            "final_logit_softcapping": 30.0,
            "attn_logit_softcapping": 50.0,
        },
    ),
    "Gemma3ForCausalLM": _GEMMA3_FAMILY,
    "Gemma3ForConditionalGeneration": _GEMMA3_FAMILY,
    "SmolLM3ForCausalLM": Family(
        "smollm3",
        window="qwen2",
        has_attention_bias=True,
        has_mlp_bias=True,
        nope_layers=True,
        theta=2_000_000.0,
        defaults={
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "no_rope_layer_interval": 4,
            "eos_token_id": 128_001,
        },
    ),
    "GraniteForCausalLM": Family(
        "granite",
        has_attention_bias=True,
        has_mlp_bias=True,
        has_multipliers=True,
        defaults={"max_position_embeddings": 2048, "eos_token_id": 2},
    ),
    "Olmo2ForCausalLM": Family(
        "olmo2",
        norm_position="post",
        qk_norm="full",
        has_attention_bias=True,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 50_279,
        },
    ),
    "Olmo3ForCausalLM": Family(
        "olmo3",
        window="layer_types",
        window_period=4,
        norm_position="post",
        qk_norm="full",
        has_attention_bias=True,
        theta=500_000.0,
        local_theta=500_000.0,
        defaults={
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "eos_token_id": 50_279,
        },
    ),
    "MixtralForCausalLM": Family(
        "mixtral",
        window="all",
        moe="mixtral",
        theta=1_000_000.0,
        defaults={
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "eos_token_id": 2,
        },
    ),
    "Qwen2MoeForCausalLM": Family(
        "qwen2_moe",
        window="qwen2",
        moe="qwen",
        qkv_bias=True,
        defaults={
            **_QWEN_WINDOW,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "max_position_embeddings": 32_768,
        },
    ),
    "Qwen3MoeForCausalLM": Family(
        "qwen3_moe",
        window="flagged",
        moe="qwen",
        qk_norm="head",
        has_attention_bias=True,
        defaults={
            **_QWEN_WINDOW,
            "num_key_value_heads": 4,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "max_position_embeddings": 32_768,
        },
    ),
}

MODEL_TYPES: Mapping[str, str] = {
    family.model_type: architecture
    for architecture, family in FAMILIES.items()
    if architecture != "Gemma3ForConditionalGeneration"
} | {"gemma3": "Gemma3ForConditionalGeneration"}
