"""Layer 5. What a scheduler must respect, and what it counts."""

from __future__ import annotations

from typing import Self

import msgspec

from gpuworker.errors import InvalidRequest
from gpuworker.messages import Limits

__all__ = ["SchedulerLimits", "SchedulerStatistics"]


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the worker can take; raises InvalidRequest for numbers that cannot work."""

    block_size: int
    num_blocks: int
    """Including the null block."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int = 2
    """Steps in flight at most."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value: int = getattr(self, name)
            if value < 1:
                raise InvalidRequest(f"limits.{name} is {value}; it must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidRequest(
                f"limits.max_num_batched_tokens {self.max_num_batched_tokens} is below "
                f"limits.max_num_seqs {self.max_num_seqs}; every request needs a token"
            )

    @classmethod
    def from_worker(cls, limits: Limits, *, depth: int = 2) -> Self:
        """Take the numbers from a worker's reply; its block pool must exist.

        No more steps are in flight than the worker's window.
        """
        return cls(
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            depth=min(depth, limits.window),
        )

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)


class SchedulerStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the scheduler was built, and how full it is now."""

    num_running: int
    num_waiting: int
    num_steps: int
    """Steps that came back with an output."""
    num_preemptions: int
    num_prefix_queries: int
    """Tokens of the requests that were admitted."""
    num_prefix_hits: int
    """Those among them that were in the prefix cache."""
    kv_usage: float
    """Share of the usable blocks that requests own, in [0, 1]."""
