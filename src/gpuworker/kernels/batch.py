"""Layer 1. How the tokens of one step belong together: what attention needs to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["AttentionBatch", "LayerKV"]


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
