"""Layer 1. The block pool: the KV arena and the caches laid over it."""

from __future__ import annotations

from collections.abc import Sequence

from gpuworker.device.arena import Arena
from gpuworker.device.memory import MemoryReader
from gpuworker.kernels.batch import LayerKV
from gpuworker.messages import MemoryUse
from gpuworker.runner.kv_cache import KVLayer, bind, kv_cache_bytes

__all__ = ["KVPool"]


class KVPool:
    """Owns the KV arena of a rank.

    caches keep their addresses while the memory comes and goes. Belongs to the device thread;
    memory may be called from any.
    """

    def __init__(
        self,
        layers: Sequence[KVLayer],
        num_blocks: int,
        block_size: int,
        reader: MemoryReader,
    ) -> None:
        """Map a zeroed pool; raises OutOfDeviceMemory and leaves nothing behind."""
        self.num_blocks = num_blocks
        self.num_bytes = kv_cache_bytes(layers, num_blocks, block_size)
        self._arena = Arena("kv_cache", self.num_bytes, reader)
        try:
            self._arena.map(self.num_bytes)
            self.caches: tuple[LayerKV, ...] = bind(
                self._arena.view, layers, num_blocks, block_size
            )
        except BaseException:
            self.close()
            raise

    @property
    def is_resident(self) -> bool:
        """Whether the pool has memory."""
        return self._arena.mapped_bytes > 0

    def memory(self) -> MemoryUse:
        """Measure the arena."""
        return MemoryUse(
            tag="kv_cache",
            reserved_bytes=self._arena.reserved_bytes,
            mapped_bytes=self._arena.mapped_bytes,
            resident_bytes=self._arena.resident_bytes(),
        )

    def release(self) -> bool:
        """Give the memory back and lose its contents; False when that was done already."""
        if not self.is_resident:
            return False
        self._arena.unmap()
        return True

    def resume(self) -> bool:
        """Map the memory again, zeroed; False when the pool is resident already."""
        if self.is_resident:
            return False
        self._arena.map(self.num_bytes)
        return True

    def close(self) -> None:
        """Give everything back for good."""
        self._arena.close()
