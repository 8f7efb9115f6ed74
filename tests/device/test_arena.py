"""One address range whose pages come and go."""

from __future__ import annotations

import mmap
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpuworker.device import arena as arena_module
from gpuworker.device.arena import Arena
from gpuworker.device.proc_memory import ProcMemoryReader
from gpuworker.errors import OutOfDeviceMemory

PAGE = mmap.PAGESIZE
MIB = 1 << 20


class FixedReader(ProcMemoryReader):
    """Says that a fixed amount is available."""

    def __init__(self, available_bytes: int) -> None:
        super().__init__()
        self._available_bytes = available_bytes

    def available_bytes(self) -> int:
        return self._available_bytes


def _run(script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )


def test_nothing_is_resident_before_map() -> None:
    arena = Arena("weights", 3 * MIB)
    assert (arena.reserved_bytes, arena.mapped_bytes, arena.resident_bytes()) == (3 * MIB, 0, 0)


@pytest.mark.parametrize("num_bytes", [1, PAGE, PAGE + 1, 2 * MIB, 5 * MIB + 7])
def test_map_makes_exactly_the_rounded_bytes_present(num_bytes: int) -> None:
    arena = Arena("kv_cache", 8 * MIB)
    arena.map(num_bytes)
    rounded = -(-num_bytes // PAGE) * PAGE
    assert arena.mapped_bytes == arena.resident_bytes() == rounded
    arena.unmap()
    assert arena.mapped_bytes == arena.resident_bytes() == 0


def test_views_stay_valid_and_come_back_zeroed() -> None:
    arena = Arena("weights", 4 * MIB)
    view = arena.view(256, (1000,), torch.bfloat16)
    address = view.data_ptr()
    assert address == arena.address + 256
    for value in (1.5, -2.0):
        arena.map(4 * MIB)
        assert torch.count_nonzero(view) == 0
        view.fill_(value)
        assert (view == value).all()
        assert view.data_ptr() == address
        arena.unmap()


def test_views_of_the_same_bytes_share_them() -> None:
    arena = Arena("weights", PAGE)
    arena.map(PAGE)
    arena.view(8, (2, 2), torch.float32).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert arena.view(12, (2,), torch.float32).tolist() == [2.0, 3.0]
    assert bytes(arena.memory()[:8]) == bytes(8)
    assert len(arena.memory()) == PAGE


def test_unmap_gives_memory_of_the_process_back() -> None:
    reader = ProcMemoryReader()
    arena = Arena("weights", 256 * MIB)
    before = reader.process_bytes()
    arena.map(256 * MIB)
    mapped = reader.process_bytes()
    arena.unmap()
    after = reader.process_bytes()
    assert mapped - before > 200 * MIB
    assert mapped - after > 200 * MIB


def test_map_refuses_before_it_touches_a_page() -> None:
    arena = Arena("weights", 8 * MIB, FixedReader(4 * MIB))
    with pytest.raises(OutOfDeviceMemory, match=rf"{8 * MIB} bytes, {4 * MIB} are available"):
        arena.map(8 * MIB)
    assert arena.mapped_bytes == arena.resident_bytes() == 0
    arena.map(4 * MIB)
    assert arena.resident_bytes() == 4 * MIB


def test_a_refusal_of_the_kernel_gives_everything_back() -> None:
    done = _run(
        """
import resource
from gpuworker.device.arena import Arena
from gpuworker.errors import OutOfDeviceMemory
arena = Arena("weights", 1 << 30)
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
in_use = int(status["VmData"].split()[0]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (in_use + (64 << 20), resource.RLIM_INFINITY))
try:
    arena.map(1 << 30)
except OutOfDeviceMemory as error:
    print(arena.mapped_bytes, arena.resident_bytes(), error)
"""
    )
    assert done.stdout.startswith("0 0 the weights arena cannot map"), done.stderr


def test_addresses_that_do_not_exist_are_refused() -> None:
    with pytest.raises(OutOfDeviceMemory, match="cannot reserve"):
        Arena("weights", 1 << 60)


def test_touching_an_unmapped_arena_ends_the_process() -> None:
    done = _run(
        """
import torch
from gpuworker.device.arena import Arena
arena = Arena("weights", 1 << 20)
view = arena.view(0, (4,), torch.float32)
arena.map(1 << 20)
view.fill_(1)
arena.unmap()
print("sum", flush=True)
print(view.sum(), flush=True)
"""
    )
    assert done.stdout == "sum\n"
    assert done.returncode == -signal.SIGSEGV


def test_kernels_without_populate_touch_every_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", 9999)
    arena = Arena("weights", 5 * MIB)
    arena.map(5 * MIB)
    assert arena.resident_bytes() == 5 * MIB


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda a: a.view(-4, (1,), torch.float32), "leaves the weights arena"),
        (lambda a: a.view(PAGE - 4, (2,), torch.float32), "leaves the weights arena"),
        (lambda a: a.view(2, (1,), torch.float32), "no multiple of the 4 bytes"),
        (lambda a: a.map(0), r"must be in \[1, "),
        (lambda a: a.map(PAGE + 1), r"must be in \[1, "),
        (lambda a: (a.map(PAGE), a.map(PAGE)), "unmap it first"),
        (lambda a: (a.close(), a.map(PAGE)), "mapped or closed"),
        (lambda a: (a.close(), a.view(0, (1,), torch.uint8)), "closed"),
    ],
)
def test_misuse_is_refused(call: Callable[[Arena], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Arena("weights", PAGE))


def test_an_arena_of_no_bytes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Arena("weights", 0)


def test_a_view_without_elements_is_a_tensor() -> None:
    assert Arena("weights", PAGE).view(PAGE, (0, 3), torch.float32).shape == (0, 3)


def _is_reserved(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def test_close_keeps_the_addresses_while_a_view_lives() -> None:
    arena = Arena("weights", 64 * MIB)
    arena.map(MIB)
    view = arena.view(MIB, (4,), torch.float32)
    address = view.data_ptr()
    arena.close()
    arena.close()
    assert arena.resident_bytes() == 0
    assert _is_reserved(address)
    del view
    assert not _is_reserved(address)


def test_unmap_of_an_unmapped_arena_does_nothing() -> None:
    arena = Arena("weights", PAGE)
    arena.unmap()
    arena.map(PAGE)
    arena.unmap()
    arena.unmap()
    assert arena.resident_bytes() == 0


def test_an_error_of_any_populating_thread_is_reported() -> None:
    # A hole at the end of the range fails the last thread only.
    done = _run(
        """
import os
from gpuworker.device import arena as module
from gpuworker.errors import OutOfDeviceMemory
os.sched_getaffinity = lambda _pid: set(range(4))
arena = module.Arena("weights", 16 << 20)
arena._give_back = lambda num_bytes: print("gave back", num_bytes)
real = module._libc.mprotect
module._libc.munmap(arena.address + (12 << 20), 4 << 20)
module._libc.mprotect = lambda a, n, p: real(a, 12 << 20, p)
try:
    arena.map(16 << 20)
except OutOfDeviceMemory as error:
    print(error, flush=True)
os._exit(0)
"""
    )
    assert done.stdout.startswith("gave back 16777216\nthe weights arena cannot map"), done.stderr
