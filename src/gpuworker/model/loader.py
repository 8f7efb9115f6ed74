"""Layer 1. Checkpoint bytes into the parameters."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from gpuworker.errors import CheckpointNotFound
from gpuworker.model.load_plan import LoadPlan, PlannedCopy, plan_load
from gpuworker.model.safetensors_header import TensorInfo
from gpuworker.model.tensor_reader import CHUNK_BYTES, bytes_of, read_exactly

__all__ = ["LoadPlan", "load", "plan_load"]

_MAX_THREADS = 8


def load(
    plan: LoadPlan,
    params: Mapping[str, torch.Tensor],
    on_progress: Callable[[int, int], None] | None = None,
    *,
    num_threads: int | None = None,
) -> None:
    """Execute a plan on the parameters, by name; values convert as by Tensor.to(dtype).

    Whole tensors of the right dtype are read straight into CPU parameters; everything else goes
    through a staging buffer per thread. on_progress(done_bytes, total_bytes) is called on this
    thread. num_threads None takes one per CPU, at most 8. Raises CheckpointNotFound or
    CheckpointMismatch when a file changed since the plan was made; the parameters' contents are
    undefined then.
    """
    pieces = [piece for copy in plan.copies for piece in _pieces(copy, params[copy.parameter])]
    total_bytes = sum(piece.num_bytes for piece in pieces)
    done_bytes = 0
    workers = num_threads or min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ExitStack() as stack:
        files = _open(stack, {piece.info.file for piece in pieces})
        pool = stack.enter_context(ThreadPoolExecutor(workers, thread_name_prefix="loader"))
        staging = _Staging()
        # A failure must not wait for the pieces behind it.
        stack.callback(pool.shutdown, wait=True, cancel_futures=True)
        for num_bytes in pool.map(lambda piece: _read(piece, files, staging), pieces):
            done_bytes += num_bytes
            if on_progress is not None:
                on_progress(done_bytes, total_bytes)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows of a checkpoint tensor that are read at once."""

    info: TensorInfo
    rows: tuple[int, int]
    """Half-open interval of the first axis."""
    columns: tuple[slice, ...]
    """What is taken of the other axes."""
    target: torch.Tensor
    """Where it goes; the shape that rows and columns give."""

    @property
    def row_bytes(self) -> int:
        return math.prod(self.info.shape[1:]) * self.info.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return (self.rows[1] - self.rows[0]) * self.row_bytes

    def is_direct(self) -> bool:
        """Say whether the file's bytes are the parameter's bytes, in the same order."""
        return (
            self.target.dtype == self.info.dtype
            and self.target.device.type == "cpu"
            and self.target.is_contiguous()
            and self.target.numel() * self.target.element_size() == self.num_bytes
        )


class _Staging(threading.local):
    """One buffer per reader thread, as large as the largest piece that it has seen."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes]


def _pieces(copy: PlannedCopy, parameter: torch.Tensor) -> Iterator[_Piece]:
    # A scalar is a row of one.
    source = copy.source or ((0, 1),)
    info = copy.info
    if not copy.source:
        info = TensorInfo(info.file, info.dtype, (1,), info.start)
    target = parameter[tuple(slice(*interval) for interval in copy.target)]
    target = target.view([end - start for start, end in source])
    if target.numel() == 0:
        return
    columns = tuple(slice(*interval) for interval in source[1:])
    row_bytes = math.prod(info.shape[1:]) * info.dtype.itemsize
    step = max(1, CHUNK_BYTES // row_bytes)
    first, last = source[0]
    for start in range(first, last, step):
        end = min(start + step, last)
        yield _Piece(info, (start, end), columns, target[start - first : end - first])


def _open(stack: ExitStack, paths: set[Path]) -> dict[Path, int]:
    files: dict[Path, int] = {}
    for path in sorted(paths):
        try:
            files[path] = stack.enter_context(path.open("rb", buffering=0)).fileno()
        except OSError as error:
            raise CheckpointNotFound(f"cannot read {path}: {error.strerror}") from error
    return files


def _read(piece: _Piece, files: Mapping[Path, int], staging: _Staging) -> int:
    fd = files[piece.info.file]
    offset = piece.rows[0] * piece.row_bytes
    if piece.is_direct():
        read_exactly(fd, piece.info, offset, bytes_of(piece.target))
        return piece.num_bytes
    raw = staging.take(piece.num_bytes)
    read_exactly(fd, piece.info, offset, bytes_of(raw))
    shape = (piece.rows[1] - piece.rows[0], *piece.info.shape[1:])
    values = raw.view(piece.info.dtype).view(shape)[(slice(None), *piece.columns)]
    piece.target.copy_(values)
    return piece.num_bytes
