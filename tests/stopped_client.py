"""A client process that asks for a lot, stops itself, and keeps accounts once it is continued.

Usage: python stopped_client.py ENDPOINT NUM_REQUESTS KIND, KIND "asyncio" or "blocking". Prints
"stops" before it stops and "answered N lost N missing N" at the end.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time

from gpuworker import messages as m
from gpuworker.errors import ConnectionLost, RequestTimeout
from gpuworker.ipc import BlockingClient, connect

_DEADLINE_S = 15.0


def _stop() -> None:
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _report(num_requests: int, ends: list[object]) -> None:
    answered = sum(isinstance(end, m.Status) for end in ends)
    lost = sum(isinstance(end, ConnectionLost) for end in ends)
    print(f"answered {answered} lost {lost} missing {num_requests - answered - lost}", flush=True)


async def _asyncio(endpoint: str, num_requests: int) -> None:
    async with connect(endpoint, observe=True) as worker:
        pending = [worker.submit(m.GetStatus()) for _ in range(num_requests)]
        await pending[0]  # so the rest is under way
        _stop()
        done, _ = await asyncio.wait(pending, timeout=_DEADLINE_S)
        _report(num_requests, [reply.exception() or reply.result() for reply in done])


def _blocking(endpoint: str, num_requests: int) -> None:
    ends: list[object] = []
    with BlockingClient(endpoint, observe=True) as client:
        pending = [client.submit(m.GetStatus()) for _ in range(num_requests)]
        _stop()
        deadline = time.monotonic() + _DEADLINE_S
        for reply in pending:
            try:
                ends.append(reply.result(max(deadline - time.monotonic(), 0.0)))
            except (ConnectionLost, RequestTimeout) as error:
                ends.append(error)
        _report(num_requests, ends)


if __name__ == "__main__":
    if sys.argv[3] == "asyncio":
        asyncio.run(_asyncio(sys.argv[1], int(sys.argv[2])))
    else:
        _blocking(sys.argv[1], int(sys.argv[2]))
