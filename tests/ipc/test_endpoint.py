"""Endpoints: what can be used, what is private, and who owns a path."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import tempfile
from pathlib import Path

import pytest
import zmq

from gpuworker import messages as m
from gpuworker.errors import ConfigError
from gpuworker.ipc import BlockingClient, Server, connect, default_endpoint
from gpuworker.ipc.endpoint import (
    EPOCH_SUFFIX,
    EVENTS_SUFFIX,
    LOCK_SUFFIX,
    MAX_IPC_PATH_BYTES,
    check_endpoint,
    check_peer,
    events_endpoint,
    events_peer,
    prepare_directory,
)
from gpuworker.ipc.lock import owned
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


def test_the_limit_is_what_the_longest_socket_beside_it_can_have() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        longest = f"{directory}/".ljust(MAX_IPC_PATH_BYTES, "w") + EVENTS_SUFFIX
        with zmq.Context() as context, context.socket(zmq.XPUB) as events:
            with pytest.raises(zmq.ZMQError, match="longer than 107"):
                events.bind(f"ipc://{longest}w")
            events.bind(f"ipc://{longest}")


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
        ("tcp://:5555", "names no host"),
        ("ipc:///tmp/w/worker.events", "belongs to another"),
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


@pytest.mark.parametrize("suffix", [EVENTS_SUFFIX, LOCK_SUFFIX, EPOCH_SUFFIX])
def test_an_endpoint_is_not_the_file_of_another_one(suffix: str) -> None:
    with pytest.raises(ConfigError, match="belongs to another socket"):
        check_endpoint(f"ipc:///tmp/w/worker{suffix}")


LOOPBACK = ["127.0.0.1", "127.0.0.2", "[::1]", "localhost"]
REMOTE = ["192.168.0.1", "10.0.0.1", "[2001:db8::1]", "[fe80::1%eth0]", "eth0", "example.org"]
WILDCARD = ["*", "0.0.0.0", "[::]", "[::0]"]


@pytest.mark.parametrize("host", LOOPBACK)
@pytest.mark.parametrize("port", ["0", "*", "5555"])
def test_a_loopback_address_needs_no_keys(host: str, port: str) -> None:
    for encrypted in (False, True):
        assert check_endpoint(f"tcp://{host}:{port}", encrypted=encrypted)
        if port == "5555":
            assert check_peer(f"tcp://{host}:{port}", encrypted=encrypted)


@pytest.mark.parametrize("host", [*REMOTE, *WILDCARD])
def test_any_other_address_needs_keys_and_the_error_names_the_way_out(host: str) -> None:
    endpoint = f"tcp://{host}:5555"
    with pytest.raises(ConfigError) as refusal:
        check_endpoint(endpoint)
    for words in (endpoint, "gpuworker keygen", "ipc://", "tcp://127.0.0.1"):
        assert words in str(refusal.value)
    assert ("all addresses" in str(refusal.value)) == (host in WILDCARD)
    assert check_endpoint(endpoint, encrypted=True) == endpoint
    with pytest.raises(ConfigError, match="needs keys"):
        check_peer(endpoint)


@pytest.mark.parametrize("host", WILDCARD)
def test_a_client_connects_to_one_address(host: str) -> None:
    with pytest.raises(ConfigError, match="connect to one of them"):
        check_peer(f"tcp://{host}:5555", encrypted=True)


@pytest.mark.parametrize(
    "host", ["", "::1", "[localhost]", "[127.0.0.1", "a b", "eth0;127.0.0.1", "-x", "x/y", "[::1]x"]
)
@pytest.mark.parametrize("encrypted", [False, True])
def test_what_is_no_host_is_refused_with_keys_too(host: str, encrypted: bool) -> None:
    # A source address ("eth0;...") and a bare IPv6 address mean to libzmq what nobody intended.
    with pytest.raises(ConfigError, match="names no host"):
        check_endpoint(f"tcp://{host}:5555", encrypted=encrypted)


def test_events_have_a_socket_beside_ipc_and_a_port_beside_tcp() -> None:
    assert events_endpoint("ipc:///run/w/worker") == "ipc:///run/w/worker.events"
    assert events_endpoint("tcp://127.0.0.1:5555") == "tcp://127.0.0.1:*"
    assert events_endpoint("tcp://[::1]:0") == "tcp://[::1]:*"


@pytest.mark.parametrize(
    ("reached", "announced", "connected"),
    [
        ("ipc:///mnt/w/worker", "ipc:///run/w/worker.events", "ipc:///mnt/w/worker.events"),
        ("tcp://10.0.0.1:5555", "tcp://0.0.0.0:6666", "tcp://10.0.0.1:6666"),
        ("tcp://[::1]:5555", "tcp://[::]:6666", "tcp://[::1]:6666"),
        ("tcp://gpu7:5555", "tcp://192.0.2.1:6666", "tcp://gpu7:6666"),
    ],
)
def test_a_worker_sends_nobody_elsewhere_for_its_events(
    reached: str, announced: str, connected: str
) -> None:
    assert events_peer(reached, announced) == connected


@pytest.mark.parametrize("announced", ["", "tcp://", "tcp://x:", "tcp://x:*", "tcp://x:99999"])
def test_an_announcement_without_a_port_is_refused(announced: str) -> None:
    with pytest.raises(ConfigError, match="port"):
        events_peer("tcp://127.0.0.1:5555", announced)


def test_every_directory_that_is_made_is_private(tmp_path: Path) -> None:
    # mkdir(parents=True) gives its mode to the last one only, and others could then swap that.
    path = tmp_path / "a" / "b" / "worker"
    before = os.umask(0)
    try:
        assert prepare_directory(path)
    finally:
        os.umask(before)
    for directory in (path.parent, path.parent.parent):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert not prepare_directory(path)


def test_the_default_goes_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert default_endpoint().startswith("ipc:///tmp/gpuworker-")
    monkeypatch.setattr(tempfile, "tempdir", "/var/tmp")
    for unusable in ("", "relative", "/nonexistent", f"/tmp/{'x' * 90}"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", unusable)
        assert default_endpoint().startswith("ipc:///var/tmp/gpuworker-")
    assert check_endpoint(default_endpoint()) != default_endpoint()


def test_both_sockets_of_an_endpoint_are_taken_over_and_removed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    path = tmp_path / "worker"
    events = Path(f"{path}{EVENTS_SUFFIX}")
    for left in (path, events):
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(left))
    with owned(path):
        assert Path(f"{path}{LOCK_SUFFIX}").exists()
    assert list(tmp_path.iterdir()) == []


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


@pytest.mark.parametrize("name", ["worker", "worker.lock", "worker.events"])
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
