"""Layer 1. The parameters of a model by their place in it, as every decoder uses them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from gpuworker.model.description import LayerSpec, ModelDescription, MoeSpec

__all__ = ["Layer", "Mlp", "ModelWeights", "Moe", "Projection", "model_weights"]


@dataclass(frozen=True, slots=True)
class Projection:
    """A linear layer: weight [out, in] and bias [out]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Mlp:
    """A gated feed-forward block: gate_up [2 * I, H] holds the gate first; down is [H, I]."""

    gate_up: Projection
    down: Projection


@dataclass(frozen=True, slots=True)
class Moe:
    """Experts: router [E, H], gate_up [E, 2 * I, H], down [E, H, I], and one that all share."""

    spec: MoeSpec
    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    shared: Mlp | None
    shared_gate: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; a norm that the model does not have is None."""

    spec: LayerSpec
    input_norm: torch.Tensor | None
    qkv: Projection
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    o: Projection
    attention_output_norm: torch.Tensor | None
    mlp_norm: torch.Tensor | None
    mlp: Mlp | Moe
    mlp_output_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """All of a model; lm_head is embed where they are tied."""

    embed: torch.Tensor
    norm: torch.Tensor
    lm_head: torch.Tensor
    layers: tuple[Layer, ...]


def model_weights(
    description: ModelDescription, params: Mapping[str, torch.Tensor]
) -> ModelWeights:
    """Arrange parameters by their place; params maps the names of parameter_specs to tensors."""
    embed = params["embed.weight"]
    return ModelWeights(
        embed=embed,
        norm=params["norm.weight"],
        lm_head=embed if description.tie_word_embeddings else params["lm_head.weight"],
        layers=tuple(
            _layer(params, f"layers.{index}.", spec)
            for index, spec in enumerate(description.layers)
        ),
    )


def _layer(params: Mapping[str, torch.Tensor], name: str, spec: LayerSpec) -> Layer:
    moe = spec.moe
    return Layer(
        spec=spec,
        input_norm=params.get(f"{name}input_norm.weight"),
        qkv=_projection(params, f"{name}attention.qkv"),
        q_norm=params.get(f"{name}attention.q_norm.weight"),
        k_norm=params.get(f"{name}attention.k_norm.weight"),
        o=_projection(params, f"{name}attention.o"),
        attention_output_norm=params.get(f"{name}attention_output_norm.weight"),
        mlp_norm=params.get(f"{name}mlp_norm.weight"),
        mlp=_mlp(params, f"{name}mlp.") if moe is None else _moe(params, f"{name}moe.", moe),
        mlp_output_norm=params.get(f"{name}mlp_output_norm.weight"),
    )


def _projection(params: Mapping[str, torch.Tensor], name: str) -> Projection:
    return Projection(params[f"{name}.weight"], params.get(f"{name}.bias"))


def _mlp(params: Mapping[str, torch.Tensor], name: str) -> Mlp:
    return Mlp(_projection(params, f"{name}gate_up"), _projection(params, f"{name}down"))


def _moe(params: Mapping[str, torch.Tensor], name: str, spec: MoeSpec) -> Moe:
    return Moe(
        spec=spec,
        router=params[f"{name}router.weight"],
        gate_up=params[f"{name}gate_up.weight"],
        down=params[f"{name}down.weight"],
        shared=_mlp(params, f"{name}shared.") if spec.shared_intermediate_size else None,
        shared_gate=params.get(f"{name}shared.gate.weight"),
    )
