"""Layer 5. Which block ids are free, kept as runs of consecutive ids."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

__all__ = ["FreeRuns"]


class FreeRuns:
    """A set of integers in [first, end) that hands out consecutive ones where it can.

    Attention over consecutive blocks is one slice instead of a gather, so a request is placed
    where it has room to grow, and the next request behind that room (next fit).
    """

    def __init__(self, first: int, end: int) -> None:
        """Begin with every id in [first, end) free."""
        self._starts: list[int] = [first] if end > first else []
        self._ends: dict[int, int] = {first: end} if end > first else {}
        self._cursor = first
        self._size = max(end - first, 0)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, block: object) -> bool:
        if not isinstance(block, int):
            return False
        index = bisect_right(self._starts, block) - 1
        return index >= 0 and block < self._ends[self._starts[index]]

    def add(self, block: int) -> None:
        """Free one id that is not free."""
        assert block not in self
        index = bisect_left(self._starts, block)
        start, end = block, block + 1
        if index < len(self._starts) and self._starts[index] == end:
            end = self._ends.pop(self._starts.pop(index))
        if index and self._ends[self._starts[index - 1]] == start:
            start = self._starts[index - 1]
        else:
            self._starts.insert(index, start)
        self._ends[start] = end
        self._size += 1

    def take(self, count: int, *, after: int | None = None, room: int = 0) -> list[int]:
        """Remove and return count ids, which must be there.

        after: the last block of the request; what follows it is preferred.
        room: blocks that the request may come to need, including these.
        """
        assert count <= self._size
        taken: list[int] = []
        if after is not None:
            taken += self._take_at(after + 1, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._take_at(self._place(max(room, missing)), missing)
        return taken

    def _take_at(self, block: int, count: int) -> range:
        """Remove up to count consecutive ids from block on; empty when block is not free."""
        index = bisect_right(self._starts, block) - 1
        if index < 0:
            return range(0)
        start = self._starts[index]
        end = self._ends[start]
        if block >= end:
            return range(0)
        stop = min(block + count, end)
        if start == block:
            del self._starts[index], self._ends[start]
            index -= 1
        else:
            self._ends[start] = block
        if stop < end:
            self._starts.insert(index + 1, stop)
            self._ends[stop] = end
        self._size -= stop - block
        return range(block, stop)

    def _place(self, room: int) -> int:
        """Choose the first id from the cursor on that has the room, else the longest run."""
        index = bisect_right(self._starts, self._cursor) - 1
        if index >= 0 and self._ends[self._starts[index]] - self._cursor >= room:
            chosen = self._cursor
        else:
            order = self._starts[index + 1 :] + self._starts[: index + 1]
            fits = (start for start in order if self._ends[start] - start >= room)
            longest = max(order, key=lambda start: self._ends[start] - start)
            chosen = next(fits, longest)
        self._cursor = chosen + room
        return chosen
