"""An arena's contents outside memory."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gpuworker.device import spill as spill_module
from gpuworker.device.arena import Arena
from gpuworker.device.spill import Spill
from gpuworker.errors import SpillFailed

SIZE = 300_000


@pytest.fixture
def arena(monkeypatch: pytest.MonkeyPatch) -> Arena:
    # Several chunks even for a small arena.
    monkeypatch.setattr(spill_module, "_CHUNK_BYTES", 5 * 4096)
    arena = Arena("weights", SIZE)
    arena.map(SIZE)
    _fill(arena, seed=0)
    return arena


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[Spill]:
    spill = Spill(tmp_path)
    yield spill
    spill.drop()


def _view(arena: Arena) -> torch.Tensor:
    return arena.view(0, (arena.mapped_bytes,), torch.uint8)


def _fill(arena: Arena, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    view = _view(arena).random_(0, 256, generator=generator)
    return view.clone()


def test_contents_survive_unmap_and_map(arena: Arena, spill: Spill) -> None:
    expected = _view(arena).clone()
    assert spill.save(arena, 3) == arena.mapped_bytes
    arena.unmap()
    arena.map(SIZE)
    spill.restore(arena)
    assert torch.equal(_view(arena), expected)
    assert spill.kept_version() == 3
    assert spill.num_bytes == arena.mapped_bytes


def test_a_kept_version_is_not_written_again(arena: Arena, spill: Spill) -> None:
    first = _view(arena).clone()
    spill.save(arena, 1)
    _fill(arena, seed=1)
    assert spill.save(arena, 1) == 0
    spill.restore(arena)
    assert torch.equal(_view(arena), first)


def test_a_new_version_replaces_the_kept_one(arena: Arena, spill: Spill) -> None:
    spill.save(arena, 1)
    second = _fill(arena, seed=1)
    assert spill.save(arena, 2) == arena.mapped_bytes
    _view(arena).zero_()
    spill.restore(arena)
    assert torch.equal(_view(arena), second)
    assert spill.kept_version() == 2


def test_the_file_has_no_name(arena: Arena, spill: Spill, tmp_path: Path) -> None:
    spill.save(arena, 1)
    assert list(tmp_path.iterdir()) == []


def test_drop_forgets(arena: Arena, spill: Spill) -> None:
    spill.save(arena, 1)
    spill.drop()
    spill.drop()
    assert (spill.kept_version(), spill.num_bytes) == (None, 0)
    with pytest.raises(SpillFailed, match="no copy of weights is kept"):
        spill.restore(arena)
    assert spill.save(arena, 1) == arena.mapped_bytes


def test_too_little_space_is_found_before_writing(
    arena: Arena, spill: Spill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _path: SimpleNamespace(f_bavail=2, f_frsize=4096))
    monkeypatch.delattr(os, "pwrite")
    with pytest.raises(SpillFailed) as caught:
        spill.save(arena, 1)
    for part in (str(tmp_path), "8192 bytes free", f"{arena.mapped_bytes} are needed", "spill_dir"):
        assert part in caught.value.message
    assert spill.kept_version() is None


def test_a_disk_that_fills_up_leaves_no_torn_copy(
    arena: Arena, spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill.save(arena, 1)
    contents = _fill(arena, seed=1)
    written = []
    pwrite = os.pwrite

    def failing(fd: int, data: memoryview, offset: int) -> int:
        if len(written) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written.append(offset)
        return pwrite(fd, data, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", failing)
        with pytest.raises(SpillFailed, match="No space left"):
            spill.save(arena, 2)
    assert (spill.kept_version(), spill.num_bytes) == (None, 0)
    assert torch.equal(_view(arena), contents)
    assert spill.save(arena, 2) == arena.mapped_bytes


def test_a_partial_write_is_continued(
    arena: Arena, spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: pwrite(fd, data[:4096], offset))
    expected = _view(arena).clone()
    spill.save(arena, 1)
    _view(arena).zero_()
    spill.restore(arena)
    assert torch.equal(_view(arena), expected)


def test_a_missing_directory_is_named(arena: Arena, tmp_path: Path) -> None:
    spill = Spill(tmp_path / "gone")
    with pytest.raises(SpillFailed, match=r"gone.*No such file"):
        spill.save(arena, 1)
    assert spill.kept_version() is None


def test_restore_needs_enough_mapped_bytes(arena: Arena, spill: Spill) -> None:
    spill.save(arena, 1)
    arena.unmap()
    with pytest.raises(SpillFailed, match="0 bytes mapped"):
        spill.restore(arena)
    assert spill.kept_version() == 1


def test_a_shortened_file_is_reported(
    arena: Arena, spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    spill.save(arena, 1)
    preadv = os.preadv

    def ending_early(fd: int, buffers: list[memoryview], offset: int) -> int:
        return 0 if offset > 100_000 else preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", ending_early)
    with pytest.raises(SpillFailed, match="shorter than what was written"):
        spill.restore(arena)


@pytest.mark.parametrize(
    ("in_memory", "expected"),
    [((), "/some/tmp"), (("/some/tmp",), "/var/tmp"), (("/some/tmp", "/var/tmp"), "/some/tmp")],
)
def test_a_temp_dir_in_memory_is_avoided(
    in_memory: tuple[str, ...], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/some/tmp")
    monkeypatch.setattr(spill_module, "_is_in_memory", lambda path: str(path) in in_memory)
    assert Spill().directory == Path(expected)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs mount")
def test_a_tmpfs_is_recognised() -> None:
    assert spill_module._is_in_memory(Path("/dev/shm"))
    assert not spill_module._is_in_memory(Path("/proc"))


def test_a_file_system_without_direct_io_is_used_all_the_same(
    arena: Arena, spill: Spill, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_fd: int, command: int, _flags: int = 0) -> int:
        if command == fcntl.F_SETFL:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    expected = _view(arena).clone()
    spill.save(arena, 1)
    _view(arena).zero_()
    spill.restore(arena)
    assert torch.equal(_view(arena), expected)


def test_only_the_mapped_bytes_are_kept(spill: Spill) -> None:
    arena = Arena("weights", 1 << 20)
    arena.map(5000)
    assert spill.save(arena, 1) == 8192
    arena.unmap()
    arena.map(1 << 20)
    _view(arena).fill_(1)
    spill.restore(arena)
    assert (_view(arena)[:8192] == 0).all()
    assert (_view(arena)[8192:] == 1).all()
