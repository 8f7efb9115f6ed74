"""Layer 1. Root mean square norm."""

from __future__ import annotations

import torch

__all__ = ["RmsNorm"]


class RmsNorm:
    """Computes x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's type.

    one_plus multiplies by 1 + weight. The statistics are float32. Written with vector_norm
    because on a CPU that is five operations; torch.nn.functional.rms_norm is a longer composite
    and takes half as long again for the few rows of a decode step.
    """

    def __init__(self, eps: float, *, one_plus: bool, device: torch.device) -> None:
        self._eps = torch.tensor(eps, dtype=torch.float32, device=device)
        self._one_plus = one_plus

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the normed x [..., size] for a weight [size]."""
        if x.dtype is not torch.float32:
            return self(x.float(), weight).to(x.dtype)
        norm = torch.linalg.vector_norm(x, 2, -1, True)
        scale = torch.addcmul(self._eps, norm, norm, value=1.0 / x.shape[-1]).rsqrt_()
        out = torch.mul(x, scale)
        return torch.addcmul(out, out, weight) if self._one_plus else out.mul_(weight)
