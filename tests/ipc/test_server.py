"""Server and clients together: order, typed errors, junk, vanished and slow peers."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import ModelConfig, SupervisionConfig, WorkerConfig
from gpuworker.errors import (
    ConfigError,
    ConnectionLost,
    IllegalMessage,
    MailboxFull,
    MalformedMessage,
    RequestTimeout,
    StaleKVEpoch,
    WorkerError,
)
from gpuworker.ipc import BlockingClient, Server, connect, default_endpoint
from gpuworker.ipc.endpoint import MAX_IPC_PATH_BYTES
from gpuworker.ipc.wire import MAX_BODY_BYTES, encode_request
from gpuworker.lifecycle import State
from gpuworker.step import StepRow, pack_step
from gpuworker.testing import FakeRuntime, empty_step, fake_worker, walk_to


@asynccontextmanager
async def served(
    worker: GPUWorker, endpoint: str | None = None
) -> AsyncIterator[tuple[Server, str]]:
    server = Server(worker, endpoint or default_endpoint())
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


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_the_whole_lifecycle_goes_over_the_wire(scheme: str) -> None:
    endpoint = default_endpoint() if scheme == "ipc" else "tcp://127.0.0.1:*"
    async with (
        fake_worker() as worker,
        served(worker, endpoint) as (server, bound),
        connect(bound) as remote,
    ):
        for request in (
            m.InitDevice(),
            m.LoadModel(),
            m.ProfileMemory(),
            m.AllocateKVCache(num_blocks=8),
            m.WarmUp(),
            m.StartServing(),
            empty_step(1),
            m.Sleep(level=1),
            m.WakeUp(),
        ):
            assert type(await remote.ask(request)) is m.REPLY_OF[type(request)]
        assert (await remote.ask(m.GetStatus())).state == "serving"
        assert isinstance(await remote.ask(m.Shutdown()), m.Closed)
        assert server.statistics().num_malformed == 0


async def test_errors_arrive_as_the_class_that_was_raised() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        with pytest.raises(IllegalMessage) as refusal:
            await remote.ask(m.WakeUp())
        assert refusal.value.state == "uninit"
        assert refusal.value.accepted == ("init_device", "shutdown")
        await walk_to(worker, State.SERVING)
        with pytest.raises(StaleKVEpoch):
            await remote.ask(empty_step(1, kv_epoch=9))

        def blocking() -> None:
            with BlockingClient(endpoint, timeout_s=20) as client:
                with pytest.raises(IllegalMessage) as refusal:
                    client.ask(m.WarmUp())
                assert "execute_model" in refusal.value.accepted

        await asyncio.to_thread(blocking)


async def test_steps_in_flight_answer_in_order_and_status_overtakes_them() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        order: list[int] = []
        replies = [remote.submit(empty_step(step_id)) for step_id in (1, 2, 3)]
        for reply in replies:
            reply.add_done_callback(lambda done: order.append(done.result().step_id))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        status = await remote.ask(m.GetStatus())
        assert (status.running_step_id, order) == (1, [])
        gate.open.set()
        await asyncio.gather(*replies)
        assert order == [1, 2, 3]


async def test_the_blocking_client_keeps_several_requests_under_way() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)

        def drive() -> list[int]:
            with BlockingClient(endpoint, timeout_s=20) as client:
                pending = [client.submit(empty_step(step_id)) for step_id in (1, 2, 3)]
                return [reply.result().step_id for reply in reversed(pending)]

        assert await asyncio.to_thread(drive) == [3, 2, 1]


async def test_a_full_mailbox_is_told_to_the_client() -> None:
    config = WorkerConfig(
        model=ModelConfig(model="fake"), supervision=SupervisionConfig(mailbox_limit=2)
    )
    async with (
        fake_worker(config) as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        replies = [remote.submit(empty_step(step_id)) for step_id in (1, 2, 3)]
        with pytest.raises(MailboxFull):
            await replies[2]
        gate.open.set()
        assert [(await reply).step_id for reply in replies[:2]] == [1, 2]


async def test_a_reply_that_does_not_come_in_time_is_an_unknown_outcome() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        with pytest.raises(RequestTimeout, match=r"ExecuteModel within 0\.01 s"):
            await remote.ask(empty_step(1), timeout_s=0.01)

        def blocking() -> None:
            with (
                BlockingClient(endpoint) as client,
                pytest.raises(RequestTimeout, match="unknown"),
            ):
                client.ask(empty_step(2), timeout_s=0.01)

        await asyncio.to_thread(blocking)
        gate.open.set()
        assert (await remote.ask(empty_step(3))).step_id == 3  # late replies are ignored


JUNK = [
    [b""],
    [b"x"],
    [b"a", b"b", b"c", b"d", b"e"],
    [random.Random(0).randbytes(1000)],
    [b"GET / HTTP/1.1\r\n\r\n", b""],
    [encode_request(1, m.Sleep())[0], msgspec.msgpack.encode([1])],
    [encode_request(2, m.Sleep())[0], msgspec.msgpack.encode(["no_such_message"])],
    [encode_request(3, m.Sleep())[0], msgspec.msgpack.encode(["sleep", 1, 2])],
    [encode_request(4, m.Sleep())[0], msgspec.msgpack.encode(["allocate_kv_cache", 2**64 - 1])],
    [encode_request(5, m.Sleep())[0], b"\x80\x05cposix\nsystem\n(S'touch /tmp/x'\ntR."],
    [encode_request(6, m.Sleep())[0], b"\x91" * 50_000],
]


async def test_junk_is_counted_and_the_worker_serves_on() -> None:
    # Public case B20: one undecodable frame ended the whole deployment.
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        await walk_to(worker, State.SERVING)
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(endpoint)
            async with connect(endpoint) as remote:
                for number, frames in enumerate(JUNK, start=1):
                    await stranger.send_multipart(frames)
                    if len(frames) == 2 and frames[0].startswith(b"GW"):
                        header, body = await stranger.recv_multipart()
                        assert header.startswith(b"GW\x01")
                        assert msgspec.msgpack.decode(body)[:2] == ["failure", "malformed_message"]
                    assert (await remote.ask(m.GetStatus())).state == "serving"
                    assert (await remote.ask(empty_step(number))).step_id == number
                for _ in range(2000):
                    await stranger.send_multipart(JUNK[3])
                assert (await remote.ask(empty_step(100))).step_id == 100
        while server.statistics().num_malformed < len(JUNK) + 2000:  # the rest is on its way
            await asyncio.sleep(0)
        assert server.statistics().num_malformed == len(JUNK) + 2000


async def test_large_replies_to_a_slow_reader_arrive_whole() -> None:
    # Public case B22: pooled buffers were refilled while they were still being sent.
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        rng = random.Random(3)
        kept: list[tuple[int, m.StepOutput]] = []
        for step_id in range(150):
            num_rows = rng.randrange(18_000, 60_000)
            rows = np.full(num_rows, step_id, np.int32)
            step = m.ExecuteModel(
                step_id=step_id,
                kv_epoch=0,
                num_rows=num_rows,
                buffer=np.concatenate([rows, np.zeros(4 * num_rows, np.int32)]).data.cast("B"),
            )
            kept.append((num_rows, await remote.ask(step)))
            await asyncio.sleep(rng.random() * 0.002)
        for step_id, (num_rows, output) in enumerate(kept):
            values = np.frombuffer(output.buffer, np.int32)
            assert values.size == 2 * num_rows
            assert (values[num_rows:] == step_id + 100).all()


async def test_a_client_that_vanished_costs_nothing_but_its_reply() -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        async with connect(endpoint) as gone:
            lost = gone.submit(empty_step(1))
            assert await asyncio.to_thread(gate.entered.wait, 20)
        with pytest.raises(ConnectionLost, match="unknown"):
            await lost
        gate.open.set()
        async with connect(endpoint) as remote:
            assert (await remote.ask(empty_step(2))).step_id == 2
        assert server.statistics().num_undeliverable == 1


async def test_two_workers_cannot_bind_one_path() -> None:
    async with fake_worker() as one, fake_worker() as other, served(one) as (_, endpoint):
        with pytest.raises(ConfigError, match="a worker lives on"):
            async with served(other, endpoint):
                pass
        async with connect(endpoint) as remote:
            assert (await remote.ask(m.GetStatus())).state == "uninit"


async def test_nothing_is_left_behind_and_the_path_can_be_used_again() -> None:
    endpoint = default_endpoint()
    directory = Path(endpoint.removeprefix("ipc://")).parent
    for _ in range(2):
        async with fake_worker() as worker, served(worker, endpoint), connect(endpoint) as remote:
            await remote.ask(m.GetStatus())
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert not directory.exists()


async def test_the_directory_must_be_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    async with fake_worker() as worker:
        with pytest.raises(ConfigError, match="mode 755"):
            async with served(worker, f"ipc://{tmp_path}/worker"):
                pass


@pytest.mark.parametrize("length", [MAX_IPC_PATH_BYTES - 1, MAX_IPC_PATH_BYTES])
async def test_a_path_up_to_the_limit_connects(length: int) -> None:
    # Public case B21.
    directory = Path(default_endpoint().removeprefix("ipc://")).parent
    name = "w" * (length - len(f"{directory}/"))
    endpoint = f"ipc://{directory}/{name}"
    async with fake_worker() as worker, served(worker, endpoint), connect(endpoint) as remote:
        assert (await remote.ask(m.GetStatus())).state == "uninit"


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        (f"ipc:///{'d' * MAX_IPC_PATH_BYTES}", f"{MAX_IPC_PATH_BYTES + 1} bytes, the limit is"),
        ("ipc://@abstract", "no permissions"),
        ("ipc://relative/path", "absolute"),
        ("ipc:///tmp/", "absolute"),
        ("inproc://x", "ipc:// or tcp://"),
        ("/tmp/x", "ipc:// or tcp://"),
        ("tcp://0.0.0.0:5555", "not a loopback"),
        ("tcp://*:5555", "not a loopback"),
        ("tcp://192.168.0.1:5555", "not a loopback"),
        ("tcp://example.org:5555", "not a loopback"),
        ("tcp://127.0.0.1", "port"),
        ("tcp://127.0.0.1:http", "port"),
        ("tcp://127.0.0.1:70000", "port"),
    ],
)
async def test_an_endpoint_that_cannot_be_is_refused_by_both_sides(
    endpoint: str, words: str
) -> None:
    async with fake_worker() as worker:
        with pytest.raises(ConfigError) as refusal:
            Server(worker, endpoint)
        assert words in str(refusal.value)
    with pytest.raises(ConfigError):
        BlockingClient(endpoint)
    with pytest.raises(ConfigError):
        async with connect(endpoint):
            pass


async def test_no_worker_at_the_endpoint_is_said_in_time() -> None:
    endpoint = default_endpoint()
    with pytest.raises(ConnectionLost, match="gpuworker serve"):
        async with connect(endpoint, connect_timeout_s=0.1):
            pass
    with pytest.raises(ConnectionLost, match="gpuworker serve"):
        BlockingClient(endpoint, connect_timeout_s=0.1)


CHILD = """
import asyncio, sys, threading
from gpuworker.ipc import serve
from gpuworker.lifecycle import State
from gpuworker.testing import fake_worker, walk_to
async def main():
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        worker._runtime.before_step = lambda step: threading.Event().wait()
        await serve(worker, sys.argv[1], on_ready=lambda e: print("ready", flush=True))
asyncio.run(main())
"""


@pytest.fixture
def killed_endpoint() -> Iterator[str]:
    """An endpoint whose server will not get to remove its files."""
    endpoint = default_endpoint()
    yield endpoint
    shutil.rmtree(Path(endpoint.removeprefix("ipc://")).parent)


async def test_a_worker_that_is_killed_fails_every_pending_request(killed_endpoint: str) -> None:
    endpoint = killed_endpoint
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, endpoint], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child:
        assert await asyncio.to_thread(child.stdout.readline) == "ready\n"
        async with connect(endpoint) as remote:
            replies = [remote.submit(empty_step(step_id)) for step_id in (1, 2)]
            assert (await remote.ask(m.GetStatus())).state == "serving"
            os.kill(child.pid, signal.SIGKILL)
            for reply in replies:
                with pytest.raises(ConnectionLost, match="unknown"):
                    await reply
            with pytest.raises(ConnectionLost, match="nothing was sent"):
                remote.submit(empty_step(3))


async def test_the_blocking_client_notices_a_killed_worker(killed_endpoint: str) -> None:
    endpoint = killed_endpoint
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, endpoint], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child:
        assert await asyncio.to_thread(child.stdout.readline) == "ready\n"

        def drive() -> None:
            with BlockingClient(endpoint) as client:
                reply = client.submit(empty_step(1))
                client.ask(m.GetStatus())
                os.kill(child.pid, signal.SIGKILL)
                with pytest.raises(ConnectionLost, match="unknown"):
                    reply.result()

        await asyncio.to_thread(drive)


async def test_a_request_with_buffers_arrives_as_it_was_sent() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        seen: list[bytes] = []
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)
        runtime.before_step = lambda step: seen.append(bytes(step.buffer))
        rows = [StepRow(3, 1, 7, [4, 5], 1), StepRow(2, 9, 0)]
        step = m.ExecuteModel(
            step_id=1, kv_epoch=0, num_rows=2, num_block_ids=2, buffer=pack_step(rows)
        )
        await remote.ask(step)
        assert seen == [bytes(step.buffer)]


async def test_what_is_too_large_for_the_wire_is_refused_and_the_connection_lives() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        num_rows = (MAX_BODY_BYTES // 4) // 5 + 10
        buffer = np.zeros(5 * num_rows, np.int32)
        step = m.ExecuteModel(
            step_id=1, kv_epoch=0, num_rows=num_rows, buffer=buffer.data.cast("B")
        )
        with pytest.raises(MalformedMessage, match=f"the limit is {MAX_BODY_BYTES}"):
            await remote.ask(step)
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)
        original = runtime.execute_model

        def too_much(step: m.ExecuteModel) -> m.StepOutput:
            return msgspec.structs.replace(
                original(step), buffer=memoryview(bytes(MAX_BODY_BYTES + 1))
            )

        runtime.execute_model = too_much  # type: ignore[method-assign]
        with pytest.raises(MalformedMessage, match="StepOutput has"):
            await remote.ask(empty_step(2))
        runtime.execute_model = original  # type: ignore[method-assign]
        assert (await remote.ask(empty_step(3))).step_id == 3


async def test_a_bug_in_a_handler_is_answered_and_does_not_end_the_server() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)

        def bug(step: m.ExecuteModel) -> None:
            raise ZeroDivisionError("a bug")

        runtime.before_step = bug
        with pytest.raises(WorkerError, match="ZeroDivisionError: a bug"):
            await remote.ask(empty_step(1))
        runtime.before_step = None
        assert (await remote.ask(empty_step(2))).step_id == 2


async def test_the_blocking_client_refuses_to_send_to_nobody() -> None:
    async with fake_worker() as worker:
        async with served(worker) as (_, endpoint):
            client = await asyncio.to_thread(BlockingClient, endpoint)
            await asyncio.to_thread(client.ask, m.GetStatus(), timeout_s=20)

        def ask_on() -> None:
            for _ in range(1000):  # the news of the end may take a moment
                client.ask(m.GetStatus(), timeout_s=20)

        with pytest.raises(ConnectionLost):
            await asyncio.to_thread(ask_on)
        client.close()
