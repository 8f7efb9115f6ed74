"""Endpoints: what can be used, what is private, and who owns a path."""

from __future__ import annotations

import fcntl
import stat
from pathlib import Path

import pytest

from gpuworker import messages as m
from gpuworker.errors import ConfigError
from gpuworker.ipc import BlockingClient, Server, connect, default_endpoint
from gpuworker.ipc.endpoint import MAX_IPC_PATH_BYTES
from gpuworker.testing import fake_worker
from ipc_serving import served


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
        ("tcp://0.0.0.0:5555", "needs keys"),
        ("tcp://*:5555", "needs keys"),
        ("tcp://192.168.0.1:5555", "needs keys"),
        ("tcp://example.org:5555", "needs keys"),
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


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:*", "tcp://127.0.0.1:0"])
async def test_a_client_needs_the_port_that_the_worker_got(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="names no port"):
        BlockingClient(endpoint)
    with pytest.raises(ConfigError, match="names no port"):
        async with connect(endpoint):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "127.0.0.2"])
async def test_port_zero_becomes_the_port_that_was_bound(host: str) -> None:
    async with fake_worker() as worker, served(worker, f"tcp://{host}:0") as (_, bound):
        assert int(bound.rpartition(":")[2]) > 0
        async with connect(bound) as remote:
            assert (await remote.ask(m.GetStatus())).state == "uninit"


@pytest.mark.parametrize("name", ["worker", "worker.lock"])
async def test_a_file_at_the_path_is_not_removed(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o700)
    precious = tmp_path / name
    precious.write_text("precious")
    async with fake_worker() as worker:
        with pytest.raises(ConfigError, match=r"(use|name) another path"):
            async with served(worker, f"ipc://{tmp_path}/worker"):
                pass
    assert precious.read_text() == "precious"
    assert list(tmp_path.iterdir()) == [precious]


async def test_a_socket_that_a_killed_worker_left_is_taken_over(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/worker"
    async with fake_worker() as worker:
        async with served(worker, endpoint):
            (tmp_path / "worker").rename(tmp_path / "left")
        (tmp_path / "left").rename(tmp_path / "worker")
        (tmp_path / "worker.lock").touch()
        async with served(worker, endpoint), connect(endpoint) as remote:
            assert (await remote.ask(m.GetStatus())).state == "uninit"
    assert [path.name for path in tmp_path.iterdir()] == ["worker.epoch"]


async def test_a_lock_that_its_last_owner_removed_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Between our open and our flock the other worker ended: our file is nobody's any more, and
    # a third worker would lock a new one.
    tmp_path.chmod(0o700)
    lock_file = tmp_path / "worker.lock"
    inodes: list[int] = []
    flock = fcntl.flock

    def ends_in_between(descriptor: int, operation: int) -> None:
        inodes.append(lock_file.stat().st_ino)
        if len(inodes) == 1:
            lock_file.rename(tmp_path / "removed")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", ends_in_between)
    async with fake_worker() as worker, served(worker, f"ipc://{tmp_path}/worker"):
        assert len(inodes) == 2
        assert lock_file.stat().st_ino == inodes[1] != inodes[0]


async def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with fake_worker() as worker:
        with pytest.raises(ConfigError, match="cannot make"):
            async with served(worker, f"ipc://{tmp_path}/file/worker"):
                pass


async def test_a_port_in_use_is_a_configuration_error() -> None:
    async with fake_worker() as worker, served(worker, "tcp://127.0.0.1:*") as (_, bound):
        with pytest.raises(ConfigError, match="cannot bind"):
            await Server(worker, bound).run()
