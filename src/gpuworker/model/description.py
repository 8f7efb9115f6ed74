"""Layer 1. What a decoder has to compute, read from a checkpoint's config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from gpuworker.errors import CheckpointMismatch, UnsupportedModel
from gpuworker.kernels.activation import ACTIVATIONS, Activation
from gpuworker.model.config_fields import Fields
from gpuworker.model.families import FAMILIES, MODEL_TYPES, Family
from gpuworker.model.rope_spec import RopeSpec, read_ropes

__all__ = ["LayerSpec", "ModelDescription", "MoeSpec", "describe"]


@dataclass(frozen=True, slots=True)
class MoeSpec:
    """A feed-forward block that sends each token to a few experts."""

    num_experts: int
    top_k: int
    intermediate_size: int
    normalize: bool
    """The weights of the chosen experts are scaled to add up to one."""
    shared_intermediate_size: int
    """Size of the expert that every token visits, behind a sigmoid gate; 0 for none."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What may differ from layer to layer."""

    rope: int | None
    """Index into ModelDescription.ropes; None does not rotate."""
    sliding_window: int | None
    """Tokens that a query sees, itself included; None sees all earlier ones."""
    moe: MoeSpec | None
    """None is a dense feed-forward block."""


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """A decoder-only transformer, complete."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int
    layers: tuple[LayerSpec, ...]
    ropes: tuple[RopeSpec, ...]
    activation: Activation
    norm_eps: float
    norm_one_plus: bool
    """Norms multiply by 1 + weight instead of weight."""
    norm_position: Literal["pre", "post", "sandwich"]
    """Norm before each block, after it, or both."""
    qk_norm: Literal["none", "head", "full"]
    """Norm of queries and keys: none, over each head, or over all heads together."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    attention_scale: float
    attention_softcap: float | None
    logits_softcap: float | None
    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dtype_name: str | None
    """Type that the checkpoint names, for example bfloat16; None when it names none."""
    checkpoint_prefixes: tuple[str, ...]
    ignored_prefixes: tuple[str, ...]

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layers)


def describe(config: Mapping[str, object]) -> ModelDescription:
    """Describe the model of a Hugging Face config.json.

    Raises UnsupportedModel for an architecture, activation or rope kind that is not known, and
    CheckpointMismatch for a field that is missing, malformed or contradicts another.
    """
    architecture, family = _family(config)
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = {**config, **{k: v for k, v in text.items() if v is not None}}
    fields = Fields(config, defaults=family.defaults)
    if isinstance(quantization := config.get("quantization_config"), Mapping):
        method = quantization.get("quant_method", "of an unnamed kind")
        raise UnsupportedModel(
            f"the weights are quantised ({method}); only float32, float16 and bfloat16 checkpoints "
            "can be loaded, take the model's unquantised form"
        )
    if fields.flag("use_bidirectional_attention", False):
        raise UnsupportedModel(
            f"{architecture}: use_bidirectional_attention is set; only causal decoders are run"
        )
    hidden_size = fields.integer("hidden_size")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise CheckpointMismatch(
            f"config: num_attention_heads {num_heads} is not a multiple of "
            f"num_key_value_heads {num_kv_heads}"
        )
    if "head_dim" not in fields and hidden_size % num_heads:
        raise CheckpointMismatch(
            f"config: hidden_size {hidden_size} is not a multiple of num_attention_heads "
            f"{num_heads}, and head_dim is missing"
        )
    head_size = fields.integer("head_dim", hidden_size // num_heads)
    layer_types = _layer_types(fields, family)
    by_type = read_ropes(fields, head_size, family.theta, family.local_theta)
    used = [
        by_type[name] if rotates else None
        for name, rotates in zip(layer_types, _rotating(fields, family), strict=True)
    ]
    ropes = tuple(dict.fromkeys(rope for rope in used if rope is not None))
    window = _window(fields)
    bias = family.has_attention_bias and fields.flag("attention_bias", False)
    scalar = fields.number("query_pre_attn_scalar", head_size) if family.query_scalar else head_size
    scale = scalar**-0.5
    multipliers = family.has_multipliers
    return ModelDescription(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_attention_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        layers=tuple(
            LayerSpec(
                rope=None if rope is None else ropes.index(rope),
                sliding_window=window if layer_types[index] == "sliding_attention" else None,
                moe=_moe(fields, family, index),
            )
            for index, rope in enumerate(used)
        ),
        ropes=ropes,
        activation=_activation(fields, family),
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        norm_one_plus=family.norm_one_plus,
        norm_position=family.norm_position,
        qk_norm=family.qk_norm,
        qkv_bias=(family.qkv_bias and fields.flag("qkv_bias", True)) or bias,
        o_bias=bias,
        mlp_bias=family.has_mlp_bias and fields.flag("mlp_bias", False),
        attention_scale=fields.number("attention_multiplier", 1.0) if multipliers else scale,
        attention_softcap=_softcap(fields, config, family, "attn_logit_softcapping"),
        logits_softcap=_softcap(fields, config, family, "final_logit_softcapping"),
        embedding_multiplier=(
            fields.number("embedding_multiplier", 1.0)
            if multipliers
            else math.sqrt(hidden_size)
            if family.embedding_scaled
            else 1.0
        ),
        residual_multiplier=fields.number("residual_multiplier", 1.0) if multipliers else 1.0,
        logits_divisor=fields.number("logits_scaling", 1.0) if multipliers else 1.0,
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        eos_token_ids=fields.integers("eos_token_id"),
        dtype_name=_dtype_name(fields),
        checkpoint_prefixes=family.prefixes,
        ignored_prefixes=family.ignored,
    )


def _family(config: Mapping[str, object]) -> tuple[str, Family]:
    names = Fields(config).texts("architectures")
    model_type = Fields(config).text("model_type")
    name = names[0] if names else MODEL_TYPES.get(model_type, "")
    if name not in FAMILIES:
        given = f"architecture {name!r}" if names else f"model_type {model_type!r}"
        raise UnsupportedModel(
            f"{given} is not supported; supported are {', '.join(sorted(FAMILIES))}"
        )
    return name, FAMILIES[name]


def _activation(fields: Fields, family: Family) -> Activation:
    name = fields.text("hidden_activation") or fields.text("hidden_act", "silu")
    if family.embedding_scaled and name == "gelu":
        # Early Gemma configs say gelu and mean its tanh form.
        name = "gelu_pytorch_tanh"
    if name not in ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act {name!r} is not supported; supported are {', '.join(sorted(ACTIVATIONS))}"
        )
    return cast("Activation", name)


def _window(fields: Fields) -> int | None:
    if fields.raw.get("sliding_window", 0) is None:
        return None  # null switches a window off that the architecture has by default
    window = fields.optional_integer("sliding_window")
    return window if window is not None and window > 0 else None


def _layer_types(fields: Fields, family: Family) -> tuple[str, ...]:
    num_layers = fields.integer("num_hidden_layers")
    full, sliding = "full_attention", "sliding_attention"
    given = fields.texts("layer_types")
    flagged = fields.flag("use_sliding_window", False) and _window(fields) is not None
    if family.window == "none" or (family.window in ("flagged", "qwen2") and not flagged):
        return (full,) * num_layers
    if family.window in ("all", "flagged"):
        return (sliding if _window(fields) is not None else full,) * num_layers
    if given:
        if len(given) != num_layers:
            raise CheckpointMismatch(
                f"config: layer_types has {len(given)} entries for {num_layers} layers"
            )
        if unknown := set(given) - {full, sliding}:
            raise UnsupportedModel(
                f"layer type {', '.join(sorted(unknown))} is not supported; "
                f"supported are {full}, {sliding}"
            )
        return given
    if family.window == "layer_types":
        period = fields.integer(
            "sliding_window_pattern",
            fields.optional_integer("_sliding_window_pattern") or family.window_period,
        )
        return tuple(sliding if (i + 1) % period else full for i in range(num_layers))
    if family.nope_layers:
        return tuple(full if rotates else sliding for rotates in _rotating(fields, family))
    first = fields.integer("max_window_layers", 28, minimum=0)
    if family.moe == "qwen":
        slides = [(i + 1) % 2 == 1 and i < first for i in range(num_layers)]
    else:
        slides = [i >= first for i in range(num_layers)]
    return tuple(sliding if slide else full for slide in slides)


def _rotating(fields: Fields, family: Family) -> tuple[bool, ...]:
    num_layers = fields.integer("num_hidden_layers")
    if not family.nope_layers:
        return (True,) * num_layers
    given = fields.integers("no_rope_layers")
    if given:
        if len(given) < num_layers:
            raise CheckpointMismatch(
                f"config: no_rope_layers has {len(given)} entries for {num_layers} layers"
            )
        return tuple(bool(flag) for flag in given[:num_layers])
    interval = fields.integer("no_rope_layer_interval", 4)
    return tuple((i + 1) % interval != 0 for i in range(num_layers))


def _moe(fields: Fields, family: Family, layer: int) -> MoeSpec | None:
    if family.moe == "none":
        return None
    if family.moe == "mixtral":
        size = fields.integer("intermediate_size")
        normalize, shared = True, 0
    else:
        step = fields.integer("decoder_sparse_step", 1)
        if layer in fields.integers("mlp_only_layers") or (layer + 1) % step:
            return None
        size = fields.integer("moe_intermediate_size")
        normalize = fields.flag("norm_topk_prob", False)
        shared = fields.integer("shared_expert_intermediate_size", 0, minimum=0)
    num_experts = fields.integer(
        "num_experts", fields.optional_integer("num_local_experts"), minimum=0
    )
    if num_experts == 0:
        return None
    top_k = fields.integer("num_experts_per_tok")
    if top_k > num_experts:
        raise CheckpointMismatch(
            f"config: num_experts_per_tok {top_k} exceeds the {num_experts} experts"
        )
    return MoeSpec(num_experts, top_k, size, normalize, shared)


def _softcap(
    fields: Fields, config: Mapping[str, object], family: Family, name: str
) -> float | None:
    # Null switches a cap off that the architecture has by default.
    if not family.query_scalar or (name in config and config[name] is None):
        return None
    return fields.optional_number(name)


def _dtype_name(fields: Fields) -> str | None:
    return (fields.text("dtype") or fields.text("torch_dtype")).removeprefix("torch.") or None
