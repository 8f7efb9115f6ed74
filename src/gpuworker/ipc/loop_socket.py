"""Layer 0. A ZeroMQ socket on the event loop without tasks: a callback for every message.

zmq.asyncio wraps every receive and send into futures and takes several turns of the loop for
each; on the way of a step that is a third of the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import cast

import zmq

__all__ = ["LoopSocket"]

_BURST = 16
"""Messages that are taken in before the others on the event loop get their turn."""


class LoopSocket:
    """Takes in what a socket receives from start to stop, and sends without waiting.

    It belongs to the running loop's thread. The socket's descriptor only says that something
    has changed since the socket was last looked at, so it is read until it is empty, and
    looked at again after every send.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], on_message: Callable[[list[bytes]], None]
    ) -> None:
        self._socket = socket
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = cast("int", socket.getsockopt(zmq.FD))
        self._again: asyncio.Handle | None = None

    def start(self) -> None:
        """Begin to take messages in."""
        self._loop.add_reader(self._descriptor, self._take)
        self._look_again()

    def stop(self) -> None:
        """Take in no more; the socket stays open. Idempotent."""
        self._loop.remove_reader(self._descriptor)
        if self._again is not None:
            self._again.cancel()
            self._again = None

    def send(self, frames: Sequence[bytes]) -> bool:
        """Send a message, or say that the queue to its peer is full.

        Raises ZMQError, with EHOSTUNREACH from a ROUTER whose peer has gone.
        """
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        finally:
            if (
                self._again is None
                and cast("int", self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN
            ):
                self._look_again()
        return True

    def catch_up(self) -> None:
        """Take in at once whatever is there."""
        while self._is_readable():
            self._take()

    def _is_readable(self) -> bool:
        return bool(cast("int", self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def _look_again(self) -> None:
        if self._again is None:
            self._again = self._loop.call_soon(self._take_again)

    def _take_again(self) -> None:
        self._again = None
        self._take()

    def _take(self) -> None:
        for _ in range(_BURST):
            if not self._is_readable():  # cheaper than the exception of a receive in vain
                return
            frames = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._on_message(frames)
            except BaseException:
                self._look_again()  # the descriptor will not tell of what is there already
                raise
        self._look_again()  # a flood must not starve the others
