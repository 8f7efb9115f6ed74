"""Layer 0. Answers on their way out: at once if they can, in order in any case."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import zmq

from gpuworker.errors import RepliesLost
from gpuworker.ipc.loop_socket import LoopSocket
from gpuworker.ipc.wire import encode_body, failure_of

__all__ = ["Letter", "Sender"]

_PATIENCE_S = 1.0
_RETRY_S = 0.002
_NOTICE_S = 0.05
"""Between two attempts to tell clients that replies to them were dropped."""
_LOSS = encode_body(
    failure_of(
        RepliesLost(
            "replies were dropped because this connection did not read; whatever is pending on it "
            "has an unknown outcome. Read faster, or have less under way"
        )
    )
)


class Letter(NamedTuple):
    """An answer: to whom, to which request, and its encoded body."""

    peer: bytes
    corr: int
    seq: int
    """Of the step that it answers, when that was accepted."""
    body: bytes
    is_last: bool = False
    """Whether it answers Shutdown."""


class Sender:
    """Sends answers through a ROUTER; run sends those that had to wait.

    A client that does not read holds nobody else up. After some patience it loses what it was
    owed, and from then on every reply that does not fit into its queue at once. As soon as it
    reads again it is told so, before anything else, by a failure under corr 0.
    """

    def __init__(self, wire: LoopSocket, header: Callable[[Letter], bytes]) -> None:
        """header makes the first frame of a letter when it goes out."""
        self._wire = wire
        self._header = header
        self._late: dict[bytes, deque[Letter]] = {}
        self._deadlines: dict[bytes, float] = {}
        """Of the first late letter of each peer that has some."""
        self._has_late = asyncio.Event()
        self._slow_peers: set[bytes] = set()
        self.num_sent = 0
        self.num_undeliverable = 0
        self.closing = asyncio.Event()
        """Set when the answer to Shutdown has left, or by whoever wants no more letters."""
        self.progress = asyncio.Event()
        """Set whenever a letter has left; whoever waits clears it."""

    @property
    def num_late(self) -> int:
        """Letters that wait."""
        return sum(map(len, self._late.values()))

    def send(self, letter: Letter) -> None:
        """Send a letter at once, or behind those to the same client that have to wait."""
        late = self._late.get(letter.peer)
        if late is not None:
            late.append(letter)
        elif not self._deliver(letter):
            if letter.peer in self._slow_peers:
                self._drop(letter)
                return
            self._late[letter.peer] = deque([letter])
            self._be_patient(letter.peer)
            self._has_late.set()

    async def run(self) -> None:
        """Send what had to wait, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_NOTICE_S if self._slow_peers else None):
                    await self._has_late.wait()
            for peer in tuple(self._slow_peers):
                self._tell_of_loss(peer)
            for peer, letters in tuple(self._late.items()):
                while letters and self._deliver(letters[0]):
                    letters.popleft()
                    self._be_patient(peer)
                if letters and clock() >= self._deadlines[peer]:
                    self._slow_peers.add(peer)
                    for letter in letters:
                        self._drop(letter)
                    letters.clear()
                if not letters:
                    del self._late[peer], self._deadlines[peer]
            if not self._late:
                self._has_late.clear()
            else:
                await asyncio.sleep(_RETRY_S)

    def _be_patient(self, peer: bytes) -> None:
        self._deadlines[peer] = asyncio.get_running_loop().time() + _PATIENCE_S

    def _drop(self, letter: Letter) -> None:
        self.num_undeliverable += 1
        self._left(letter)

    def _deliver(self, letter: Letter) -> bool:
        """Send a letter; False when its client's queue is full."""
        if letter.peer in self._slow_peers and not self._tell_of_loss(letter.peer):
            return False
        if (took := self._put(letter)) is None:
            return False
        self.num_sent += took
        self.num_undeliverable += not took
        self._left(letter)
        return True

    def _tell_of_loss(self, peer: bytes) -> bool:
        """Tell a client that replies to it were dropped; False while it does not read."""
        if self._put(Letter(peer, 0, 0, _LOSS)) is None:
            return False
        self._slow_peers.discard(peer)
        return True

    def _put(self, letter: Letter) -> bool | None:
        """Say whether a client took a letter; None when its queue is full, False if it is gone."""
        try:
            taken = self._wire.send((letter.peer, self._header(letter), letter.body))
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
        return True if taken else None

    def _left(self, letter: Letter) -> None:
        self.progress.set()
        if letter.is_last:
            self.closing.set()
