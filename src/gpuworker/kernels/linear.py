"""Layer 1. Matrix products with weights that live in an arena and are used as they are."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["Linear"]

# Measured on two cores with AVX-512, as the sum over 30 layers of 576 x 1536:
#   float32, ms at 8 / 16 / 32 / 128 rows: x @ w.T 32 / 37 / 46 / 109, w @ x.T 35 / 33 / 37 / 106.
#   bfloat16 without 16-bit arithmetic, 2 / 8 / 32 / 128 rows: as it is 24 / 51 / 134 / 467;
#   widened piece by piece and multiplied in float32 28 / 41 / 61 / 125.
_SWAP_ROWS = range(12, 65)
_SWAP_OUTPUTS = 1 << 14  # an output head gains nothing, and its readers want rows
_WIDEN_ROWS = 6
_WIDEN_ELEMENTS = 1 << 19


class Linear:
    """Computes x @ weight.T + bias; keeps a scratch buffer, never a copy of a weight.

    One object serves one thread. dtype is that of the weights and of x.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._swaps = device.type == "cpu" and dtype is torch.float32
        self._widens = (
            device.type == "cpu"
            and dtype.itemsize == 2
            and not torch.cpu._is_avx512_bf16_supported()
        )
        self._scratch = torch.empty(_WIDEN_ELEMENTS if self._widens else 0, dtype=torch.float32)

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return [rows, out] for x [rows, in], weight [out, in] and bias [out].

        The result may be column-major; so may x.
        """
        num_rows = x.shape[0]
        if self._swaps and num_rows in _SWAP_ROWS and weight.shape[0] <= _SWAP_OUTPUTS:
            out = torch.mm(weight, x.t()).t()
            return out if bias is None else out.add_(bias)
        if self._widens and num_rows >= _WIDEN_ROWS and weight.shape[1] <= _WIDEN_ELEMENTS:
            return self._widened(x, weight, bias)
        return F.linear(x, weight, bias)

    def _widened(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        out_size, in_size = weight.shape
        wide = x.float()
        out = torch.empty((x.shape[0], out_size), dtype=x.dtype)
        step = self._scratch.numel() // in_size
        for start in range(0, out_size, step):
            piece = weight[start : start + step]
            scratch = self._scratch[: piece.numel()].view(piece.shape).copy_(piece)
            out[:, start : start + step] = F.linear(wide, scratch)
        return out if bias is None else out.add_(bias)
