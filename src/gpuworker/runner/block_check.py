"""Layer 1. Whether block ids may enter a request's block table."""

from __future__ import annotations

import numpy as np

from gpuworker.runner.kv_cache import NULL_BLOCK
from gpuworker.step import Int32Array

__all__ = ["block_faults"]


def block_faults(
    slots: Int32Array,
    tables: Int32Array,
    held: Int32Array,
    block_ids: list[Int32Array],
    num_blocks: int,
) -> list[str | None]:
    """Return per row what is wrong with its new block ids, or None.

    tables[slots[i], :held[i]] are the blocks that row i keeps. An id must be a block of the
    cache other than the null block, and must occur once in a table: a block that stands for two
    places of a sequence would be overwritten by its own request.
    """
    return [
        _fault(ids, tables[slot, :count], num_blocks) if ids.size else None
        for slot, count, ids in zip(slots.tolist(), held.tolist(), block_ids, strict=True)
    ]


def _fault(ids: Int32Array, kept: Int32Array, num_blocks: int) -> str | None:
    for block in (int(ids.min()), int(ids.max())):
        if not NULL_BLOCK < block < num_blocks:
            return f"block id {block} is outside [1, num_blocks={num_blocks})"
    distinct, counts = np.unique(np.concatenate([kept, ids]), return_counts=True)
    if distinct.size < kept.size + ids.size:
        return f"block id {distinct[counts > 1][0]} occurs twice in the block table"
    return None
