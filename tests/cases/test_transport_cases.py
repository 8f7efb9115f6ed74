"""Public cases B19, B20 and B21: pickles, junk and long paths on a worker's endpoint."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import socket
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import zmq
import zmq.asyncio

from gpuworker import messages as m
from gpuworker.errors import ClientError, ConfigError
from gpuworker.ipc import BlockingClient, RemoteWorker, Server, connect, default_endpoint
from gpuworker.ipc.endpoint import EVENTS_SUFFIX
from gpuworker.lifecycle import State
from gpuworker.testing import empty_step, fake_worker, walk_to
from ipc_serving import raw_router, reply_frames, request_frames, served

UNIX_LIMIT = 107
HEADER = request_frames(7, m.GetStatus())[0]
PREFIX = HEADER[:3]
encode = msgspec.msgpack.encode


class Steps:
    """Asks for what a well-behaved scheduler asks for."""

    def __init__(self, remote: RemoteWorker) -> None:
        self._remote = remote
        self._step_id = 0

    async def still_work(self) -> None:
        self._step_id += 1
        assert (await self._remote.ask(m.GetHealth(), timeout_s=20)).state == "serving"
        output = await self._remote.ask(empty_step(self._step_id), timeout_s=20)
        assert output.step_id == self._step_id


def _stranger(context: zmq.asyncio.Context, endpoint: str) -> zmq.asyncio.Socket:
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.LINGER, 0)
    stranger.connect(endpoint)
    return stranger


# -- B19: a pickle ----------------------------------------------------------------------------


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return os.mknod, (str(self._marker),)


def _carriers(evil: bytes) -> dict[str, list[bytes]]:
    ext = msgspec.msgpack.Ext
    return {
        "alone": [evil],
        "first frame": [evil, b""],
        "behind the magic": [PREFIX + evil, encode(["get_status"])],
        "header field": [PREFIX + encode([1, evil, 0, 0, 0]), encode(["get_status"])],
        "header extension": [PREFIX + encode([1, ext(1, evil), 0, 0, 0]), encode(["get_status"])],
        "payload": [HEADER, evil],
        "binary payload": [HEADER, encode(evil)],
        "tag": [HEADER, encode([evil])],
        "extension": [HEADER, encode(ext(1, evil))],
        "extension as a message": [HEADER, encode([ext(1, evil)])],
        "extension as a field": [HEADER, encode(["sleep", ext(1, evil)])],
        "timestamp extension": [HEADER, encode(["sleep", ext(-1, evil)])],
        "buffer of a step": [HEADER, encode(["execute_model", 1, 0, 1, 0, evil])],
        "third frame": [HEADER, encode(["get_status"]), evil],
    }


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
async def test_b19_a_pickle_is_never_loaded(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    evil = pickle.dumps(Trap(marker), protocol)
    pickle.loads(evil)
    marker.unlink()  # what must not come back: this pickle does what it is made for
    async with (
        fake_worker() as worker,
        served(worker) as (server, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        steps = Steps(remote)
        with zmq.asyncio.Context() as context, _stranger(context, endpoint) as stranger:
            for frames in _carriers(evil).values():
                num_before = server.statistics()
                await stranger.send_multipart(frames)
                while server.statistics() == num_before:
                    await asyncio.sleep(0)
                await steps.still_work()
        assert not marker.exists()


@pytest.mark.parametrize("protocol", [0, pickle.HIGHEST_PROTOCOL])
def test_b19_a_pickle_in_an_answer_is_not_loaded_by_a_client(tmp_path: Path, protocol: int) -> None:
    marker = tmp_path / "marker"
    evil = pickle.dumps(Trap(marker), protocol)
    for body in (evil, encode(evil), encode(["status", msgspec.msgpack.Ext(1, evil)])):
        with (
            raw_router() as (router, endpoint),
            BlockingClient(endpoint, observe=True, timeout_s=20) as client,
        ):
            pending = client.submit(m.GetStatus())
            peer, *_ = router.recv_multipart()
            router.send_multipart([peer, evil, body])
            with pytest.raises(ClientError):
                pending.result()
            second = client.submit(m.GetStatus())
            router.send_multipart([peer, reply_frames(2, m.Closed())[0], body])
            with pytest.raises(ClientError):
                second.result()
    assert not marker.exists()


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:5555", "tcp://*:5555", "tcp://[::]:0"])
async def test_b19_an_open_socket_without_keys_is_refused(endpoint: str) -> None:
    async with fake_worker() as worker:
        with pytest.raises(ConfigError, match=r"all addresses .* needs keys"):
            Server(worker, endpoint)


# -- B20: junk --------------------------------------------------------------------------------


class Junk(NamedTuple):
    """What a stranger sends, and the code of the answer; none where nobody can be answered."""

    frames: Sequence[bytes]
    code: str | None = None


JUNK = {
    "empty message": Junk([b""]),
    "two empty frames": Junk([b"", b""]),
    "one frame": Junk([b"x"]),
    "only a header": Junk([HEADER], "malformed_message"),
    "five frames": Junk([HEADER, b"a", b"b", b"c", b"d"], "malformed_message"),
    "five thousand frames": Junk([HEADER] + [bytes(1000)] * 5000, "message_too_large"),
    "random": Junk([random.Random(7).randbytes(1000)]),
    "random body": Junk([HEADER, random.Random(8).randbytes(1000)], "malformed_message"),
    "array of an int": Junk([HEADER, encode([1])], "malformed_message"),
    "no array": Junk([HEADER, encode({"tag": "sleep"})], "malformed_message"),
    "nothing": Junk([HEADER, b""], "malformed_message"),
    "unknown tag": Junk([HEADER, encode(["no_such_message"])], "unknown_message"),
    "unknown field": Junk([HEADER, encode(["sleep", 1, "more"])], "invalid_request"),
    "int 2**64 - 1": Junk([HEADER, encode(["sleep", 2**64 - 1])], "invalid_request"),
    "int 2**64": Junk([HEADER, encode(["sleep", float(2**64)])], "invalid_request"),
    "huge header number": Junk([PREFIX + encode([1, 2**64 - 1, 0, 0, 0]), encode(["get_status"])]),
    "bool for an int": Junk([HEADER, encode(["sleep", True])], "invalid_request"),
    "trailing bytes": Junk([HEADER, encode(["get_status"]) + b"\x00"], "malformed_message"),
    "a string that claims 100 MB": Junk(
        [HEADER, b"\x91\xdb" + (100_000_000).to_bytes(4, "big")], "malformed_message"
    ),
    "an array that claims 2**32": Junk([HEADER, b"\xdd\xff\xff\xff\xff"], "malformed_message"),
    "nesting": Junk([HEADER, b"\x91" * 100_000], "malformed_message"),
    "nesting behind a tag": Junk(
        [HEADER, b"\x92" + encode("sleep") + b"\x91" * 100_000], "malformed_message"
    ),
    "http": Junk([b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"]),
}


async def _answer(stranger: zmq.asyncio.Socket) -> str:
    header, body = await stranger.recv_multipart()
    assert header.startswith(b"GW\x01")
    failure = msgspec.msgpack.decode(body)
    assert failure[0] == "failure"
    return str(failure[1])


async def test_b20_after_every_piece_of_junk_the_worker_serves_on() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (server, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        steps = Steps(remote)
        with zmq.asyncio.Context() as context, _stranger(context, endpoint) as stranger:
            for name, (frames, code) in JUNK.items():
                before = server.statistics()
                await stranger.send_multipart(frames)
                if code is not None:
                    assert await _answer(stranger) == code, name
                while server.statistics() == before:
                    await asyncio.sleep(0)
                await steps.still_work()


async def test_b20_what_is_too_large_for_a_frame_ends_its_connection_only() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (server, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        steps = Steps(remote)
        with (
            zmq.asyncio.Context() as context,
            _stranger(context, endpoint) as stranger,
            stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor,
        ):
            await stranger.send_multipart([HEADER, encode("x" * 100_000_000)])
            await monitor.recv_multipart()
            stranger.disable_monitor()
        await steps.still_work()
        assert server.statistics().num_malformed == 0  # it never came that far


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_b20_a_scanner_on_the_bare_socket_gets_nothing(scheme: str) -> None:
    probes = (
        b"",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + random.Random(2).randbytes(500),
        b"SSH-2.0-scanner\r\n",
        random.Random(3).randbytes(1000),
        b"\xff" + bytes(8) + b"\x7f\x03\x01NULL" + bytes(44) + random.Random(4).randbytes(500),
    )
    endpoint = default_endpoint() if scheme == "ipc" else "tcp://127.0.0.1:*"

    async def scan(bound: str, probe: bytes) -> bytes:
        if scheme == "ipc":
            reader, writer = await asyncio.open_unix_connection(bound.removeprefix("ipc://"))
        else:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", int(bound.rpartition(":")[2])
            )
        answer = b""
        writer.write(probe)
        with suppress(OSError):  # it may be cut off at any point
            writer.write_eof()
            answer = await reader.read()
        writer.close()
        return answer

    async with (
        fake_worker() as worker,
        served(worker, endpoint) as (server, bound),
        connect(bound) as remote,
    ):
        await walk_to(worker, State.SERVING)
        steps = Steps(remote)
        await steps.still_work()
        num_requests = server.statistics().num_requests
        for number, probe in enumerate(probes, 1):
            assert b"GW" not in await asyncio.wait_for(scan(bound, probe), 20)
            await steps.still_work()
            assert server.statistics().num_requests == num_requests + 2 * number
        assert server.statistics().num_malformed == 0


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_b20_ten_thousand_repeats_cost_no_memory(caplog: pytest.LogCaptureFixture) -> None:
    # The five thousand frames are left out: they are five megabytes each.
    junk = [case for name, case in JUNK.items() if name != "five thousand frames"]
    num_rounds = 10_000 // len(junk) + 1
    warm_rounds = num_rounds // 5
    async with (
        fake_worker() as worker,
        served(worker) as (server, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        steps = Steps(remote)
        with zmq.asyncio.Context() as context, _stranger(context, endpoint) as stranger:
            resident = 0
            for number in range(num_rounds):
                for frames, _ in junk:
                    await stranger.send_multipart(frames)
                for _, code in junk:
                    if code is not None:
                        assert await _answer(stranger) == code
                if number % 50 == 0:
                    await steps.still_work()
                if number == warm_rounds:
                    resident = _resident_bytes()
            assert _resident_bytes() - resident < 8 << 20
        await steps.still_work()
        assert server.statistics().num_malformed > num_rounds
        assert server.statistics().num_undeliverable == 0
    assert 1 <= len(caplog.records) < 100  # not one line each


# -- B21: long paths --------------------------------------------------------------------------


def _long_temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / ("d" * 100)
    directory.mkdir()
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert Path(tempfile.gettempdir()) == directory
    return directory


async def test_b21_a_long_temporary_directory_is_avoided_and_two_workers_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = _long_temporary_directory(tmp_path, monkeypatch)
    one, other = default_endpoint(), default_endpoint()
    assert one != other
    async with (
        fake_worker() as first,
        fake_worker() as second,
        served(first, one),
        served(second, other),
        connect(one) as remote_first,
        connect(other) as remote_second,
    ):
        await remote_first.ask(m.InitDevice())
        assert (await remote_first.ask(m.GetStatus())).state == "device_ready"
        assert (await remote_second.ask(m.GetStatus())).state == "uninit"
        for endpoint in (one, other):
            place = Path(endpoint.removeprefix("ipc://")).parent
            assert stat.S_IMODE(place.stat().st_mode) == 0o700
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("length", [UNIX_LIMIT - 1, UNIX_LIMIT, UNIX_LIMIT + 1])
@pytest.mark.parametrize("letter", ["w", "\u00fc"])
async def test_b21_around_the_limit_it_connects_or_says_what_is_too_long(
    length: int, letter: str
) -> None:
    # The longest name in use is that of the events' socket; bytes count, not letters.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        room = length - len(f"{directory}/{EVENTS_SUFFIX}")
        num_letters, rest = divmod(room, len(letter.encode()))
        path = f"{directory}/{letter * num_letters}{'x' * rest}"
        assert len(f"{path}{EVENTS_SUFFIX}".encode()) == length
        async with fake_worker() as worker:
            if length <= UNIX_LIMIT:
                async with (
                    served(worker, f"ipc://{path}"),
                    connect(f"ipc://{path}") as remote,
                ):
                    assert (await remote.ask(m.GetStatus())).state == "uninit"
                with socket.socket(socket.AF_UNIX) as events:
                    events.bind(f"{path}{EVENTS_SUFFIX}")
                return
            with pytest.raises(ConfigError) as refusal:
                Server(worker, f"ipc://{path}")
        base_bytes = len(path.encode())
        for words in (repr(path), f"has {base_bytes} bytes", f"limit is {base_bytes - 1}"):
            assert words in str(refusal.value)
        with pytest.raises(ConfigError) as same:
            BlockingClient(f"ipc://{path}")
        assert str(same.value) == str(refusal.value)
        assert list(Path(directory).iterdir()) == []
