"""Layer 1. Routing of tokens to experts and their feed-forward networks."""

from __future__ import annotations

import torch

from gpuworker.kernels.activation import Activation, gated_activation
from gpuworker.kernels.linear import Linear

__all__ = ["expert_mlp", "route"]


def route(
    logits: torch.Tensor, top_k: int, *, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose top_k experts per token from router logits [T, E].

    Returns float32 weights and int64 expert ids, both [T, top_k]. The weights are the softmax
    over all experts; normalize scales the chosen ones to add up to one.
    """
    probabilities = logits.softmax(dim=-1, dtype=torch.float32)
    weights, experts = torch.topk(probabilities, top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, experts


def expert_mlp(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    experts: torch.Tensor,
    activation: Activation,
    linear: Linear,
) -> torch.Tensor:
    """Return the weighted sum of the chosen experts' outputs, [T, H] like x.

    gate_up is [E, 2 * I, H], down [E, H, I]; weights and experts are those of route. Tokens
    are sorted by expert, so each expert that is needed reads its weights once.
    """
    top_k = experts.shape[1]
    order = torch.argsort(experts.flatten(), stable=True)
    tokens = order.div(top_k, rounding_mode="floor")
    rows = x[tokens]
    start = 0
    counts = torch.bincount(experts.flatten(), minlength=gate_up.shape[0])
    for expert, count in enumerate(counts.tolist()):
        if count == 0:
            continue
        end = start + count
        inner = gated_activation(linear(rows[start:end], gate_up[expert]), activation)
        rows[start:end] = linear(inner, down[expert])
        start = end
    rows *= weights.flatten()[order, None].to(rows.dtype)
    return torch.zeros_like(x).index_add_(0, tokens, rows)
