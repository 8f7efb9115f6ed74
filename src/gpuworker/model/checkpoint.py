"""Layer 1. A model directory: its config and where each tensor lies, checked, nothing loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from gpuworker.errors import CheckpointMismatch, CheckpointNotFound
from gpuworker.model.safetensors_header import TensorInfo, read_header

__all__ = ["Checkpoint", "TensorInfo", "open_checkpoint", "read_config", "read_eos_token_ids"]

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model directory whose files agree with each other."""

    directory: Path
    config: Mapping[str, object]
    """config.json as it is."""
    tensors: Mapping[str, TensorInfo]
    eos_token_ids: tuple[int, ...]
    warnings: tuple[str, ...]
    """What was ignored, and why."""


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class _EosField(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


def read_config(directory: Path) -> dict[str, object]:
    """Read config.json alone.

    Raises CheckpointNotFound without directory or file, CheckpointMismatch for broken JSON.
    """
    if not directory.is_dir():
        raise CheckpointNotFound(f"model directory {directory} does not exist")
    return _read_json(directory / "config.json", dict[str, object])


def read_eos_token_ids(directory: Path) -> tuple[int, ...]:
    """Read the ids that end a text: generation_config.json's, else config.json's, else none.

    Raises CheckpointMismatch for broken JSON or an id that is not an integer.
    """
    for name in ("generation_config.json", "config.json"):
        if not (directory / name).exists():
            continue
        match _read_json(directory / name, _EosField).eos_token_id:
            case int(token_id):
                return (token_id,)
            case list(token_ids):
                return tuple(token_ids)
    return ()


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read config.json and every safetensors header of a directory.

    The tensors are those of model.safetensors or, without that file, of the shards that
    model.safetensors.index.json names; other safetensors files are ignored with a warning.
    Raises CheckpointNotFound for a directory, config or weight file that is not there, and
    CheckpointMismatch for files that are broken, truncated or contradict the index. No tensor
    data is read.
    """
    config = read_config(directory)
    warnings: list[str] = []
    if (directory / _SINGLE).exists():
        files = {_SINGLE}
        tensors = read_header(directory / _SINGLE)
    elif (directory / _INDEX).exists():
        weight_map = _read_json(directory / _INDEX, _Index).weight_map
        files = set(weight_map.values())
        tensors = _sharded(directory, weight_map, warnings)
    else:
        raise CheckpointNotFound(_without_weights(directory))
    stale = sorted(path.name for path in directory.glob("*.safetensors") if path.name not in files)
    if stale:
        warnings.append(f"ignored in {directory}, not part of the model: {', '.join(stale)}")
    return Checkpoint(
        directory=directory,
        config=config,
        tensors=tensors,
        eos_token_ids=read_eos_token_ids(directory),
        warnings=tuple(warnings),
    )


def _sharded(
    directory: Path, weight_map: Mapping[str, str], warnings: list[str]
) -> dict[str, TensorInfo]:
    files = sorted(set(weight_map.values()))
    if outside := [name for name in files if Path(name).name != name]:
        raise CheckpointMismatch(
            f"{directory / _INDEX} names files outside its directory: {', '.join(outside)}"
        )
    if missing := [name for name in files if not (directory / name).exists()]:
        raise CheckpointNotFound(
            f"{directory / _INDEX} names {', '.join(missing)}, not found in {directory}; "
            "fetch the missing shards"
        )
    headers = {name: read_header(directory / name) for name in files}
    problems = [
        _misplaced(tensor, file, headers)
        for tensor, file in weight_map.items()
        if tensor not in headers[file]
    ]
    if problems:
        raise CheckpointMismatch(f"{directory / _INDEX}: {'; '.join(problems)}")
    for file, header in headers.items():
        extra = [tensor for tensor in header if weight_map.get(tensor) != file]
        if extra:
            warnings.append(f"ignored in {file}, not mapped to it by the index: {_list(extra)}")
    return {tensor: headers[file][tensor] for tensor, file in weight_map.items()}


def _misplaced(tensor: str, file: str, headers: Mapping[str, Mapping[str, TensorInfo]]) -> str:
    holders = [name for name, header in headers.items() if tensor in header]
    where = f"it is in {' and '.join(holders)}" if holders else "no shard of the index has it"
    return f"tensor {tensor} is mapped to {file}, but {where}"


def _without_weights(directory: Path) -> str:
    message = f"{directory} has neither {_SINGLE} nor {_INDEX}"
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    if pickles:
        message += f"; {_list(pickles)} cannot be read, convert the model to safetensors"
    return message


def _list(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"


def _read_json(path: Path, kind: type[T]) -> T:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CheckpointNotFound(f"{path} does not exist") from error
    except OSError as error:
        raise CheckpointNotFound(f"cannot read {path}: {error.strerror}") from error
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointMismatch(f"{path}: {error}") from error
