"""Layer 1. From the rows of a step to the tensors of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from gpuworker.kernels.batch import AttentionBatch
from gpuworker.runner.requests import RequestTable
from gpuworker.step import Int32Array

__all__ = ["ForwardInputs", "dummy_inputs", "prepare_inputs"]


@dataclass(frozen=True, slots=True)
class ForwardInputs:
    """What Decoder.forward takes, and where each row's last token is."""

    input_ids: torch.Tensor
    """int64 [T]."""
    positions: torch.Tensor
    """int64 [T]."""
    attention: AttentionBatch
    last_tokens: NDArray[np.int64]
    """[R] index into [0, T) of each row's last token."""


def prepare_inputs(
    table: RequestTable,
    slots: Int32Array,
    num_scheduled: Int32Array,
    num_computed: Int32Array,
    *,
    block_size: int,
    device: torch.device,
) -> ForwardInputs:
    """Gather tokens, positions and cache slots of R >= 1 rows, all checked before.

    Row i computes tokens num_computed[i] to num_computed[i] + num_scheduled[i] of its request.
    """
    row_of_token, positions, ends = _positions(num_scheduled, num_computed)
    slot_of_token = slots[row_of_token]
    blocks = table.blocks[slot_of_token, positions // block_size].astype(np.int64)
    width = -(-int(ends.max()) // block_size)
    return _inputs(
        table.tokens[slot_of_token, positions].astype(np.int64),
        positions,
        num_scheduled,
        ends,
        table.blocks[slots, :width],
        blocks * block_size + positions % block_size,
        block_size,
        device,
    )


def dummy_inputs(
    query_lens: Int32Array,
    seq_lens: Int32Array,
    block_table: Int32Array,
    *,
    block_size: int,
    device: torch.device,
) -> ForwardInputs:
    """Return inputs of made-up requests: token 0 at the last query_lens of seq_lens positions.

    block_table [R, W] names every block that is read and written.
    """
    row_of_token, positions, ends = _positions(query_lens, seq_lens - query_lens)
    blocks = block_table[row_of_token, positions // block_size].astype(np.int64)
    return _inputs(
        np.zeros_like(positions),
        positions,
        query_lens,
        ends,
        block_table,
        blocks * block_size + positions % block_size,
        block_size,
        device,
    )


def _positions(
    num_scheduled: Int32Array, num_computed: Int32Array
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return the row [T] and the position [T] of each token, and the length [R] of each row."""
    scheduled = num_scheduled.astype(np.int64)
    computed = num_computed.astype(np.int64)
    starts = scheduled.cumsum() - scheduled
    row_of_token = np.repeat(np.arange(scheduled.size), scheduled)
    positions = np.arange(row_of_token.size) + np.repeat(computed - starts, scheduled)
    return row_of_token, positions, computed + scheduled


def _inputs(
    input_ids: NDArray[np.int64],
    positions: NDArray[np.int64],
    query_lens: Int32Array,
    seq_lens: NDArray[np.int64],
    block_table: Int32Array,
    slot_mapping: NDArray[np.int64],
    block_size: int,
    device: torch.device,
) -> ForwardInputs:
    batch = AttentionBatch(
        query_lens=tuple(query_lens.tolist()),
        seq_lens=tuple(seq_lens.tolist()),
        block_table=torch.from_numpy(block_table).to(device),
        slot_mapping=torch.from_numpy(slot_mapping).to(device),
        block_size=block_size,
    )
    return ForwardInputs(
        input_ids=torch.from_numpy(input_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        attention=batch,
        last_tokens=query_lens.astype(np.int64).cumsum() - 1,
    )
