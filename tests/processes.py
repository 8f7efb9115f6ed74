"""Processes and workers in them, waited for by condition."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from gpuworker import messages as m
from gpuworker.config import ModelConfig, SupervisionConfig, WorkerConfig
from gpuworker.ipc import RemoteWorker, connect

T = TypeVar("T")
WALK: tuple[m.Request[m.Reply], ...] = (
    m.InitDevice(),
    m.LoadModel(),
    m.ProfileMemory(),
    m.AllocateKVCache(num_blocks=32),
    m.WarmUp(),
    m.StartServing(),
    m.Sleep(),
)
TO_SERVING = 6


def fake_config(**supervision: object) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(model="fake"), supervision=SupervisionConfig(**supervision)
    )


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


async def until(condition: Callable[[], T | Awaitable[T]], limit_s: float = 30.0) -> T:
    """Wait until a condition holds and return what it gave."""
    async with asyncio.timeout(limit_s):
        while True:
            value = condition()
            if isinstance(value, Awaitable):
                value = await value
            if value:
                return value
            await asyncio.sleep(0.01)


async def walk(worker: RemoteWorker, num_moves: int = TO_SERVING) -> None:
    """Lead a remote worker that is in state uninit."""
    for request in WALK[:num_moves]:
        await worker.ask(request, timeout_s=60)


@asynccontextmanager
async def observe(endpoint: str) -> AsyncIterator[Callable[[], Awaitable[m.HealthReport]]]:
    """Yield a function that asks for the health."""
    async with connect(endpoint, observe=True) as observer:
        yield lambda: observer.ask(m.GetHealth(), timeout_s=10)
