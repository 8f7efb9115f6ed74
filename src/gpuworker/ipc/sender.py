"""Layer 0. Answers on their way out: at once if they can, in order in any case."""

from __future__ import annotations

import asyncio
import errno
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq

from gpuworker.ipc.loop_socket import LoopSocket

__all__ = ["Letter", "Sender"]

_PATIENCE_S = 1.0
_RETRY_S = 0.002


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

    A client that does not read holds the others up once, until patience ends; from then on it
    loses every reply that does not fit into its queue at once.
    """

    def __init__(self, wire: LoopSocket, header: Callable[[Letter], bytes]) -> None:
        """header makes the first frame of a letter when it goes out."""
        self._wire = wire
        self._header = header
        self._late: deque[Letter] = deque()
        self._has_late = asyncio.Event()
        self._slow_peers: set[bytes] = set()
        self.num_sent = 0
        self.num_undeliverable = 0
        self.last_is_out = asyncio.Event()
        self.progress = asyncio.Event()
        """Set whenever a letter has left; whoever waits clears it."""

    @property
    def num_late(self) -> int:
        """Letters that wait."""
        return len(self._late)

    def send(self, letter: Letter) -> None:
        """Send a letter at once, or behind those that have to wait."""
        if self._late or not self._deliver(letter):
            self._late.append(letter)
            self._has_late.set()

    async def run(self) -> None:
        """Send what had to wait, until cancelled."""
        clock = asyncio.get_running_loop().time
        while True:
            await self._has_late.wait()
            letter = self._late[0]
            deadline = clock() + (0.0 if letter.peer in self._slow_peers else _PATIENCE_S)
            while not self._deliver(letter):
                if clock() >= deadline:
                    self._slow_peers.add(letter.peer)
                    self.num_undeliverable += 1
                    self._left(letter)
                    break
                await asyncio.sleep(_RETRY_S)
            self._late.popleft()
            if not self._late:
                self._has_late.clear()
            await asyncio.sleep(0)

    def _deliver(self, letter: Letter) -> bool:
        """Send a letter; False when its client's queue is full."""
        try:
            if not self._wire.send((letter.peer, self._header(letter), letter.body)):
                return False
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self.num_undeliverable += 1  # it has gone
        else:
            self.num_sent += 1
        self._slow_peers.discard(letter.peer)
        self._left(letter)
        return True

    def _left(self, letter: Letter) -> None:
        self.progress.set()
        if letter.is_last:
            self.last_is_out.set()
