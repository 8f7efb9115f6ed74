"""Layer 1. Rotary tables: from a RopeSpec to cosines and sines of positions.

Frequencies follow the publications as transformers implements them (modeling_rope_utils):
position interpolation (linear), NTK-aware scaling by sequence length (dynamic), YaRN,
LongRoPE and the Llama 3 scheme.

Two kinds depend on the length of the sequence. They are applied per request, by the length it
has after the step, which is what transformers does for a batch of one: all tokens of the step
use the same frequencies; keys that are already cached keep those they were written with.
"""

from __future__ import annotations

import math

import torch

from gpuworker.kernels.batch import AttentionBatch
from gpuworker.kernels.rope import Rotation
from gpuworker.model.rope_spec import RopeSpec

__all__ = ["RopeTable", "attention_factor", "inverse_frequencies"]


def inverse_frequencies(spec: RopeSpec, seq_len: int) -> torch.Tensor:
    """Return the float32 [rotary_dim / 2] angles per position for a sequence of seq_len tokens."""
    dim = spec.rotary_dim
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    theta: float | torch.Tensor = spec.theta
    limit = spec.max_position_embeddings
    if spec.kind == "dynamic" and seq_len > limit:
        # In float32, as the reference computes it: far positions show the difference.
        growth = spec.factor * torch.tensor(seq_len) / limit - (spec.factor - 1)
        theta = spec.theta * growth ** (dim / (dim - 2))
    if spec.kind == "longrope":
        is_long = seq_len > spec.original_max_position_embeddings
        factors = torch.tensor(spec.long_factor if is_long else spec.short_factor)
        return 1.0 / (factors * theta**exponents)
    frequencies = 1.0 / theta**exponents
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "llama3":
        return _llama3(spec, frequencies)
    if spec.kind == "yarn":
        return _yarn(spec, theta**exponents)
    return frequencies


def attention_factor(spec: RopeSpec) -> float:
    """Return the number that cos and sin are multiplied by."""
    if spec.kind not in ("longrope", "yarn"):
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.factor <= 1.0:
        return 1.0
    if spec.kind == "longrope":
        original = spec.original_max_position_embeddings
        return math.sqrt(1 + math.log(spec.factor) / math.log(original))
    if spec.mscale and spec.mscale_all_dim:
        return _mscale(spec.factor, spec.mscale) / _mscale(spec.factor, spec.mscale_all_dim)
    return _mscale(spec.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    original = spec.original_max_position_embeddings
    low, high = spec.low_freq_factor, spec.high_freq_factor
    smooth = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / spec.factor + smooth * frequencies


def _yarn(spec: RopeSpec, powers: torch.Tensor) -> torch.Tensor:
    dim = spec.rotary_dim

    def dimension(num_rotations: float) -> float:
        """Return the dimension that turns num_rotations times in the original context."""
        length = spec.original_max_position_embeddings / (num_rotations * 2 * math.pi)
        return dim * math.log(length) / (2 * math.log(spec.theta))

    low, high = dimension(spec.beta_fast), dimension(spec.beta_slow)
    if spec.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (spec.factor * powers)) * (1 - keep) + (1.0 / powers) * keep


class RopeTable:
    """Cosines and sines of the positions of one rope, on a device.

    Kinds that do not depend on the sequence length are a float32 table of max_model_len rows;
    LongRoPE is two of them. dynamic has a table for sequences within max_position_embeddings
    and computes what is beyond it. The tables are buffers of their own: no weight memory.
    """

    def __init__(self, spec: RopeSpec, max_model_len: int, device: torch.device) -> None:
        self._spec = spec
        self._scale = attention_factor(spec)
        positions = torch.arange(max_model_len, device=device)
        self._short = self._rows(positions, 1)
        self._threshold: int | None = None
        self._long: torch.Tensor | None = None
        if spec.kind == "dynamic":
            self._threshold = spec.max_position_embeddings
        elif spec.kind == "longrope":
            self._threshold = spec.original_max_position_embeddings
            if max_model_len > self._threshold:
                self._long = self._rows(positions, self._threshold + 1)

    def _rows(self, positions: torch.Tensor, seq_len: int) -> torch.Tensor:
        """Return float32 [positions, rotary_dim]: cosines, then sines of the half."""
        frequencies = inverse_frequencies(self._spec, seq_len).to(positions.device)
        angles = positions.float()[:, None] * frequencies
        return torch.cat((angles.cos(), angles.sin()), dim=-1).mul_(self._scale)

    def cos_sin(self, positions: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        """Return float32 [T, rotary_dim]: the cosines, then the sines of each token."""
        rows = torch.index_select(self._short, 0, positions)
        if self._threshold is None or max(batch.seq_lens) <= self._threshold:
            return rows
        start = 0
        for query_len, seq_len in zip(batch.query_lens, batch.seq_lens, strict=True):
            span = slice(start, start + query_len)
            if seq_len > self._threshold:
                if self._long is not None:
                    rows[span] = torch.index_select(self._long, 0, positions[span])
                else:
                    rows[span] = self._rows(positions[span], seq_len)
            start += query_len
        return rows

    def rotation(
        self, positions: torch.Tensor, batch: AttentionBatch, dtype: torch.dtype
    ) -> Rotation:
        """Return what apply_rope needs for tokens at positions int64 [T], in dtype."""
        cos, sin = self.cos_sin(positions, batch).to(dtype)[:, None].chunk(2, dim=-1)
        return Rotation(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
