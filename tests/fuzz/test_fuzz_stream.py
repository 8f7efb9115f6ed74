"""Below the messages: streams of ZMTP that are almost right, from connections by the thousand."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from fake_serve import fake_serve
from gpuworker import messages as m
from gpuworker.errors import ConnectionLost
from gpuworker.ipc import BlockingClient, connect, default_endpoint
from gpuworker.launch import WorkerProcess
from gpuworker.testing import empty_step
from mutation import Mutator, header_of
from processes import TO_SERVING, WALK, fake_config, until

SEED = int(os.environ.get("GPUWORKER_FUZZ_SEED", "23"))
NUM_CONNECTIONS = 2_000 * int(os.environ.get("GPUWORKER_FUZZ_SCALE", "1"))
NUM_OPEN = 20
"""Connections that stay open at a time."""
DEADLINE_S = 20.0
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(16) + bytes(32)
HAS_MORE, IS_LONG, IS_COMMAND = 1, 2, 4


def _frame(flags: int, data: bytes) -> bytes:
    if len(data) > 255:
        return bytes([flags | IS_LONG]) + len(data).to_bytes(8, "big") + data
    return bytes([flags, len(data)]) + data


def _command(name: bytes, data: bytes = b"") -> bytes:
    return _frame(IS_COMMAND, bytes([len(name)]) + name + data)


def _property(name: bytes, value: bytes) -> bytes:
    return bytes([len(name)]) + name + len(value).to_bytes(4, "big") + value


def _ready(kind: bytes) -> bytes:
    return _command(b"READY", _property(b"Socket-Type", kind) + _property(b"Identity", b""))


def _message(*frames: bytes) -> bytes:
    return b"".join(
        _frame(HAS_MORE if number < len(frames) else 0, frame)
        for number, frame in enumerate(frames, 1)
    )


MESSAGES = (
    _message(header_of(1, 1), msgspec.msgpack.encode(m.GetHealth())),
    _message(header_of(1, 2), msgspec.msgpack.encode(m.EndSession())),
    _message(b"", b""),
    _message(b"x" * 300, b"y" * 70_000),
    _message(*[b"z"] * 20),
    _frame(HAS_MORE, b"never ends"),
    _command(b"PING", b"\x00\x0actx"),
    _command(b"PING", b"\x00\x00" + b"c" * 17),
    _command(b"PONG", b"ctx"),
    _command(b"SUBSCRIBE", b"topic"),
    _command(b"ERROR", b"\x03bad"),
    _command(b"READY"),
    _command(b"", b""),
    _frame(IS_COMMAND | HAS_MORE, b"\x04PING"),
    b"\x02" + b"\xff" * 8,
    b"\x06" + (2**63).to_bytes(8, "big"),
    b"\x00\xff",
)
"""What a client may say after the handshake, or may not."""


def _streams(seed: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield what to say for the handshake, and what to say when that has gone well."""
    rng = random.Random(seed)
    mutator = Mutator(rng, MESSAGES)
    while True:
        kind = rng.choice((b"DEALER", b"DEALER", b"DEALER", b"DEALER", b"ROUTER", b"PUB", b"PAIR"))
        handshake = GREETING + _ready(kind)
        parts = rng.choices(MESSAGES, k=rng.randrange(1, 6))
        way = rng.random()
        if way < 0.2:
            handshake = b"".join(mutator.mutate([handshake]))
        elif way < 0.3:  # nobody waits for the other's half
            handshake, parts = handshake + b"".join(parts), []
        elif way < 0.7:
            at = rng.randrange(len(parts))
            parts[at] = b"".join(mutator.mutate([parts[at]]))
        yield handshake, b"".join(parts)


def _num_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def _attack(path: str, handshakes: list[bool]) -> None:
    """Say all of that, and note which handshakes went well."""
    streams = _streams(SEED)
    opened: list[socket.socket] = []
    for _ in range(NUM_CONNECTIONS):
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(DEADLINE_S)
        connection.connect(path)
        handshake, rest = next(streams)
        with suppress(ConnectionError):  # it may be cut off at any point
            connection.sendall(handshake)
            handshakes.append(bool(rest) and _is_accepted(connection))
            connection.sendall(rest)
        opened.append(connection)
        if len(opened) > NUM_OPEN:
            opened.pop(0).close()
    for connection in opened:
        connection.close()


def _is_accepted(connection: socket.socket) -> bool:
    """Wait for the worker's half of a handshake; with a damaged half of ours it may not come."""
    said = b""
    connection.settimeout(0.02)
    with suppress(TimeoutError):
        while b"READY" not in said and (part := connection.recv(4096)):
            said += part
    connection.settimeout(DEADLINE_S)
    return b"READY" in said


def _look(client: BlockingClient, step_id: int) -> None:
    assert client.ask(m.GetHealth()).ready
    assert client.ask(empty_step(step_id)).step_id == step_id


async def test_a_worker_survives_streams_that_are_almost_right() -> None:
    print(f"seed {SEED}")
    handshakes: list[bool] = []
    async with WorkerProcess(fake_config(), command=fake_serve("plain")) as process:

        def drive() -> None:
            with BlockingClient(process.endpoint, timeout_s=DEADLINE_S) as client:
                for request in WALK[:TO_SERVING]:
                    client.ask(request)
                attack = threading.Thread(
                    target=_attack, args=(process.endpoint.removeprefix("ipc://"), handshakes)
                )
                attack.start()
                step_id = 0
                while attack.is_alive():  # one that behaves is served all the time
                    step_id += 1
                    _look(client, step_id)
                attack.join()
                _look(client, step_id + 1)

        before = _num_files(process.pid)
        await asyncio.to_thread(drive)
        await until(lambda: _num_files(process.pid) <= before, DEADLINE_S)
        assert process.returncode is None
        assert "Traceback" not in process.last_words()
    assert process.returncode == 0
    assert sum(handshakes) > NUM_CONNECTIONS // 3


@contextmanager
def _raw_server(handshake: bytes, rest: bytes) -> Iterator[str]:
    """Answer every connection with the same bytes, whatever it says."""
    endpoint = default_endpoint()
    path = Path(endpoint.removeprefix("ipc://"))
    path.parent.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()
        stopped = threading.Event()

        def serve() -> None:
            opened: list[socket.socket] = []
            while True:
                connection, _ = server.accept()
                if stopped.is_set():
                    connection.close()
                    break
                opened.append(connection)
                with suppress(ConnectionError):
                    connection.sendall(handshake)
                    if rest:
                        _read_handshake(connection)
                        connection.sendall(rest)
            for connection in opened:
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield endpoint
        finally:
            stopped.set()
            with socket.socket(socket.AF_UNIX) as last:
                last.connect(str(path))
            thread.join()
    path.unlink()
    path.parent.rmdir()


def _read_handshake(connection: socket.socket) -> None:
    said = b""
    while b"READY" not in said and (part := connection.recv(4096)):
        said += part


ROUTER = GREETING + _ready(b"ROUTER")
STREAMS = {
    "nothing": (b"", b""),
    "http": (b"HTTP/1.1 400 Bad Request\r\n\r\n", b""),
    "greeting only": (GREETING, b""),
    "another socket": (GREETING + _ready(b"PUB"), b""),
    "error command": (GREETING + _command(b"ERROR", b"\x03bad"), b""),
    "huge frame": (ROUTER, b"\x02\x7f" + b"\xff" * 7),
    "junk reply": (ROUTER, _message(b"GW\x01junk", b"junk") * 100),
}


@pytest.mark.parametrize("stream", STREAMS)
async def test_a_client_is_told_that_nobody_answers(stream: str) -> None:
    with _raw_server(*STREAMS[stream]) as endpoint:

        def ask() -> None:
            with BlockingClient(
                endpoint, observe=True, connect_timeout_s=0.3, timeout_s=DEADLINE_S
            ) as client:
                client.ask(m.GetHealth())

        async def ask_in_time() -> None:
            async with connect(
                endpoint, observe=True, connect_timeout_s=0.3, timeout_s=DEADLINE_S
            ) as worker:
                await worker.ask(m.GetHealth())

        for asking in (asyncio.to_thread(ask), ask_in_time()):
            with pytest.raises(ConnectionLost):
                await asking
