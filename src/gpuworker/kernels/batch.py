"""Layer 1. How the tokens of one step belong together: what attention needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["AttentionBatch", "LayerKV", "PagedBatch"]


class LayerKV(NamedTuple):
    """The paged cache of one layer; shape by kernels.attention.kv_cache_shape."""

    k: torch.Tensor
    v: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """R requests of one step, T tokens in all, request after request.

    The last query_lens[i] of the seq_lens[i] tokens of request i are computed in this step;
    the keys and values of all of them are in the cache once slot_mapping was written.
    """

    query_lens: tuple[int, ...]
    """[R] tokens computed in this step; each at least 1."""
    seq_lens: tuple[int, ...]
    """[R] tokens of the sequence including this step's."""
    block_table: torch.Tensor
    """int32 [R, W] block ids; entries beyond a request's blocks are 0 and never read."""
    slot_mapping: torch.Tensor
    """int64 [T] cache slot (block * block_size + offset) of each token."""
    block_size: int


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """R rows of one step whose lengths are known on the device only.

    Nothing here depends on the values, so a captured graph over a PagedBatch is right for
    every batch that is written into its tensors. A row may have no tokens in this step, and
    tokens from query_starts[R] on belong to no row: they are padding. What is computed for
    padding is never read, and its keys and values go to block 0, the null block.
    """

    query_starts: torch.Tensor
    """int32 [R + 1] first token of each row, not decreasing; the last is the number of tokens."""
    seq_lens: torch.Tensor
    """int32 [R] tokens of the sequence including this step's; at least 1."""
    block_table: torch.Tensor
    """int32 [R, W] block ids; entries beyond a row's blocks are never used."""
    slot_mapping: torch.Tensor
    """int64 [T] cache slot (block * block_size + offset) of each token."""
    block_size: int
    max_query_len: int
    """No row has more tokens in this step. 1: token i belongs to row i, and T = R."""
    max_seq_len: int
    """No sequence is longer; a property of the worker, not of the step."""
