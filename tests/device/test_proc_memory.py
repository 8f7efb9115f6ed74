"""Memory numbers from proc and cgroup files."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from gpuworker.device.memory import MemoryReader, take_snapshot
from gpuworker.device.proc_memory import ProcMemoryReader

KIB = 1024
MIB = 1 << 20


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A machine of 1000 KiB, 600 of them available, without cgroup limits."""
    own = tmp_path / "proc" / "self"
    own.mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemAvailable:  600 kB\n")
    (own / "status").write_text("Name:\tx\nVmHWM:\t 90 kB\nVmRSS:\t 50 kB\n")
    (own / "cgroup").write_text("0::/\n")
    return tmp_path


def _reader(tree: Path) -> ProcMemoryReader:
    return ProcMemoryReader(tree / "proc", tree / "cgroup")


def _group(tree: Path, path: str, **files: str) -> None:
    directory = tree / "cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_without_limits_the_machine_counts(tree: Path) -> None:
    reader = _reader(tree)
    assert (reader.total_bytes(), reader.available_bytes()) == (1000 * KIB, 600 * KIB)
    assert (reader.process_bytes(), reader.peak_bytes()) == (50 * KIB, 90 * KIB)


def test_the_smallest_limit_of_the_v2_hierarchy_counts(tree: Path) -> None:
    (tree / "proc" / "self" / "cgroup").write_text("0::/outer/inner\n")
    _group(tree, "outer/inner", memory__max="max\n", memory__current="100000\n")
    _group(
        tree,
        "outer",
        memory__max="400000\n",
        memory__current="300000\n",
        memory__stat="anon 100000\ninactive_file 30000\nactive_file 20000\n",
    )
    assert _reader(tree).total_bytes() == 400_000
    # File cache is taken back on demand, so it counts as room.
    assert _reader(tree).available_bytes() == 400_000 - 300_000 + 50_000


def test_a_v1_limit_counts_and_its_huge_default_does_not(tree: Path) -> None:
    (tree / "proc" / "self" / "cgroup").write_text("3:cpu:/a\n4:memory:/a/b\n0::/\n")
    _group(
        tree,
        "memory/a/b",
        memory__limit_in_bytes="9223372036854771712\n",
        memory__usage_in_bytes="5\n",
        memory__stat="",
    )
    assert _reader(tree).total_bytes() == 1000 * KIB
    _group(
        tree,
        "memory/a",
        memory__limit_in_bytes="500000\n",
        memory__usage_in_bytes="450000\n",
        memory__stat="inactive_file 1\ntotal_inactive_file 10000\ntotal_active_file 0\n",
    )
    assert _reader(tree).total_bytes() == 500_000
    assert _reader(tree).available_bytes() == 60_000


def test_inside_a_container_the_mounts_root_is_the_group(tree: Path) -> None:
    (tree / "proc" / "self" / "cgroup").write_text("0::/host/only/path\n")
    _group(tree, "", memory__max="200000\n", memory__current="250000\n", memory__stat="")
    assert _reader(tree).total_bytes() == 200_000
    assert _reader(tree).available_bytes() == 0


def _touch(num_bytes: int) -> None:
    with mmap.mmap(-1, num_bytes) as block:
        for offset in range(0, num_bytes, mmap.PAGESIZE):
            block[offset] = 1


def test_the_real_numbers_are_plausible() -> None:
    reader: MemoryReader = ProcMemoryReader()
    snapshot = take_snapshot(reader)
    assert 0 < snapshot.process_bytes <= snapshot.peak_bytes < snapshot.total_bytes
    assert 0 < snapshot.available_bytes <= snapshot.total_bytes


def test_the_peak_covers_memory_that_is_gone_and_resets() -> None:
    reader = ProcMemoryReader()
    reader.reset_peak()
    before = reader.process_bytes()
    _touch(64 * MIB)
    assert reader.peak_bytes() - before > 60 * MIB
    reader.reset_peak()
    assert reader.peak_bytes() - reader.process_bytes() < 16 * MIB


def test_without_clear_refs_the_peak_is_sampled(tmp_path: Path) -> None:
    proc = tmp_path / "proc"
    (proc / "self" / "clear_refs").mkdir(parents=True)
    for name in ("status", "statm"):
        (proc / "self" / name).symlink_to(f"/proc/self/{name}")
    reader = ProcMemoryReader(proc)
    reader.reset_peak()
    before = reader.process_bytes()
    block = mmap.mmap(-1, 64 * MIB)
    for offset in range(0, 64 * MIB, mmap.PAGESIZE):
        block[offset] = 1
    peak = reader.peak_bytes()
    block.close()
    assert peak - before > 60 * MIB
    assert reader.peak_bytes() == peak
    reader.reset_peak()
    assert reader.peak_bytes() - reader.process_bytes() < 16 * MIB


def test_a_field_the_kernel_lacks_is_named(tree: Path) -> None:
    (tree / "proc" / "meminfo").write_text("MemTotal: 1000 kB\n")
    with pytest.raises(OSError, match="MemAvailable"):
        _reader(tree).available_bytes()
