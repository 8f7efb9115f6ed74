"""Layer 1. Attention over the paged KV cache.

The cache of a layer is token-major: [num_blocks, block_size, num_kv_heads, head_size] each for
keys and values. A token is then one row, written and gathered as a whole, and consecutive
blocks can be read in place.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

from gpuworker.kernels.attention_plan import AttentionPlan, Group, plan_attention
from gpuworker.kernels.attention_reference import reference_attention
from gpuworker.kernels.batch import AttentionBatch, LayerKV

__all__ = [
    "AttentionBackend",
    "PagedAttention",
    "kv_cache_shape",
    "paged_attention",
    "write_kv",
]

AttentionBackend = Literal["auto", "reference", "sdpa"]


def kv_cache_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
) -> tuple[int, int, int, int]:
    """Return the shape of the keys, and of the values, of one layer."""
    return (num_blocks, block_size, num_kv_heads, head_size)


def write_kv(kv: LayerKV, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch) -> None:
    """Store the keys and values [T, num_kv_heads, head_size] of a step in the cache."""
    num_heads, head_size = k.shape[1:]
    kv.k.view(-1, num_heads, head_size).index_copy_(0, batch.slot_mapping, k)
    kv.v.view(-1, num_heads, head_size).index_copy_(0, batch.slot_mapping, v)


def paged_attention(
    q: torch.Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    backend: AttentionBackend,
) -> torch.Tensor:
    """Attend from q [T, H, D] to the cached tokens of its requests; returns [T, H, D].

    A query at position p sees positions in (p - sliding_window, p]. softcap bounds the scores
    to (-softcap, softcap). reference computes in float32; sdpa and auto in the type of q.
    """
    step = PagedAttention(batch, backend)
    return step.attend(q, kv, scale=scale, sliding_window=sliding_window, softcap=softcap)


class PagedAttention:
    """The attention of one step: plans once per window, for all layers."""

    def __init__(self, batch: AttentionBatch, backend: AttentionBackend) -> None:
        self._batch = batch
        self._backend = backend
        self._plans: dict[int | None, AttentionPlan] = {}
        self._longest = max(batch.seq_lens)
        self._scratch = [torch.empty(0), torch.empty(0)]

    def attend(
        self,
        q: torch.Tensor,
        kv: LayerKV,
        *,
        scale: float,
        sliding_window: int | None,
        softcap: float | None,
    ) -> torch.Tensor:
        """Attend in one layer; see paged_attention."""
        if self._backend == "reference":
            return reference_attention(
                q, kv, self._batch, scale=scale, sliding_window=sliding_window, softcap=softcap
            )
        if sliding_window is not None and sliding_window >= self._longest:
            sliding_window = None
        plan = self._plans.get(sliding_window)
        if plan is None:
            plan = self._plans[sliding_window] = plan_attention(
                self._batch,
                sliding_window=sliding_window,
                token_bytes=kv.k[0, 0].nbytes,
                dtype=q.dtype,
            )
        if len(plan.groups) == 1 and isinstance(plan.groups[0].tokens, slice):
            return self._attend_group(q, kv, plan.groups[0], scale, softcap)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in plan.groups:
            if isinstance(group.tokens, slice):
                queries = q[group.tokens]
                out[group.tokens] = self._attend_group(queries, kv, group, scale, softcap)
            else:
                queries = torch.index_select(q, 0, group.tokens)
                result = self._attend_group(queries, kv, group, scale, softcap)
                out.index_copy_(0, group.tokens, result)
        return out

    def _rows(self, cache: torch.Tensor, group: Group, which: int) -> torch.Tensor:
        """Return [B, num_kv_heads, K, D], a view of the cache where the slots are consecutive."""
        num_heads, head_size = cache.shape[2:]
        token_size = num_heads * head_size
        shape = (group.num_rows, num_heads, group.num_keys, head_size)
        strides = (group.num_keys * token_size, head_size, token_size, 1)
        if isinstance(group.slots, slice):
            offset = cache.storage_offset() + group.slots.start * token_size
            return cache.as_strided(shape, strides, offset)
        # Into memory that stays warm: a fresh buffer of this size costs page faults.
        size = group.num_rows * group.num_keys * token_size
        if self._scratch[which].numel() < size:
            self._scratch[which] = torch.empty(size, dtype=cache.dtype, device=cache.device)
        tokens = self._scratch[which][:size].view(-1, token_size)
        torch.index_select(cache.view(-1, token_size), 0, group.slots, out=tokens)
        return tokens.as_strided(shape, strides)

    def _attend_group(
        self, q: torch.Tensor, kv: LayerKV, group: Group, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Attend from q [B * Q, H, D] to the keys of its group; returns the same shape."""
        k, v = self._rows(kv.k, group, 0), self._rows(kv.v, group, 1)
        num_tokens, num_heads, head_size = q.shape
        num_kv_heads = k.shape[1]
        per_kv = num_heads // num_kv_heads
        grouped = q.view(num_tokens, num_kv_heads, per_kv, head_size)
        if group.num_queries == 1:
            # The heads that share a KV head are queries of it that see the same keys.
            out = _dense(grouped, k, v, group.mask, False, scale, softcap)
        else:
            # One request: its KV heads become the batch, so no key is copied per query head.
            k, v = (x[0, :, None].expand(-1, per_kv, -1, -1) for x in (k, v))
            out = _dense(
                grouped.permute(1, 2, 0, 3), k, v, group.mask, group.is_causal, scale, softcap
            ).permute(2, 0, 1, 3)
        return out.reshape(num_tokens, num_heads, head_size)


def _dense(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale
        )
    # No fused kernel has a soft cap.
    scores = torch.matmul(q, k.transpose(-1, -2)).float()
    scores = scores.mul_(scale / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores = scores.add_(mask)
    elif is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu_(1)
        scores = scores.masked_fill_(hidden, float("-inf"))
    return torch.matmul(scores.softmax(dim=-1).to(v.dtype), v)
