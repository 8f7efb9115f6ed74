"""A fake worker on an endpoint, and raw peers, for the tests of the wire."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import zmq

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.ipc import Server, default_endpoint
from gpuworker.ipc.curve import ServerKeys
from gpuworker.ipc.wire import (
    Kind,
    ReplyHeader,
    RequestHeader,
    encode_body,
    encode_request,
    reply_header,
)
from gpuworker.testing import FakeRuntime

WIDE = WorkerConfig(model=ModelConfig(model="fake"), limits=LimitsConfig(window=4))
"""A worker that lets a session have four steps unanswered."""


def request_frames(
    corr: int, request: m.Request, *, epoch: int = 0, seq: int = 0, budget_us: int = 0
) -> list[bytes]:
    """What a client sends."""
    return encode_request(RequestHeader(Kind.REQUEST, corr, epoch, seq, budget_us), request)


def reply_frames(
    corr: int, reply: m.Reply, *, epoch: int = 0, seq: int = 0, boot_id: str = "0" * 16
) -> list[bytes]:
    """What a worker answers."""
    return [reply_header(ReplyHeader(Kind.REPLY, corr, epoch, seq, boot_id)), encode_body(reply)]


@asynccontextmanager
async def served(
    worker: GPUWorker, endpoint: str | None = None, *, keys: ServerKeys | None = None
) -> AsyncIterator[tuple[Server, str]]:
    server = Server(
        worker, endpoint or default_endpoint(), keys=keys, events=worker.events, direct=worker
    )
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(server.run(bound.set_result))
    await asyncio.wait([task, bound], return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        task.result()
    try:
        yield server, await bound
    finally:
        task.cancel()
        await asyncio.wait([task])


class Gate:
    """Holds every step until it is opened."""

    def __init__(self, worker: GPUWorker) -> None:
        self.entered, self.open = threading.Event(), threading.Event()
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)
        runtime.before_step = self

    def __call__(self, step: m.ExecuteModel) -> None:
        self.entered.set()
        assert self.open.wait(20)


def runtime_of(worker: GPUWorker) -> FakeRuntime:
    runtime = worker._runtime
    assert isinstance(runtime, FakeRuntime)
    return runtime


@contextmanager
def raw_router() -> Iterator[tuple[zmq.Socket, str]]:
    """A ROUTER that says whatever the test makes it say, in a directory of its own."""
    endpoint = default_endpoint()
    path = Path(endpoint.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 1000)
        router.setsockopt(zmq.RCVTIMEO, 20_000)
        router.bind(endpoint)
        yield router, endpoint
    path.unlink(missing_ok=True)
    path.parent.rmdir()
