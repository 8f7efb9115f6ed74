"""Connections: workers and clients that vanish, late starts, answers that cannot be read."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from gpuworker import messages as m
from gpuworker.errors import ConnectionLost, MailboxFull
from gpuworker.ipc import BlockingClient, connect, default_endpoint
from gpuworker.ipc.wire import failure_of
from gpuworker.lifecycle import State
from gpuworker.testing import empty_step, fake_worker, walk_to
from ipc_serving import Gate, raw_router, reply_frames, served


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


async def test_a_worker_that_starts_after_its_clients_is_found() -> None:
    endpoint = default_endpoint()

    async def ask() -> m.Status:
        async with connect(endpoint, observe=True, connect_timeout_s=60) as remote:
            return await remote.ask(m.GetStatus())

    def ask_blocking() -> m.Status:
        with BlockingClient(endpoint, observe=True, timeout_s=60, connect_timeout_s=60) as client:
            return client.ask(m.GetStatus())

    async with asyncio.TaskGroup() as group:
        early = [group.create_task(ask()), group.create_task(asyncio.to_thread(ask_blocking))]
        await asyncio.sleep(0.25)  # both have tried in vain by now, and will succeed if not
        async with fake_worker() as worker, served(worker, endpoint):
            for task in early:
                assert (await task).state == "uninit"


FULL = MailboxFull("full")
REPLY = reply_frames(1, m.Closed())
UNREADABLE = {
    "one frame": [b"junk"],
    "no header": [b"junk", REPLY[1]],
    "other version": [b"GW\x09" + REPLY[0][3:], REPLY[1]],
    "no message": [REPLY[0], b"\xc1"],
    "reply to something else": REPLY,
}


@pytest.mark.parametrize("answer", UNREADABLE.values(), ids=UNREADABLE.keys())
async def test_an_answer_that_cannot_be_read_leaves_nobody_waiting(answer: list[bytes]) -> None:
    with raw_router() as (router, endpoint):
        async with connect(endpoint, observe=True) as remote:
            first = remote.submit(m.GetStatus())
            peer, *_ = router.recv_multipart()
            router.send_multipart([peer, *answer])
            with pytest.raises(ConnectionLost, match="unknown"):
                await first
            second = remote.submit(m.GetStatus())
            router.send_multipart([peer, *reply_frames(2, failure_of(FULL))])
            with pytest.raises(MailboxFull):
                await second


@pytest.mark.parametrize("answer", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_the_blocking_client_survives_an_answer_that_cannot_be_read(answer: list[bytes]) -> None:
    with (
        raw_router() as (router, endpoint),
        BlockingClient(endpoint, timeout_s=20, observe=True) as client,
    ):
        first = client.submit(m.GetStatus())
        peer, *_ = router.recv_multipart()
        router.send_multipart([peer, *answer])
        for _ in range(2):  # the error stays
            with pytest.raises(ConnectionLost, match="unknown"):
                first.result()
        second = client.submit(m.GetStatus())
        router.send_multipart([peer, *reply_frames(2, failure_of(FULL))])
        with pytest.raises(MailboxFull):
            second.result()


def _wait_until_gone(endpoint: str) -> None:
    """Let libzmq notice that the other side closed: a new connection is refused by then."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as probe:
        monitor = probe.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED)
        probe.connect(endpoint)
        assert monitor.poll(20_000)
        probe.disable_monitor()
        monitor.close(linger=0)
        probe.close(linger=0)
    time.sleep(0.05)


async def test_replies_that_came_before_the_worker_ended_count() -> None:
    with raw_router() as (router, endpoint):
        async with connect(endpoint, observe=True) as remote:
            replies = [remote.submit(m.Shutdown()) for _ in range(100)]
            pending = remote.submit(m.GetStatus())
            for corr in range(1, 101):
                peer, *_ = router.recv_multipart()
                router.send_multipart([peer, *reply_frames(corr, m.Closed())])
            router.close()
            _wait_until_gone(endpoint)  # the loop stands still: replies and loss arrive together
            for reply in replies:
                assert isinstance(await reply, m.Closed)
            with pytest.raises(ConnectionLost, match="GetStatus is unknown"):
                await pending


def test_the_blocking_client_takes_the_reply_that_came_before_the_worker_ended() -> None:
    with (
        raw_router() as (router, endpoint),
        BlockingClient(endpoint, timeout_s=20, observe=True) as client,
    ):
        closed, pending = client.submit(m.Shutdown()), client.submit(m.GetStatus())
        peer, *_ = router.recv_multipart()
        router.send_multipart([peer, *reply_frames(1, m.Closed())])
        router.close()
        _wait_until_gone(endpoint)
        with pytest.raises(ConnectionLost):
            client.submit(m.GetStatus())
        assert isinstance(closed.result(), m.Closed)
        with pytest.raises(ConnectionLost, match="GetStatus is unknown"):
            pending.result()


async def test_a_request_that_was_lost_never_reaches_the_next_worker() -> None:
    with raw_router() as (router, endpoint):
        async with connect(endpoint, observe=True) as remote:
            router.close()
            _wait_until_gone(endpoint)
            lost = remote.submit(m.Shutdown())  # the loop has not heard of the loss yet
            with zmq.Context() as context, context.socket(zmq.ROUTER) as next_worker:
                next_worker.bind(endpoint)
                # Longer than ZeroMQ waits by default before it connects again.
                assert next_worker.poll(400) == 0
                with pytest.raises(ConnectionLost, match="unknown"):
                    await lost
                with pytest.raises(ConnectionLost, match="nothing was sent"):
                    remote.submit(m.Shutdown())  # lost is lost
                async with connect(endpoint, observe=True) as other:
                    asked = other.submit(m.GetStatus())
                    peer, _, body = next_worker.recv_multipart()
                    assert body == b"\x91\xaaget_status"
                    next_worker.send_multipart([peer, *reply_frames(1, failure_of(FULL))])
                    with pytest.raises(MailboxFull):
                        await asked


async def test_a_closed_client_says_so() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)

        def leave() -> None:
            with BlockingClient(endpoint, timeout_s=20) as client:
                pending = client.submit(empty_step(1))
            with pytest.raises(ConnectionLost, match="was closed; the outcome"):
                pending.result()
            with pytest.raises(ConnectionLost, match="nothing was sent"):
                client.submit(m.GetStatus())
            client.close()

        await asyncio.to_thread(leave)
        async with connect(endpoint) as remote:
            pending = remote.submit(empty_step(2))
        with pytest.raises(ConnectionLost, match="was closed; the outcome"):
            await pending
        with pytest.raises(ConnectionLost, match="nothing was sent"):
            remote.submit(m.GetStatus())
        gate.open.set()


UNREAD = """
import sys, threading, zmq
from gpuworker.ipc.sockets import configure_client, configure_server
side, endpoint = sys.argv[1:]
context = zmq.Context()
socket = context.socket(zmq.ROUTER if side == "server" else zmq.DEALER)
(configure_server if side == "server" else configure_client)(socket, endpoint)
if side == "server":
    socket.bind(endpoint)
else:
    socket.connect(endpoint)
    socket.send(b"here I am")
print("ready", flush=True)
sys.stdin.readline()  # the peer is dead; now wait for longer than a heartbeat takes
threading.Event().wait(1.6)
while socket.poll(100):
    socket.recv_multipart()
print("alive", flush=True)
context.destroy(linger=0)
"""


@pytest.mark.parametrize("side", ["server", "client"])
def test_a_peer_that_floods_and_dies_does_not_abort_the_process(side: str) -> None:
    # libzmq asserts when a heartbeat is due on a broken connection whose queue was full.
    endpoint = default_endpoint()
    directory = Path(endpoint.removeprefix("ipc://")).parent
    directory.mkdir(mode=0o700)
    flood = (
        "import sys, zmq\n"
        "socket = zmq.Context().socket(zmq.DEALER if sys.argv[1] == 'server' else zmq.ROUTER)\n"
        "socket.setsockopt(zmq.SNDTIMEO, 300)\n"
        "peer = []\n"
        "if sys.argv[1] == 'server':\n"
        "    socket.connect(sys.argv[2])\n"
        "else:\n"
        "    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)\n"
        "    socket.bind(sys.argv[2])\n"
        "    print('bound', flush=True)\n"
        "    peer = socket.recv_multipart()[:1]\n"
        "try:\n"
        "    for _ in range(50_000): socket.send_multipart([*peer, b'x'])\n"
        "except zmq.Again: pass\n"
        "print('full', flush=True)\n"
        "sys.stdin.readline()\n"
    )

    def start(script: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, side, endpoint],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    first, second = (UNREAD, flood) if side == "server" else (flood, UNREAD)
    with start(first) as one:
        assert line(one) in ("ready", "bound")
        with start(second) as two:
            unread, flooding = (one, two) if side == "server" else (two, one)
            if side == "client":
                assert line(unread) == "ready"
            assert line(flooding) == "full"
            flooding.kill()
            flooding.wait()
            output, _ = unread.communicate("go\n")
            assert (output, unread.returncode) == ("alive\n", 0)
    shutil.rmtree(directory)
