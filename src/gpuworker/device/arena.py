"""Layer 1. A fixed address range on a CPU whose physical pages come and go."""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from gpuworker.device.memory import MemoryReader
from gpuworker.device.proc_memory import ProcMemoryReader
from gpuworker.errors import DeviceFault, OutOfDeviceMemory
from gpuworker.messages import Tag

__all__ = ["Arena"]

# Constants of the Linux ABI that the mmap module does not name.
_PROT_NONE = 0
_MAP_NORESERVE = 0x4000
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_DONTDUMP = 16
_MADV_POPULATE_WRITE = 23
_MAP_FAILED = 2**64 - 1

_HUGE_PAGE_BYTES = 2 << 20
_MINCORE_BYTES = 1 << 30
"""Range per mincore call; its answer has a byte per page."""
_MAX_THREADS = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_size_t
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]


class Arena:
    """One reserved address range; map gives it zeroed pages, unmap takes them back.

    The address never changes, so tensors from view stay valid across unmap and map; only their
    contents are lost. While unmapped the range is protected: a stray access ends the process
    with a segmentation fault instead of computing with zeros (mprotect, microseconds per call).
    The range itself lives as long as any view of it, even after close.

    Huge pages are asked for: on the machine that this was measured on they halve the time of
    map, cut that of unmap to a tenth, and are neutral for matrix products. map populates from
    several threads, which is faster still.

    map, unmap and close belong to the device thread; everything else may be called from any.
    """

    def __init__(self, tag: Tag, reserved_bytes: int, reader: MemoryReader | None = None) -> None:
        """Reserve addresses for reserved_bytes (rounded up to pages); no memory is used yet.

        reader says what is available; None reads it from the system. Raises OutOfDeviceMemory
        when the addresses cannot be had.
        """
        if reserved_bytes < 1:
            raise ValueError(f"reserved_bytes is {reserved_bytes}; an arena needs at least 1")
        self.tag: Tag = tag
        self.reserved_bytes = _round_up(reserved_bytes, mmap.PAGESIZE)
        self._reader = reader if reader is not None else ProcMemoryReader()
        self._mapped_bytes = 0
        self._range: ctypes.Array[ctypes.c_ubyte] | None = _reserve(self.reserved_bytes)
        self.address = ctypes.addressof(self._range)
        self._lock = threading.Lock()

    @property
    def mapped_bytes(self) -> int:
        """Size of the accessible part from the start of the range; 0 while unmapped."""
        return self._mapped_bytes

    def map(self, num_bytes: int) -> None:
        """Make the first num_bytes (rounded up to pages) present and zero.

        Raises OutOfDeviceMemory before a page is touched when less is available, and after
        giving everything back when the kernel refuses on the way.
        """
        wanted_bytes = _round_up(num_bytes, mmap.PAGESIZE)
        if self._mapped_bytes or self._range is None:
            raise ValueError(f"the {self.tag} arena is mapped or closed; unmap it first")
        if not 1 <= num_bytes <= self.reserved_bytes:
            raise ValueError(f"num_bytes is {num_bytes}; it must be in [1, {self.reserved_bytes}]")
        available_bytes = self._reader.available_bytes()
        if wanted_bytes > available_bytes:
            raise OutOfDeviceMemory(
                f"the {self.tag} arena needs {wanted_bytes} bytes, {available_bytes} are "
                "available; use a smaller model or KV cache, or free memory of other processes"
            )
        try:
            _check(_libc.mprotect(self.address, wanted_bytes, mmap.PROT_READ | mmap.PROT_WRITE))
            _populate(self._range, self.address, wanted_bytes)
        except OSError as error:
            self._give_back(wanted_bytes)
            raise OutOfDeviceMemory(
                f"the {self.tag} arena cannot map {wanted_bytes} bytes: {error.strerror}; "
                "use a smaller model or KV cache, or free memory of other processes"
            ) from error
        self._mapped_bytes = wanted_bytes

    def unmap(self) -> None:
        """Give every page back; the contents are lost, the address stays. Idempotent.

        Raises DeviceFault when the kernel keeps them.
        """
        if self._mapped_bytes:
            self._give_back(self._mapped_bytes)
            self._mapped_bytes = 0

    def resident_bytes(self) -> int:
        """Count the pages of the whole range that are physically present (mincore)."""
        num_pages = 0
        with self._lock:
            if self._range is None:
                return 0
            for offset in range(0, self.reserved_bytes, _MINCORE_BYTES):
                length = min(_MINCORE_BYTES, self.reserved_bytes - offset)
                present = np.zeros(length // mmap.PAGESIZE, dtype=np.uint8)
                _check(_libc.mincore(self.address + offset, length, present.ctypes.data))
                num_pages += int(np.count_nonzero(present & 1))
        return num_pages * mmap.PAGESIZE

    def view(self, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a writable tensor over the range, without a copy.

        It may be taken before map; touching it needs the pages to be mapped. Raises ValueError
        when it leaves the range or the offset is no multiple of the element size.
        """
        size = torch.Size(shape)
        num_bytes = size.numel() * dtype.itemsize
        if offset_bytes < 0 or offset_bytes + num_bytes > self.reserved_bytes:
            raise ValueError(
                f"a view of {num_bytes} bytes at {offset_bytes} leaves the {self.tag} arena of "
                f"{self.reserved_bytes} bytes"
            )
        if offset_bytes % dtype.itemsize:
            raise ValueError(
                f"offset {offset_bytes} is no multiple of the {dtype.itemsize} bytes of {dtype}"
            )
        if num_bytes == 0:
            return torch.empty(size, dtype=dtype)
        flat = torch.frombuffer(
            self._open_range(), dtype=dtype, count=size.numel(), offset=offset_bytes
        )
        return flat.view(size)

    def memory(self) -> memoryview:
        """Return the mapped bytes as a writable buffer."""
        return memoryview(self._open_range()).cast("B")[: self._mapped_bytes]

    def close(self) -> None:
        """Unmap, and release the range once no view of it is left. Idempotent."""
        self.unmap()
        with self._lock:
            self._range = None

    def _open_range(self) -> ctypes.Array[ctypes.c_ubyte]:
        if self._range is None:
            raise ValueError(f"the {self.tag} arena is closed")
        return self._range

    def _give_back(self, num_bytes: int) -> None:
        try:
            _check(_libc.madvise(self.address, num_bytes, _MADV_DONTNEED))
            _check(_libc.mprotect(self.address, num_bytes, _PROT_NONE))
        except OSError as error:
            raise DeviceFault(
                f"the {self.tag} arena cannot give {num_bytes} bytes back: {error.strerror}; "
                "locked memory (mlockall) cannot be released"
            ) from error


def _round_up(num_bytes: int, unit: int) -> int:
    return -(-num_bytes // unit) * unit


def _check(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _reserve(num_bytes: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Reserve protected addresses that start at a huge page; freed with the last reference."""
    length = num_bytes + _HUGE_PAGE_BYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    base = _libc.mmap(None, length, _PROT_NONE, flags, -1, 0)
    if base == _MAP_FAILED:
        raise OutOfDeviceMemory(
            f"cannot reserve {num_bytes} bytes of addresses: {os.strerror(ctypes.get_errno())}; "
            "raise the address space limit (ulimit -v) or use a smaller model or KV cache"
        )
    address = _round_up(base, _HUGE_PAGE_BYTES)
    # Both are wishes: a kernel without them answers EINVAL and works all the same.
    _libc.madvise(address, num_bytes, _MADV_HUGEPAGE)
    _libc.madvise(address, num_bytes, _MADV_DONTDUMP)
    reserved = (ctypes.c_ubyte * num_bytes).from_address(address)
    release = weakref.finalize(reserved, _libc.munmap, base, length)
    # At exit views may still be in use by other threads; the kernel cleans up.
    release.atexit = False
    return reserved


def _populate(reserved: ctypes.Array[ctypes.c_ubyte], address: int, num_bytes: int) -> None:
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    share = _round_up(math.ceil(num_bytes / num_threads), _HUGE_PAGE_BYTES)
    starts = range(0, num_bytes, share)

    def populate(start: int) -> None:
        length = min(share, num_bytes - start)
        try:
            _check(_libc.madvise(address + start, length, _MADV_POPULATE_WRITE))
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Kernels before 5.14: writing to a page makes it present, too.
            share_of_range = memoryview(reserved)[start : start + length]
            np.frombuffer(share_of_range, np.uint8)[:: mmap.PAGESIZE] = 0

    _in_threads(populate, starts)


def _in_threads(call: Callable[[int], None], starts: range) -> None:
    if len(starts) <= 1:
        for start in starts:
            call(start)
        return
    with ThreadPoolExecutor(len(starts), thread_name_prefix="populate") as pool:
        for _ in pool.map(call, starts):
            pass
