"""Layer 1. Gated activations of the feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import torch
import torch.nn.functional as F

__all__ = ["ACTIVATIONS", "Activation", "gated_activation"]

Activation = Literal["gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "silu", "swish"]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
}


def gated_activation(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Return activation(gate) * up for gate_up [..., 2 * I] that holds gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate).mul_(up)
