"""A model directory is checked before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gpuworker.errors import CheckpointMismatch, CheckpointNotFound
from gpuworker.model.checkpoint import open_checkpoint, read_config, read_eos_token_ids
from gpuworker.model.safetensors_header import read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARDS = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]


def _tensor(name: str) -> torch.Tensor:
    return torch.full((2, 3), float(ord(name)))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "tiny", "eos_token_id": 7}')
    save_file({"a": _tensor("a"), "b": torch.zeros(5, dtype=torch.bfloat16)}, tmp_path / SINGLE)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Tensors a to f, two per shard."""
    (tmp_path / "config.json").write_text("{}")
    weight_map = {}
    for shard, names in zip(SHARDS, ("ab", "cd", "ef"), strict=True):
        save_file({name: _tensor(name) for name in names}, tmp_path / shard)
        weight_map |= dict.fromkeys(names, shard)
    _write_index(tmp_path, weight_map)
    return tmp_path


def _write_index(directory: Path, weight_map: dict[str, str]) -> None:
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _read_index(directory: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((directory / INDEX).read_text())["weight_map"]
    return weight_map


def test_a_single_file_is_read(single: Path) -> None:
    checkpoint = open_checkpoint(single)
    assert checkpoint.config == {"model_type": "tiny", "eos_token_id": 7}
    assert checkpoint.warnings == ()
    a, b = checkpoint.tensors["a"], checkpoint.tensors["b"]
    assert (a.shape, a.dtype, a.num_bytes) == ((2, 3), torch.float32, 24)
    assert (b.shape, b.dtype, b.num_bytes) == ((5,), torch.bfloat16, 10)
    data = a.file.read_bytes()[a.start : a.start + a.num_bytes]
    assert torch.frombuffer(bytearray(data), dtype=torch.float32).tolist() == [97.0] * 6


def test_shards_are_read(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    assert {name: info.file.name for name, info in checkpoint.tensors.items()} == _read_index(
        sharded
    )
    assert checkpoint.warnings == ()


# B34


def test_b34_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(CheckpointNotFound, match=SHARDS[1]):
        open_checkpoint(sharded)


def test_b34_a_renamed_shard_is_named(sharded: Path) -> None:
    (sharded / SHARDS[1]).rename(sharded / "part2.safetensors")
    with pytest.raises(CheckpointNotFound, match=SHARDS[1]):
        open_checkpoint(sharded)


def test_b34_a_tensor_mapped_to_the_wrong_file_names_both(sharded: Path) -> None:
    _write_index(sharded, _read_index(sharded) | {"a": SHARDS[1], "c": SHARDS[2]})
    with pytest.raises(CheckpointMismatch) as caught:
        open_checkpoint(sharded)
    assert f"c is mapped to {SHARDS[2]}, but it is in {SHARDS[1]}" in caught.value.message
    assert f"a is mapped to {SHARDS[1]}, but it is in {SHARDS[0]}" in caught.value.message


def test_b34_a_tensor_in_no_shard_is_named(sharded: Path) -> None:
    _write_index(sharded, _read_index(sharded) | {"x": SHARDS[0]})
    with pytest.raises(CheckpointMismatch, match=r"x is mapped to .* but no shard of the"):
        open_checkpoint(sharded)


def test_b34_a_stale_shard_is_ignored_with_a_warning(sharded: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "z": torch.zeros(1)}, sharded / "stale.safetensors")
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.tensors["a"].file.name == SHARDS[0]
    assert "z" not in checkpoint.tensors
    assert len(checkpoint.warnings) == 1
    assert "stale.safetensors" in checkpoint.warnings[0]


def test_a_copy_in_another_shard_is_ignored_with_a_warning(sharded: Path) -> None:
    save_file({"c": _tensor("c"), "d": _tensor("d"), "a": torch.zeros(1)}, sharded / SHARDS[1])
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.tensors["a"].file.name == SHARDS[0]
    assert f"ignored in {SHARDS[1]}, not mapped to it by the index: a" in checkpoint.warnings[0]


def test_a_single_file_wins_over_an_index(sharded: Path) -> None:
    save_file({"s": torch.zeros(1)}, sharded / SINGLE)
    checkpoint = open_checkpoint(sharded)
    assert list(checkpoint.tensors) == ["s"]
    assert all(shard in checkpoint.warnings[0] for shard in SHARDS)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "sub/x.safetensors"])
def test_an_index_stays_in_its_directory(sharded: Path, name: str) -> None:
    _write_index(sharded, {"a": name})
    with pytest.raises(CheckpointMismatch, match="outside its directory"):
        open_checkpoint(sharded)


# Directories and JSON


def test_missing_things_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointNotFound, match=r"config\.json does not exist"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointNotFound, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointNotFound, match=r"pytorch_model\.bin cannot be read, convert"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"a": 1,}', "\xff", "[" * 100_000])
def test_a_broken_config_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointMismatch, match=r"config\.json"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": {"a": 1}}', "{"])
def test_a_broken_index_is_named(sharded: Path, text: str) -> None:
    (sharded / INDEX).write_text(text)
    with pytest.raises(CheckpointMismatch, match=r"index\.json"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (7,)),
        ("{}", (7,)),
        ('{"eos_token_id": null}', (7,)),
        ('{"eos_token_id": 2, "bos_token_id": 1}', (2,)),
        ('{"eos_token_id": [3, 4]}', (3, 4)),
    ],
)
def test_eos_ids_come_from_the_generation_config_first(
    single: Path, generation: str | None, expected: tuple[int, ...]
) -> None:
    if generation is not None:
        (single / "generation_config.json").write_text(generation)
    assert open_checkpoint(single).eos_token_ids == expected


def test_a_model_may_have_no_eos_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert read_eos_token_ids(tmp_path) == ()


def test_a_wrong_eos_id_is_named(single: Path) -> None:
    (single / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(CheckpointMismatch, match=r"generation_config\.json.*eos_token_id"):
        open_checkpoint(single)


# The header of one file


def _write(path: Path, header: object, data: bytes, *, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    size = len(text) if length is None else length
    path.write_bytes(size.to_bytes(8, "little") + text + data)


def _entry(begin: int, end: int, shape: list[int], dtype: str = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_a_truncated_file_is_found_with_both_sizes(single: Path) -> None:
    data = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(data[:-4])
    with pytest.raises(CheckpointMismatch) as caught:
        open_checkpoint(single)
    assert f"truncated: expected {len(data)} bytes, found {len(data) - 4}" in caught.value.message
    assert SINGLE in caught.value.message


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 40])
def test_a_file_cut_inside_its_header_is_found(single: Path, num_bytes: int) -> None:
    data = (single / SINGLE).read_bytes()
    (single / SINGLE).write_bytes(data[:num_bytes])
    with pytest.raises(CheckpointMismatch, match=SINGLE):
        open_checkpoint(single)


def test_trailing_bytes_are_found(single: Path) -> None:
    with (single / SINGLE).open("ab") as file:
        file.write(b"x")
    with pytest.raises(CheckpointMismatch, match="longer than its header says"):
        open_checkpoint(single)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: _write(p, {"a": _entry(0, 4, [1], "Q4_1")}, b"1234"), "a has dtype Q4_1"),
        (lambda p: _write(p, {"a": _entry(0, 4, [2])}, b"1234"), "needs 8 bytes.* gives it 4"),
        (lambda p: _write(p, {"a": _entry(4, 0, [1])}, b"1234"), "needs 4 bytes.* gives it -4"),
        (
            lambda p: _write(p, {"a": _entry(0, 8, [2]), "b": _entry(4, 12, [2])}, b"0" * 12),
            "a and b overlap",
        ),
        (lambda p: _write(p, {"a": _entry(0, 4, [-1])}, b"1234"), "broken header"),
        (lambda p: _write(p, {"a": {"dtype": "F32"}}, b"1234"), "broken header"),
        (lambda p: _write(p, b"{not json", b""), "broken header"),
        (lambda p: _write(p, b'{"a": "\xff"}', b""), "broken header"),
        (lambda p: _write(p, [1], b""), "broken header"),
        (lambda p: _write(p, {}, b"", length=2**63), "is no safetensors file or is truncated"),
    ],
)
def test_a_broken_header_is_explained(
    tmp_path: Path, write: Callable[[Path], None], message: str
) -> None:
    path = tmp_path / SINGLE
    write(path)
    with pytest.raises(CheckpointMismatch, match=message) as caught:
        read_header(path)
    assert str(path) in caught.value.message


def test_metadata_scalars_and_empty_tensors_are_fine(tmp_path: Path) -> None:
    path = tmp_path / SINGLE
    header = {
        "__metadata__": {"format": "pt"},
        "empty": _entry(0, 0, [0, 5]),
        "scalar": _entry(0, 4, []),
        "after": _entry(4, 8, [1]),
    }
    _write(path, header, b"0" * 8)
    assert {name: info.shape for name, info in read_header(path).items()} == {
        "empty": (0, 5),
        "scalar": (),
        "after": (1,),
    }


def test_every_dtype_of_torch_that_can_be_saved_is_read(tmp_path: Path) -> None:
    dtypes = (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32),
        *(torch.uint32, torch.int64, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    )
    save_file({str(d): torch.zeros(3).to(d) for d in dtypes}, tmp_path / SINGLE)
    assert {name: str(info.dtype) for name, info in read_header(tmp_path / SINGLE).items()} == {
        str(d): str(d) for d in dtypes
    }
