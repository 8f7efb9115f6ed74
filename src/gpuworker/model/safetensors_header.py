"""Layer 1. What a safetensors file contains, checked against the file's real size.

Format: an unsigned 64-bit little-endian length N, N bytes of JSON that map each tensor name to
dtype, shape and data_offsets, then the data; offsets count from the first byte of the data.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import torch

from gpuworker.errors import CheckpointMismatch, CheckpointNotFound

__all__ = ["TensorInfo", "read_header"]

_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}
_Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies; row-major, little-endian."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    """Offset of its first byte in the file."""

    @property
    def num_bytes(self) -> int:
        """Size of the data."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Read the tensors' places, in the order of the header; the data is not touched.

    Raises CheckpointNotFound when the file cannot be read. Raises CheckpointMismatch, naming the
    file, for a header that does not decode, an unknown dtype, a size that contradicts the
    shape, tensors that overlap, or a file that is shorter or longer than the header says.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if file_bytes < _LENGTH_BYTES or length > min(file_bytes, _MAX_HEADER_BYTES):
                raise CheckpointMismatch(
                    f"{path} is no safetensors file or is truncated: its header should have "
                    f"{length} bytes, the file has {file_bytes}"
                )
            header = file.read(length)
    except OSError as error:
        raise CheckpointNotFound(f"cannot read {path}: {error.strerror}") from error
    entries = _entries(path, header)
    data_start = _LENGTH_BYTES + length
    tensors = {name: _tensor_info(path, name, entry, data_start) for name, entry in entries.items()}
    _check_ranges(path, tensors, data_start, file_bytes)
    return tensors


def _entries(path: Path, header: bytes) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop("__metadata__", None)
        return {name: msgspec.json.decode(value, type=_Entry) for name, value in raw.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointMismatch(f"{path} has a broken header: {error}") from error


def _tensor_info(path: Path, name: str, entry: _Entry, data_start: int) -> TensorInfo:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise CheckpointMismatch(
            f"{path}: tensor {name} has dtype {entry.dtype}; known are {', '.join(_DTYPES)}"
        )
    begin, end = entry.data_offsets
    info = TensorInfo(path, dtype, entry.shape, data_start + begin)
    if end - begin != info.num_bytes:
        raise CheckpointMismatch(
            f"{path}: tensor {name} of {entry.dtype} {list(entry.shape)} needs {info.num_bytes} "
            f"bytes, the header gives it {end - begin}"
        )
    return info


def _check_ranges(
    path: Path, tensors: dict[str, TensorInfo], data_start: int, file_bytes: int
) -> None:
    end, last = data_start, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)):
        if info.start < end:
            raise CheckpointMismatch(f"{path}: tensors {last} and {name} overlap")
        end, last = info.start + info.num_bytes, name
    if end != file_bytes:
        what = "truncated" if file_bytes < end else "longer than its header says"
        raise CheckpointMismatch(
            f"{path} is {what}: expected {end} bytes, found {file_bytes}; fetch the file again"
        )
