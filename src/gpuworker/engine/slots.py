"""Layer 5. The short names of live requests, and which of them the worker knows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gpuworker.engine.requests import LiveRequest, Stage

__all__ = ["SlotBook"]


class SlotBook:
    """Slots in [0, max_num_seqs) as the steps sent so far leave them, and as confirmed.

    A slot is free again when the id of its request is sent as finished, in that very step.
    The confirmed side follows the steps that ran, so it is what the worker believes; after a
    step was lost the other side is rebuilt from it.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self._num_slots = max_num_seqs
        self._free = deque(range(max_num_seqs))  # the one that is free for longest comes first
        self._owners: dict[int, LiveRequest] = {}
        self._ended: list[LiveRequest] = []
        self._owed: list[LiveRequest] = []  # ended, and a step that said so was lost
        self._confirmed: dict[int, LiveRequest] = {}

    @property
    def has_free(self) -> bool:
        """Whether bind would find a slot."""
        return bool(self._free)

    def bind(self, request: LiveRequest) -> int:
        """Take a free slot for a request."""
        slot = self._free.popleft()
        self._owners[slot] = request
        return slot

    def end(self, request: LiveRequest) -> None:
        """Note that the worker must hear of a request's end."""
        self._ended.append(request)

    def send_ended(self, *, with_company: bool) -> list[LiveRequest]:
        """Return the ended requests for the step being built; their slots are free from now on.

        Those of which the worker may not have heard yet stay behind: it could still refuse
        them. Those that a lost step carried go only with something else: alone, they would be
        lost in the same way at once, for ever.
        """
        ended = [request for request in self._ended if self._is_confirmed(request)]
        if not ended and not with_company:
            return []
        self._ended = [request for request in self._ended if not self._is_confirmed(request)]
        ended += self._owed
        self._owed = []
        for request in ended:
            self._release(request)
        return ended

    def is_taken(self, request_id: str) -> bool:
        """Whether an ended request of that id has stayed behind."""
        return any(request.request_id == request_id for request in self._ended)

    def take_back(self, slot: int, request: LiveRequest) -> None:
        """Free the slot of a new request that the worker refused; it needs no ending."""
        if self._owners.get(slot) is request:
            self._release(request)
            self._ended = [other for other in self._ended if other is not request]
            request.slot = None

    def note_ended(self, ended: Iterable[LiveRequest]) -> None:
        """Record that a step with these ended requests ran."""
        for request in ended:
            if request.slot is not None and self._is_confirmed(request):
                del self._confirmed[request.slot]

    def note_bound(self, slot: int, request: LiveRequest) -> None:
        """Record that the worker accepted a new request."""
        self._confirmed[slot] = request

    def restore(self, live: Iterable[LiveRequest]) -> None:
        """Begin again from the confirmed side: the live requests keep only slots known there."""
        for request in live:
            request.slot = None
        self._owners = dict(self._confirmed)
        self._free = deque(slot for slot in range(self._num_slots) if slot not in self._owners)
        self._ended = []
        self._owed = []
        for slot, request in self._confirmed.items():
            request.slot = slot
            if request.stage is Stage.FINISHED:
                self._owed.append(request)

    def _is_confirmed(self, request: LiveRequest) -> bool:
        return request.slot is not None and self._confirmed.get(request.slot) is request

    def _release(self, request: LiveRequest) -> None:
        assert request.slot is not None
        del self._owners[request.slot]
        self._free.append(request.slot)
