"""Layer 5. Who gets tokens and blocks in the next step, and who has to give theirs up."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from gpuworker.engine.blocks import BlockPool
from gpuworker.engine.draft import Row, StepDraft
from gpuworker.engine.limits import SchedulerLimits
from gpuworker.engine.requests import LiveRequest, Stage
from gpuworker.engine.slots import SlotBook
from gpuworker.step import RESUMED

__all__ = ["Batcher"]


class Batcher:
    """The queues of a scheduler and the block pool they compete for.

    Running requests come first (decodes, then prefills), then waiting ones in order of
    arrival. When blocks run out, the youngest running request is preempted: it loses its
    blocks, keeps its slot and its tokens, and is computed again later. The oldest request can
    take all others' blocks and alone always fits (the scheduler refuses what does not), so
    the oldest always gets on.
    """

    def __init__(self, limits: SchedulerLimits, slots: SlotBook) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.num_blocks)
        self.num_preemptions = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self._slots = slots
        self._waiting: list[LiveRequest] = []  # both in order of arrival
        self._running: list[LiveRequest] = []

    @property
    def num_running(self) -> int:
        """Requests that own blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that own none, new or preempted."""
        return len(self._waiting)

    def enqueue(self, request: LiveRequest) -> None:
        """Let a request wait for its turn."""
        request.stage = Stage.WAITING
        insort(self._waiting, request, key=_arrival)

    def drop(self, request: LiveRequest) -> None:
        """Take a request out for good.

        Its blocks are free at once: a step in flight may still write to them, but whoever gets
        them next runs after that step.
        """
        self._give_up_blocks(request)
        queue = self._running if request.stage is Stage.RUNNING else self._waiting
        queue.remove(request)
        request.stage = Stage.FINISHED

    def restart(self, live: Iterable[LiveRequest]) -> None:
        """Forget all that was computed; every live request waits to be computed again."""
        self.pool.reset()
        self._running = []
        self._waiting = list(live)
        for request in self._waiting:
            request.forget_table()
            request.num_pending = 0
            request.stage = Stage.WAITING

    def fill(self, draft: StepDraft) -> None:
        """Put rows into a step.

        Who was preempted for it is not admitted in the same step: it needs at least the blocks
        that it lost, and some of them are taken.
        """
        self._extend_running(draft)
        self._admit_waiting(draft)

    def confirm(self, row: Row) -> None:
        """Offer the blocks of a row that has run to the prefix cache.

        Not before: a step that is lost computes nothing. A request that was preempted
        meanwhile owns other blocks and is left alone.
        """
        request, block_size = row.request, self.limits.block_size
        end = (row.num_computed + row.num_scheduled) // block_size
        if row.table_version != request.table_version or end <= request.num_registered:
            return
        request.extend_hashes(block_size)
        for index in range(request.num_registered, end):
            self.pool.register(request.blocks[index], request.hashes[index])
        request.num_registered = end

    def _extend_running(self, draft: StepDraft) -> None:
        wanted = [(request, request.num_to_schedule) for request in self._running]
        decodes = [pair for pair in wanted if pair[1] == 1]
        prefills = [pair for pair in wanted if pair[1] > 1]
        for request, num_wanted in decodes + prefills:
            if request.stage is not Stage.RUNNING:
                continue  # preempted a moment ago
            count, new_block_ids = min(num_wanted, draft.budget), []
            if request.num_computed + count > len(request.blocks) * self.limits.block_size:
                count = self._make_room(request, count, draft)
                new_block_ids = self._grow(request, count)
            if count > 0:
                draft.add(request, count, new_block_ids, flags=0, new=False)

    def _admit_waiting(self, draft: StepDraft) -> None:
        """Begin or resume requests while all that they and the running ones know fits."""
        if not self._waiting:
            return
        block_size = self.limits.block_size
        num_promised = sum(
            self.limits.blocks_for(request.num_total) - len(request.blocks)
            for request in self._running
            if request.num_to_schedule
        )
        while self._waiting and draft.budget:
            request = self._waiting[0]
            if request.slot is None and (
                not self._slots.has_free or self._slots.is_taken(request.request_id)
            ):
                return
            request.extend_hashes(block_size)
            # At least one token is computed, for its logits.
            hits = self.pool.lookup(request.hashes[: (request.num_total - 1) // block_size])
            num_needed = self.limits.blocks_for(request.num_total) - len(hits) + num_promised
            if num_needed > self.pool.num_free - self.pool.num_without_owner(hits):
                return
            del self._waiting[0]
            request.stage = Stage.RUNNING
            insort(self._running, request, key=_arrival)
            self._start_from(request, hits)
            new = request.slot is None
            if request.slot is None:
                request.slot = self._slots.bind(request)
                draft.introduce(request, request.slot)
            count = min(request.num_to_schedule, draft.budget)
            self._grow(request, count)
            table = list(request.blocks)
            draft.add(request, count, table, flags=0 if new else RESUMED, new=new)
            num_promised += self.limits.blocks_for(request.num_total) - len(table)

    def _start_from(self, request: LiveRequest, hits: list[int]) -> None:
        self.pool.share(hits)
        request.blocks = hits
        request.num_computed = len(hits) * self.limits.block_size
        request.num_registered = len(hits)
        self.num_prefix_queries += request.num_total
        self.num_prefix_hits += request.num_computed

    def _grow(self, request: LiveRequest, count: int) -> list[int]:
        """Allocate the blocks for count more tokens and return them."""
        blocks = request.blocks
        num_new = self.limits.blocks_for(request.num_computed + count) - len(blocks)
        if num_new <= 0:
            return []
        room = self.limits.blocks_for(request.num_total_max - 1) - len(blocks)
        after = blocks[-1] if blocks else None
        new_blocks = self.pool.allocate(num_new, after=after, room=room)
        blocks += new_blocks
        return new_blocks

    def _make_room(self, request: LiveRequest, count: int, draft: StepDraft) -> int:
        """Preempt others until count more tokens fit; returns how many do after all."""
        while True:
            num_blocks = len(request.blocks) + self.pool.num_free
            room = num_blocks * self.limits.block_size - request.num_computed
            victim = self._youngest_without_row(draft)
            if count <= room or victim is None or victim is request:
                return min(count, room)
            self._preempt(victim)

    def _youngest_without_row(self, draft: StepDraft) -> LiveRequest | None:
        # One that wants no further token frees its blocks soon anyway.
        for request in reversed(self._running):
            if request not in draft and request.num_to_schedule:
                return request
        return None

    def _preempt(self, request: LiveRequest) -> None:
        self._give_up_blocks(request)
        self._running.remove(request)
        self.enqueue(request)
        self.num_preemptions += 1

    def _give_up_blocks(self, request: LiveRequest) -> None:
        self.pool.release(request.blocks)
        request.forget_table()


def _arrival(request: LiveRequest) -> int:
    return request.arrival
