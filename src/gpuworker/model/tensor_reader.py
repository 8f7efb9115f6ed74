"""Layer 1. Bytes of a checkpoint tensor into memory."""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch

from gpuworker.errors import CheckpointMismatch
from gpuworker.model.safetensors_header import TensorInfo

__all__ = ["CHUNK_BYTES", "bytes_of", "have_equal_values", "read_exactly"]

CHUNK_BYTES = 16 << 20
"""Bytes per read, so that several threads share a large tensor."""


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the writable bytes of a contiguous CPU tensor with at least one element."""
    return tensor.view(-1).view(torch.uint8).numpy().data


def read_exactly(fd: int, info: TensorInfo, offset: int, target: memoryview) -> None:
    """Fill target from byte offset of a tensor's data.

    Raises CheckpointMismatch when the file ends early or cannot be read: it was complete when
    its header was checked.
    """
    done = 0
    try:
        while done < len(target):
            num_read = os.preadv(fd, [target[done:]], info.start + offset + done)
            if num_read == 0:
                raise CheckpointMismatch(
                    f"{info.file} became shorter while it was read: expected at least "
                    f"{info.start + offset + len(target)} bytes, found "
                    f"{info.start + offset + done}"
                )
            done += num_read
    except OSError as error:
        raise CheckpointMismatch(f"cannot read {info.file}: {error.strerror}") from error


def have_equal_values(first: TensorInfo, second: TensorInfo) -> bool:
    """Compare two checkpoint tensors value by value, whatever their dtypes."""
    if first.shape != second.shape:
        return False
    if first.num_bytes == 0:
        return True
    same_type = first.dtype == second.dtype
    return all(
        # Bytes first: they also are equal where both are NaN.
        torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        if same_type
        else torch.equal(a.to(torch.float64), b.to(torch.float64))
        for a, b in zip(_chunks(first), _chunks(second), strict=True)
    )


def _chunks(info: TensorInfo) -> Iterator[torch.Tensor]:
    """Yield a tensor's elements in order, in pieces of the same count for every dtype."""
    num_elements = torch.Size(info.shape).numel()
    per_chunk = CHUNK_BYTES // 8
    with info.file.open("rb", buffering=0) as file:
        for start in range(0, num_elements, per_chunk):
            chunk = torch.empty(min(per_chunk, num_elements - start), dtype=info.dtype)
            read_exactly(file.fileno(), info, start * info.dtype.itemsize, bytes_of(chunk))
            yield chunk
