"""Public case B20: whatever a stranger sends, the worker counts it and serves on."""

from __future__ import annotations

import asyncio
import random
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from gpuworker import messages as m
from gpuworker.ipc import BlockingClient, Server, connect
from gpuworker.lifecycle import State
from gpuworker.testing import empty_step, fake_worker, walk_to
from ipc_serving import request_frames, served

JUNK = [
    [b""],
    [b"x"],
    [b"a", b"b", b"c", b"d", b"e"],
    [random.Random(0).randbytes(1000)],
    [b"GET / HTTP/1.1\r\n\r\n", b""],
    [request_frames(1, m.Sleep())[0], msgspec.msgpack.encode([1])],
    [request_frames(5, m.Sleep())[0], b"\x80\x05cposix\nsystem\n(S'touch /tmp/x'\ntR."],
    [request_frames(6, m.Sleep())[0], b"\x91" * 50_000],
]


WRONG = {
    "unknown_message": ["no_such_message"],
    "invalid_request": ["sleep", 1, 2],
}
"""Well-formed, and answered with more than that it is junk."""


async def _counted(server: Server, number: int) -> None:
    while server.statistics().num_malformed < number:
        await asyncio.sleep(0)
    assert server.statistics().num_malformed == number


@pytest.mark.parametrize("frames", JUNK, ids=range(len(JUNK)))
async def test_junk_is_counted_and_the_worker_serves_on(frames: list[bytes]) -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        await walk_to(worker, State.SERVING)
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(endpoint)
            async with connect(endpoint) as remote:
                await stranger.send_multipart(frames)
                if frames[0].startswith(b"GW"):
                    header, body = await stranger.recv_multipart()
                    assert header.startswith(b"GW\x01")
                    assert msgspec.msgpack.decode(body)[:2] == ["failure", "malformed_message"]
                await _counted(server, 1)
                assert (await remote.ask(m.GetStatus())).state == "serving"
                assert (await remote.ask(empty_step(1))).step_id == 1


@pytest.mark.parametrize("code", WRONG)
async def test_a_message_that_is_wrong_is_answered_with_what_is_wrong(code: str) -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        await walk_to(worker, State.SERVING)
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(endpoint)
            header = request_frames(2, m.Sleep())[0]
            await stranger.send_multipart([header, msgspec.msgpack.encode(WRONG[code])])
            _, body = await stranger.recv_multipart()
            assert msgspec.msgpack.decode(body)[:2] == ["failure", code]
            assert server.statistics().num_malformed == 0


async def test_another_version_is_told_which_one_is_spoken() -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(endpoint)
            await stranger.send_multipart([b"GW\x02whatever follows", b"whatever"])
            header, body = await stranger.recv_multipart()
            assert header[:3] == b"GW\x01"
            failure = msgspec.msgpack.decode(body)
            assert failure[:2] == ["failure", "unsupported_version"]
            assert "versions 1 to 1" in failure[2]
            assert server.statistics().num_malformed == 1


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_ten_thousand_pieces_of_junk_cost_no_memory(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        await walk_to(worker, State.SERVING)
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            stranger.connect(endpoint)
            resident = 0
            for number in range(1, 12_001):
                await stranger.send_multipart(JUNK[3])
                if number == 2_000:
                    await _counted(server, number)
                    resident = _resident_bytes()
            await _counted(server, 12_000)
            assert _resident_bytes() - resident < 8 << 20
        async with connect(endpoint) as remote:
            assert (await remote.ask(empty_step(1))).step_id == 1
    assert 1 <= len(caplog.records) < 100
    assert "since the start" in caplog.text


async def test_a_frame_beyond_every_limit_ends_only_its_connection() -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        await walk_to(worker, State.SERVING)
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            monitor = stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            stranger.connect(endpoint)
            await stranger.send(bytes(100_000_000))
            event = parse_monitor_message(await monitor.recv_multipart())
            assert event["event"] == zmq.EVENT_DISCONNECTED
            stranger.disable_monitor()
            monitor.close(linger=0)
        async with connect(endpoint) as remote:
            assert (await remote.ask(empty_step(1))).step_id == 1
        assert server.statistics().num_malformed == 0


def _old_frames(frames: list[bytes]) -> bytes:
    """ZMTP 1.0, which has no handshake: an anonymous peer, then length, flags and data."""
    stream = b"\x01\x00"
    for frame, more in zip(frames, (1, 0), strict=True):
        stream += bytes([len(frame) + 1, more]) + frame
    return stream


RAW = {
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "random": random.Random(1).randbytes(4096),
    "zeros": bytes(4096),
    "old protocol": _old_frames(request_frames(1, m.GetStatus())),
}


@pytest.mark.parametrize("data", RAW.values(), ids=RAW.keys())
@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_bytes_without_a_handshake_are_not_a_message(scheme: str, data: bytes) -> None:
    async with (
        fake_worker() as worker,
        served(worker, None if scheme == "ipc" else "tcp://127.0.0.1:*") as (server, endpoint),
    ):
        await walk_to(worker, State.SERVING)

        def stranger() -> bytes:
            if scheme == "ipc":
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(endpoint.removeprefix("ipc://"))
            else:
                connection = socket.create_connection(
                    ("127.0.0.1", int(endpoint.rpartition(":")[2]))
                )
            answer = b""
            with connection, suppress(ConnectionError):  # it may be cut off at any point
                connection.settimeout(20)
                connection.sendall(data)
                while part := connection.recv(4096):
                    answer += part
            return answer

        assert b"GW" not in await asyncio.to_thread(stranger)
        async with connect(endpoint) as remote:
            assert (await remote.ask(empty_step(1))).step_id == 1
        assert server.statistics().num_requests == 4  # health, hello, a step, the end
        assert server.statistics().num_malformed == 0


FLOOD = """
import sys, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
print("ready", flush=True)
while True:
    socket.send(b"junk")
"""


async def test_a_flood_does_not_starve_the_other_clients() -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        await walk_to(worker, State.SERVING)
        flooding = [
            subprocess.Popen(
                [sys.executable, "-c", FLOOD, endpoint], stdout=subprocess.PIPE, text=True
            )
            for _ in range(3)
        ]
        try:
            while server.statistics().num_malformed < 1000:
                await asyncio.sleep(0.01)

            def ask() -> None:
                with BlockingClient(endpoint, timeout_s=20) as client:
                    for _ in range(200):
                        client.ask(m.GetStatus())

            await asyncio.to_thread(ask)
        finally:
            for process in flooding:
                process.kill()
                process.communicate()
