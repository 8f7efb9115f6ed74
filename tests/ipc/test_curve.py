"""Keys: files that only their owner reads, and connections that only the listed clients get."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
import zmq
import zmq.auth
import zmq.utils.z85
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils.monitor import parse_monitor_message

from gpuworker import messages as m
from gpuworker.cli import main
from gpuworker.errors import ConfigError, ConnectionLost
from gpuworker.ipc import BlockingClient, Server, connect, default_endpoint
from gpuworker.ipc.curve import (
    Admission,
    ClientKeys,
    ServerKeys,
    authenticating,
    load_client_keys,
    load_server_keys,
)
from gpuworker.ipc.key_files import (
    KeyPair,
    load_public_key,
    load_public_keys,
    load_secret_key,
    write_key_pair,
)
from gpuworker.ipc.sockets import configure_client, configure_server
from gpuworker.ipc.wire import MAX_BODY_BYTES
from gpuworker.testing import fake_worker
from ipc_serving import raw_router, served


@pytest.fixture
def keys(tmp_path: Path) -> tuple[ServerKeys, ClientKeys]:
    worker, worker_secret = write_key_pair(tmp_path / "worker", "worker")
    client, client_secret = write_key_pair(tmp_path / "client", "scheduler")
    return load_server_keys(worker_secret, client), load_client_keys(client_secret, worker)


# -- files -------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_a_secret_key_is_private_from_its_first_moment(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # zmq.auth.create_certificates writes it for everybody to read.
    modes: dict[str, int] = {}
    system_open = os.open

    def spying_open(path: Path, flags: int, mode: int = 0o777) -> int:
        descriptor = system_open(path, flags, mode)
        modes[path.name] = stat.S_IMODE(os.fstat(descriptor).st_mode)
        assert flags & os.O_EXCL
        return descriptor

    before = os.umask(umask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", spying_open)
            public, secret = write_key_pair(tmp_path / "keys", "worker")
    finally:
        os.umask(before)
    assert modes == {"worker.key_secret": 0o600, "worker.key": 0o644 & ~umask}
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(secret.parent.stat().st_mode) == 0o700
    pair = load_secret_key(secret)
    assert pair.public == load_public_key(public) == zmq.curve_public(pair.secret)


def test_the_files_are_certificates_that_other_tools_read(tmp_path: Path) -> None:
    public, secret = write_key_pair(tmp_path, "worker")
    pair = load_secret_key(secret)
    assert zmq.auth.load_certificate(secret) == (pair.public, pair.secret)
    assert zmq.auth.load_certificate(public) == (pair.public, None)
    theirs, theirs_secret = map(Path, zmq.auth.create_certificates(tmp_path, "theirs"))
    theirs_secret.chmod(0o600)
    theirs.chmod(0o644)
    assert load_secret_key(theirs_secret).public == load_public_key(theirs)


@pytest.mark.parametrize("taken", ["worker.key", "worker.key_secret"])
def test_a_key_is_never_overwritten_and_no_half_of_a_pair_is_left(
    tmp_path: Path, taken: str
) -> None:
    (tmp_path / taken).write_text("precious")
    with pytest.raises(ConfigError, match=f"{taken} exists"):
        write_key_pair(tmp_path, "worker")
    assert [path.name for path in tmp_path.iterdir()] == [taken]
    assert (tmp_path / taken).read_text() == "precious"


def test_a_key_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "worker.key_secret").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="exists"):
        write_key_pair(tmp_path, "worker")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "-rf", ".hidden", "a b", "x" * 65])
def test_a_name_that_is_not_a_plain_file_name_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name of a key"):
        write_key_pair(tmp_path / "keys", name)
    assert not (tmp_path / "keys").exists()


def test_a_directory_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot make"):
        write_key_pair(tmp_path / "file" / "keys", "worker")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o620, 0o601])
def test_a_secret_that_others_can_reach_is_refused(tmp_path: Path, mode: int) -> None:
    _, secret = write_key_pair(tmp_path, "worker")
    secret.chmod(mode)
    with pytest.raises(ConfigError, match=f"mode {mode:03o}.*chmod 600"):
        load_secret_key(secret)
    secret.chmod(0o400)
    assert len(load_secret_key(secret).secret) == 40


def test_a_secret_of_somebody_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, secret = write_key_pair(tmp_path, "worker")
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    with pytest.raises(ConfigError, match=f"belongs to user {somebody - 1}"):
        load_secret_key(secret)


def test_a_secret_is_read_from_a_plain_file_only(tmp_path: Path) -> None:
    _, secret = write_key_pair(tmp_path, "worker")
    (tmp_path / "link").symlink_to(secret)
    with pytest.raises(ConfigError, match="link may not stand for it"):
        load_secret_key(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe", 0o600)  # opening it would wait for a writer
    (tmp_path / "directory").mkdir(0o700)
    for name in ("pipe", "directory"):
        with pytest.raises(ConfigError, match="is not a file"):
            load_secret_key(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot read the key"):
        load_secret_key(tmp_path / "nothing")


PUBLIC, SECRET = zmq.curve_keypair()
OTHER, _ = zmq.curve_keypair()
WRONG = {
    "nothing": b"",
    "a bare key": PUBLIC,
    "short": b'public-key = "short"',
    "no Z85": b'public-key = "' + b"~" * 40 + b'"',
    "beyond 32 bits": b'public-key = "' + b"#" * 40 + b'"',
    "not ASCII": 'public-key = "\u00e4\u00e4"'.encode(),
    "twice": b'public-key = "' + PUBLIC + b'"\npublic-key = "' + OTHER + b'"',
    "more than keys": b'public-key = "' + PUBLIC + b'"\nexecute = "this"',
    "endless": b'public-key = "' + PUBLIC + b'"\n' + b"#\n" * 4096,
    "binary": bytes(range(256)),
}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_a_file_without_a_key_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "wrong"
    path.write_bytes(data)
    path.chmod(0o600)
    for load in (load_public_key, load_secret_key):
        with pytest.raises(ConfigError, match="no key that can be read"):
            load(path)


@given(data=st.binary(max_size=200) | st.text(max_size=100).map(lambda text: text.encode()))
def test_whatever_a_file_holds_the_answer_is_a_configuration_error(
    data: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.key"
    path.write_bytes(data + b"\n" + b'public-key = "' + data[:40] + b'"\n')
    path.chmod(0o600)
    with pytest.raises(ConfigError):
        load_public_key(path)


def test_public_and_secret_are_not_confused(tmp_path: Path) -> None:
    public, secret = write_key_pair(tmp_path, "worker")
    with pytest.raises(ConfigError, match="holds a secret key"):
        load_client_keys(secret, secret)
    public.chmod(0o600)
    with pytest.raises(ConfigError, match="holds no secret key"):
        load_client_keys(public, public)
    text = secret.read_bytes().replace(load_public_key(public), OTHER)
    secret.write_bytes(text)
    with pytest.raises(ConfigError, match="no pair"):
        load_secret_key(secret)


def test_a_directory_lists_the_clients_and_an_empty_one_would_let_nobody_in(
    tmp_path: Path,
) -> None:
    _, secret = write_key_pair(tmp_path, "worker")
    clients = tmp_path / "clients"
    clients.mkdir(0o755)
    with pytest.raises(ConfigError, match="nobody could connect"):
        load_server_keys(secret, clients)
    publics = [load_public_key(write_key_pair(clients, name)[0]) for name in ("a", "b")]
    assert load_server_keys(secret, clients).clients == frozenset(publics)
    assert load_public_keys(clients / "a.key") == frozenset(publics[:1])
    with pytest.raises(ConfigError, match="cannot read the key"):
        load_server_keys(secret, tmp_path / "nothing.key")
    (clients / "broken.key").touch(0o644)  # nobody is left out without a word
    with pytest.raises(ConfigError, match=r"broken\.key"):
        load_server_keys(secret, clients)


def test_public_keys_that_others_may_write_are_not_believed(tmp_path: Path) -> None:
    clients = tmp_path / "clients"
    public, _ = write_key_pair(clients, "scheduler")
    public.chmod(0o666)
    with pytest.raises(ConfigError, match=r"mode 666.*chmod go-w"):
        load_public_key(public)
    public.chmod(0o644)
    clients.chmod(0o777)
    with pytest.raises(ConfigError, match=r"mode 777.*chmod go-w"):
        load_public_keys(clients)


def test_secrets_do_not_show(tmp_path: Path, keys: tuple[ServerKeys, ClientKeys]) -> None:
    for key in (*keys, KeyPair(PUBLIC, SECRET)):
        assert key.public.decode() in repr(key)
        assert key.secret.decode() not in repr(key)
        assert key.secret.decode() not in str(key)


ENDED = (
    zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
)


def event_of(monitor: zmq.Socket[bytes]) -> zmq.Event:
    assert monitor.poll(20_000)
    return zmq.Event(parse_monitor_message(monitor.recv_multipart())["event"])


# -- connections -------------------------------------------------------------------------------


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_a_listed_client_is_let_in(keys: tuple[ServerKeys, ClientKeys], scheme: str) -> None:
    # On ipc, too: a list of addresses would shut it out, which is why there is none.
    endpoint = default_endpoint() if scheme == "ipc" else "tcp://127.0.0.1:*"
    async with (
        fake_worker() as worker,
        served(worker, endpoint, keys=keys[0]) as (_, bound),
        connect(bound, keys=keys[1]) as remote,
    ):
        assert (await remote.ask(m.InitDevice())).device == "cpu"


@pytest.mark.parametrize("fault", ["a stranger", "no keys", "another worker expected"])
async def test_everybody_else_is_not(
    keys: tuple[ServerKeys, ClientKeys], tmp_path: Path, fault: str
) -> None:
    other_public, other_secret = write_key_pair(tmp_path / "other", "other")
    worker_public = tmp_path / "worker" / "worker.key"
    client_secret = tmp_path / "client" / "scheduler.key_secret"
    wrong = {
        "a stranger": load_client_keys(other_secret, worker_public),
        "no keys": None,
        "another worker expected": load_client_keys(client_secret, other_public),
    }[fault]
    why = {
        "a stranger": "does not let this key in",
        "no keys": r"uses? keys",
        "another worker expected": "is --server-key the right one",
    }[fault]
    async with fake_worker() as worker, served(worker, keys=keys[0]) as (server, endpoint):
        with pytest.raises(ConnectionLost, match=why):
            async with connect(endpoint, keys=wrong, connect_timeout_s=0.5):
                pass
        with pytest.raises(ConnectionLost, match=why):
            await asyncio.to_thread(
                BlockingClient, endpoint, keys=wrong, observe=True, connect_timeout_s=0.5
            )
        async with connect(endpoint, keys=keys[1]) as remote:  # and the others are served on
            assert (await remote.ask(m.GetStatus())).state == "uninit"
        assert server.statistics().num_malformed == 0


async def test_a_client_with_keys_is_not_let_in_where_none_are_used(
    keys: tuple[ServerKeys, ClientKeys],
) -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        with pytest.raises(ConnectionLost):
            async with connect(endpoint, keys=keys[1], connect_timeout_s=0.5):
                pass


def test_a_client_does_not_talk_to_a_worker_that_is_not_encrypted(
    keys: tuple[ServerKeys, ClientKeys],
) -> None:
    with raw_router() as (router, endpoint):
        with pytest.raises(ConnectionLost):
            BlockingClient(endpoint, keys=keys[1], connect_timeout_s=0.5)
        assert not router.poll(0)


async def test_the_largest_bodies_fit_with_encryption_around_them(
    keys: tuple[ServerKeys, ClientKeys], tmp_path: Path
) -> None:
    # libzmq counts the encrypted frame against its limit.
    endpoint = f"ipc://{tmp_path}/socket"
    body = bytes(MAX_BODY_BYTES)
    with zmq.Context() as context, zmq.Context() as other:
        async with authenticating(context, keys[0]), asyncio.timeout(20):
            with context.socket(zmq.ROUTER) as router, other.socket(zmq.DEALER) as dealer:
                configure_server(router, endpoint, keys[0])
                configure_client(dealer, endpoint, keys[1])
                router.bind(endpoint)
                dealer.connect(endpoint)
                dealer.send(body)
                while not router.poll(0):
                    await asyncio.sleep(0)
                peer, received = router.recv_multipart()
                assert received == body
                router.send_multipart([peer, received])
                while not dealer.poll(0):
                    await asyncio.sleep(0)
                assert dealer.recv() == body


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_without_anybody_who_admits_nobody_gets_in(
    keys: tuple[ServerKeys, ClientKeys], tmp_path: Path, scheme: str
) -> None:
    # By default libzmq takes keys without an authenticator for encryption without authentication.
    endpoint = f"ipc://{tmp_path}/socket" if scheme == "ipc" else "tcp://127.0.0.1:*"
    with (
        zmq.Context() as context,
        zmq.Context() as other,
        context.socket(zmq.ROUTER) as router,
        other.socket(zmq.DEALER) as dealer,
    ):
        configure_server(router, endpoint, keys[0])
        router.bind(endpoint)
        bound = bytes(router.getsockopt(zmq.LAST_ENDPOINT)).decode().rstrip("\0")
        configure_client(dealer, bound, keys[1])
        with dealer.get_monitor_socket(zmq.EVENT_CONNECTED | ENDED) as monitor:
            dealer.connect(bound)
            dealer.send(b"let me in")
            while (event := event_of(monitor)) not in ENDED:
                assert event == zmq.EVENT_CONNECTED
            assert event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            dealer.disable_monitor()
        assert not router.poll(0)


async def test_admissions_are_counted_and_refusals_logged_with_the_address(
    keys: tuple[ServerKeys, ClientKeys], caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context:
        async with authenticating(context, keys[0]) as admission:
            assert isinstance(admission, Admission)
            with context.socket(zmq.REQ) as asking:
                asking.setsockopt(zmq.LINGER, 0)
                asking.setsockopt(zmq.RCVTIMEO, 20_000)
                asking.connect("inproc://zeromq.zap.01")

                async def ask(*question: bytes) -> list[bytes]:
                    asking.send_multipart(question)
                    while not asking.poll(0):
                        await asyncio.sleep(0)
                    return asking.recv_multipart()

                good = zmq.utils.z85.decode(keys[1].public)
                who = (b"1.0", b"7", b"gpuworker", b"10.0.0.9", b"")
                answer = await ask(*who, b"CURVE", good)
                assert answer == [b"1.0", b"7", b"200", b"OK", keys[1].public, b""]
                for question in (
                    (*who, b"CURVE", bytes(32)),
                    (*who, b"CURVE", b""),
                    (*who, b"CURVE", b"odd"),
                    (*who, b"CURVE"),
                    (*who, b"NULL"),
                    (*who, b"PLAIN", b"user", b"password"),
                    (b"1.0", b"7", b"other", b"10.0.0.9", b"", b"CURVE", good),
                    (b"2.0", b"7", b"gpuworker", b"10.0.0.9", b"", b"CURVE", good),
                    (b"1.0", b"7"),
                ):
                    answer = await ask(*question)
                    assert answer[:3] == [b"1.0", b"7", b"400"]
                    assert answer[4:] == [b"", b""]
                await ask(b"")
            assert (admission.num_admitted, admission.num_refused) == (1, 10)
    assert "10.0.0.9" in caplog.text
    assert len(caplog.records) < 10


async def test_without_keys_there_is_nothing_to_enter() -> None:
    with zmq.Context() as context:
        async with authenticating(context, None) as admission:
            assert admission is None


@pytest.mark.parametrize("endpoint", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://[::]:0"])
async def test_every_address_needs_keys(keys: tuple[ServerKeys, ClientKeys], endpoint: str) -> None:
    # Public case B19: a socket on every interface that believes whatever arrives.
    async with fake_worker() as worker:
        with pytest.raises(ConfigError, match=r"needs keys: make them with gpuworker keygen"):
            Server(worker, endpoint)
        async with served(worker, endpoint, keys=keys[0]) as (_, bound):
            port = bound.rpartition(":")[2]
            loopback = "[::1]" if "[" in endpoint else "127.0.0.1"
            async with connect(f"tcp://{loopback}:{port}", keys=keys[1]) as remote:
                assert (await remote.ask(m.GetStatus())).state == "uninit"
    with pytest.raises(ConfigError, match="needs keys"):
        BlockingClient("tcp://192.0.2.1:5555")


def test_the_command_makes_pairs_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keygen", str(tmp_path / "k"), "worker"]) == 0
    said = capsys.readouterr().out
    assert f"{tmp_path}/k/worker.key_secret  to keep" in said
    secret = load_secret_key(tmp_path / "k" / "worker.key_secret").secret.decode()
    assert secret not in said
    assert main(["keygen", str(tmp_path / "k"), "worker"]) == 2
    assert "exists, and a key is not overwritten" in capsys.readouterr().err
    assert main(["keygen", "--json", str(tmp_path / "k"), "../worker"]) == 2
