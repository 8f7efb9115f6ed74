"""Layer 1. Paged attention as its definition says; what the fast forms are tested against."""

from __future__ import annotations

import torch

from gpuworker.kernels.batch import AttentionBatch, LayerKV

__all__ = ["reference_attention"]


def reference_attention(
    q: torch.Tensor,
    kv: LayerKV,
    batch: AttentionBatch,
    *,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Return softmax(softcap * tanh(scale * q k / softcap)) v per head, computed in float32.

    q is [T, H, D], the result too. A query at position p sees positions in
    (p - sliding_window, p]; H / num_kv_heads consecutive heads share one KV head.
    """
    num_kv_heads = kv.k.shape[2]
    out = torch.empty_like(q)
    start = 0
    for row, (query_len, seq_len) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        num_blocks = -(-seq_len // batch.block_size)
        blocks = batch.block_table[row, :num_blocks].long()
        keys, values = (
            cache[blocks]
            .flatten(0, 1)[:seq_len]
            .float()
            .repeat_interleave(q.shape[1] // num_kv_heads, dim=1)
            for cache in kv
        )
        queries = q[start : start + query_len].float()
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        key_positions = torch.arange(seq_len, device=q.device)
        query_positions = key_positions[seq_len - query_len :, None]
        visible = key_positions <= query_positions
        if sliding_window is not None:
            visible &= key_positions > query_positions - sliding_window
        weights = scores.masked_fill(~visible, float("-inf")).softmax(dim=-1)
        out[start : start + query_len] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        start += query_len
    return out
