"""Layer 5. All that the engine knows of a worker: two ways to say something to it."""

from __future__ import annotations

import asyncio
from typing import Protocol

from gpuworker.messages import ReplyT, Request

__all__ = ["WorkerLike"]


class WorkerLike(Protocol):
    """A worker in this process or at the other end of a socket.

    Messages take effect in the order of ask and submit calls. What the worker refuses arrives
    as a gpuworker.errors exception; submit may raise it at once or through the future.
    """

    async def ask(self, request: Request[ReplyT]) -> ReplyT:
        """Send a request and return its reply."""
        ...

    def submit(self, request: Request[ReplyT]) -> asyncio.Future[ReplyT]:
        """Send a request without waiting for the reply."""
        ...
