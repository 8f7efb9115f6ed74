"""Layer 0. What a server needs of a worker."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from gpuworker.config import WorkerConfig
from gpuworker.messages import Request
from gpuworker.permit import Permit

__all__ = ["SubmitWorker"]


class SubmitWorker(Protocol):
    """What a server needs of a worker."""

    @property
    def config(self) -> WorkerConfig:
        """The configuration the worker was given."""

    def submit(self, request: Request[Any], *, permit: Permit | None = None) -> asyncio.Future[Any]:
        """Accept a request without waiting, in order; may raise a WorkerError at once."""
