"""A worker process that keeps books instead of computing, for measuring the way to it."""

from __future__ import annotations

import asyncio
import sys

from gpuworker.ipc import serve
from gpuworker.lifecycle import State
from gpuworker.testing import fake_worker, walk_to


async def _serve(endpoint: str) -> None:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        await serve(worker, endpoint, on_ready=lambda bound: print(bound, flush=True))


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
