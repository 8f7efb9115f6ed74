"""Layer 5. The scheduler's books of the KV cache: who owns which block, and what it holds."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np

from gpuworker.engine.free_runs import FreeRuns
from gpuworker.errors import InvalidRequest

__all__ = ["BlockPool", "BlockPoolStatistics", "block_hash", "root_hash"]

_DIGEST_BYTES = 16


def root_hash(salt: str = "") -> bytes:
    """Return the parent of a request's first block; requests share blocks within a salt only."""
    return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Hash a full block: its tokens and, through the parent, everything before it.

    The same in every process and on every machine: blake2b over the parent's digest and the
    ids as little-endian int32.
    """
    digest = hashlib.blake2b(parent, digest_size=_DIGEST_BYTES)
    digest.update(np.asarray(token_ids, "<i4").tobytes())
    return digest.digest()


class BlockPoolStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Where the blocks are; usable = owned + cached + fresh."""

    num_usable: int
    """All blocks but the null block."""
    num_owned: int
    """Blocks of at least one request."""
    num_cached: int
    """Blocks of nobody whose contents may still be used."""
    num_fresh: int
    num_evictions: int


class BlockPool:
    """Block ids with owners, reference counts and a prefix cache.

    A block is *owned* (count >= 1), *cached* (no owner, contents known by hash, in order of
    last use) or *fresh* (no owner, contents worthless). Fresh blocks are handed out first,
    then the cached one that was not used for the longest time. Block 0, the null block, is
    never handed out.
    """

    def __init__(self, num_blocks: int) -> None:
        """Begin with every block fresh; raises InvalidRequest without a usable block."""
        if num_blocks < 2:
            raise InvalidRequest(
                f"{num_blocks} blocks leave nothing beside the null block; allocate at least 2"
            )
        self.num_blocks = num_blocks
        self.num_evictions = 0
        self.reset()

    def reset(self) -> None:
        """Forget owners and contents: a new KV epoch."""
        self._owners = [0] * self.num_blocks
        self._fresh = FreeRuns(1, self.num_blocks)
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_usable(self) -> int:
        """Blocks that can be owned at the same time."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that allocate can hand out now."""
        return len(self._fresh) + len(self._cached)

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest known prefix; changes nothing."""
        blocks: list[int] = []
        for digest in hashes:
            block = self._block_of.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def num_without_owner(self, blocks: Sequence[int]) -> int:
        """Count those blocks that share would take out of the free ones."""
        return sum(self._owners[block] == 0 for block in blocks)

    def share(self, blocks: Sequence[int]) -> None:
        """Become one more owner of blocks found by lookup. Undone by release."""
        for block in blocks:
            if self._owners[block] == 0:
                del self._cached[block]
            self._owners[block] += 1

    def allocate(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Own count blocks, at most num_free; consecutive ids as far as possible.

        after and room as for FreeRuns.take. Undone by release.
        """
        assert count <= self.num_free
        blocks = self._fresh.take(min(count, len(self._fresh)), after=after, room=room)
        evicted = sorted(self._cached.popitem(last=False)[0] for _ in range(count - len(blocks)))
        for block in evicted:
            del self._block_of[self._hash_of.pop(block)]
        self.num_evictions += len(evicted)
        blocks += evicted
        for block in blocks:
            self._owners[block] = 1
        return blocks

    def register(self, block: int, digest: bytes) -> None:
        """State what an owned block holds; the first block with the same contents stays known."""
        assert self._owners[block] > 0
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Stop owning the blocks of one request, given in the order of its tokens.

        The end of a sequence is forgotten before its beginning, which more requests share.
        """
        for block in reversed(blocks):
            assert self._owners[block] > 0
            self._owners[block] -= 1
            if self._owners[block]:
                continue
            if block in self._hash_of:
                self._cached[block] = None
            else:
                self._fresh.add(block)

    def statistics(self) -> BlockPoolStatistics:
        """Count the blocks by what they are."""
        return BlockPoolStatistics(
            num_usable=self.num_usable,
            num_owned=self.num_usable - self.num_free,
            num_cached=len(self._cached),
            num_fresh=len(self._fresh),
            num_evictions=self.num_evictions,
        )
