"""A worker process that keeps books instead of computing, for measuring the way to it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from contextlib import suppress

from gpuworker.ipc import Server
from gpuworker.lifecycle import State
from gpuworker.testing import FakeRuntime, fake_worker, walk_to


async def _serve(endpoint: str, step_s: float) -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)
        if step_s:  # as a kernel does, without the interpreter lock
            runtime.before_step = lambda step: time.sleep(step_s)
        server = Server(worker, endpoint, direct=worker)
        await server.run(lambda bound: print(bound, flush=True))


if __name__ == "__main__":
    with suppress(asyncio.CancelledError):  # told to end: the files of the endpoint are gone
        asyncio.run(_serve(sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.0))
