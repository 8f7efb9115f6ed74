"""What libzmq does by default, and that our sockets, as they are configured, do not suffer it.

| trap                                                    | where it is tested                     |
|---------------------------------------------------------|----------------------------------------|
| LINGER: term waits for ever for a peer that is gone     | here: leaving; replies in flight       |
| a monitor that is not closed holds term up              | here: leaving                          |
| ROUTER drops what it cannot route without a word        | here: gone peers                       |
| ... and one that only sends never learns who has gone   | here: gone peers                       |
| HWM: ROUTER drops for a slow peer, DEALER blocks        | here: slow peers                       |
| ... and one slow client must not hold up the others     | test_server: does_not_read             |
| PUB drops for a slow subscriber                         | here: the others get everything        |
| a subscriber that joins late misses what was said       | here: every subscription is heard      |
| ... and XPUB remembers every prefix that it makes up    | known: only who may connect is decided |
| two peers with one identity; HANDOVER gives replies away| here: identities                       |
| reconnect sends what was left over to the next worker   | test_connection: never_reaches_the_next|
| a restart forgets what was sent and not read            | test_session, test_fencing (seq, hello)|
| heartbeats: a stopped process is seen                   | here: stopped worker                   |
| ... and libzmq aborts on one for a broken connection    | test_connection: floods_and_dies       |
| ... and cannot see a stuck GIL: that is health's        | tests/cases/test_health_cases          |
| a killed worker is seen                                 | test_connection: killed                |
| a cancelled receive loses its message                   | here: cancelled asks                   |
| MAXMSGSIZE: no limit by default                         | test_junk: beyond_every_limit          |
| ... and counts what encryption adds                     | test_curve: largest_bodies             |
| ... and counts each frame by itself                     | tests/cases/test_transport_cases       |
| ... and a message that never ends is kept till its peer | not prevented: who may connect at all  |
|     leaves, whatever its size                           | is what protects (directory, keys)     |
| ipc path longer than a socket's name                    | test_endpoint, test_transport_cases    |
| the mode of an ipc socket follows the umask             | here: nobody else                      |
| a stale socket file is left behind                      | test_endpoint: killed_worker_left      |
| a second bind on a live path steals its connections     | here and test_endpoint: two_workers    |
| bind removes whatever file is in its way                | test_endpoint: a_file_at_the_path      |
| an abstract socket has no permissions                   | test_endpoint: cannot_be               |
| ZMTP 1.0 needs no handshake: raw bytes are delivered    | test_junk (ROUTER); here: the others   |
| HTTP and random bytes                                   | test_junk: without_a_handshake         |
| a peer that says nothing keeps its descriptor           | here: silent peers                     |
| CURVE without an authenticator lets everybody in        | test_curve: nobody_who_admits          |
| an allow-list of addresses shuts ipc out                | test_curve: listed_client (ipc)        |
| create_certificates lets everybody read the secret      | test_curve: first_moment               |
| every default                                           | here: every option                     |
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count

import pytest
import zmq
from zmq.utils.monitor import parse_monitor_message

from gpuworker import messages as m
from gpuworker.errors import ConfigError, ConnectionLost
from gpuworker.ipc import BlockingClient, connect, default_endpoint
from gpuworker.ipc.endpoint import events_endpoint, ipc_path
from gpuworker.ipc.lock import owned
from gpuworker.ipc.sockets import (
    configure_client,
    configure_publisher,
    configure_server,
    configure_subscriber,
)
from gpuworker.ipc.wire import MAX_BODY_BYTES
from gpuworker.testing import fake_worker
from ipc_serving import raw_router, served

WAIT_MS = 20_000
SIDES: dict[str, tuple[int, Callable[..., None]]] = {
    "server": (zmq.ROUTER, configure_server),
    "client": (zmq.DEALER, configure_client),
    "publisher": (zmq.XPUB, configure_publisher),
    "subscriber": (zmq.SUB, configure_subscriber),
}


@pytest.fixture
def endpoint() -> Iterator[str]:
    """An ipc endpoint whose path is ours while the test runs."""
    endpoint = default_endpoint()
    with owned(ipc_path(endpoint)):
        yield endpoint


@contextmanager
def made(side: str, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    """A socket as the package configures it, not yet bound or connected."""
    kind, configure = SIDES[side]
    with zmq.Context() as context, context.socket(kind) as made:
        configure(made, endpoint)
        yield made


@contextmanager
def pair(endpoint: str) -> Iterator[tuple[zmq.Socket[bytes], zmq.Socket[bytes], bytes]]:
    """Server and client that know each other, and the client's routing id."""
    with made("server", endpoint) as server, made("client", endpoint) as client:
        server.bind(endpoint)
        client.connect(endpoint)
        client.send(b"here I am")
        assert server.poll(WAIT_MS)
        yield server, client, server.recv_multipart()[0]


def grant(publisher: zmq.Socket[bytes]) -> bytes:
    """Do what the subscriber who spoke last asks for, as the publisher does; returns it."""
    assert publisher.poll(WAIT_MS)
    said = publisher.recv()
    publisher.setsockopt(zmq.SUBSCRIBE if said[:1] == b"\x01" else zmq.UNSUBSCRIBE, said[1:])
    return said


# -- every option -----------------------------------------------------------------------------

DEFAULTS = {
    zmq.SNDTIMEO: -1,
    zmq.MAXMSGSIZE: -1,
    zmq.HANDSHAKE_IVL: 30_000,
    zmq.ZAP_DOMAIN: b"",
    zmq.TCP_KEEPALIVE: -1,
}


@pytest.mark.parametrize("side", SIDES)
def test_nothing_that_waits_or_grows_for_ever_is_left_as_it_was(side: str, endpoint: str) -> None:
    with (
        made(side, endpoint) as ours,
        zmq.Context() as context,
        context.socket(SIDES[side][0]) as plain,
    ):
        for option, default in DEFAULTS.items():
            assert plain.getsockopt(option) == default
            assert ours.getsockopt(option) != default, option.name
        assert 0 <= ours.getsockopt(zmq.LINGER) <= 1000
        is_client = side == "client"
        assert (ours.getsockopt(zmq.HEARTBEAT_IVL) > 0) == is_client
        assert (ours.getsockopt(zmq.RCVHWM) == 0) == is_client
        assert (ours.getsockopt(zmq.RECONNECT_IVL) > 10**8) == (side in ("client", "subscriber"))
        assert ours.getsockopt(zmq.RCVHWM) < 1000
        assert (ours.getsockopt(zmq.MAXMSGSIZE) < MAX_BODY_BYTES) == (side == "publisher")


def _for_ever(act: Callable[[], object]) -> None:
    while True:
        act()


# -- leaving ----------------------------------------------------------------------------------


async def test_leaving_waits_for_nobody_though_requests_were_not_sent() -> None:
    # By default term waits for ever. A context ends within its client's with block.
    with raw_router() as (_, endpoint):
        with (
            BlockingClient(endpoint, observe=True) as blocking,
            pytest.raises(ConnectionLost, match="does not read"),
        ):
            _for_ever(lambda: blocking.submit(m.GetStatus()))
        async with connect(endpoint, observe=True) as remote:
            for _ in range(10_000):
                remote.submit(m.GetStatus())
    assert blocking._context.closed
    assert blocking._monitor.closed
    assert remote._socket.context.closed


def test_leaving_waits_for_nobody_though_no_worker_ever_came(endpoint: str) -> None:
    with zmq.Context() as context:
        client = context.socket(zmq.DEALER)
        configure_client(client, endpoint)
        client.connect(endpoint)
        client.send(b"never sent")
        client.close()
    assert context.closed


def test_replies_that_are_under_way_arrive_though_the_server_closes(endpoint: str) -> None:
    # close(0) throws away what is still in the queue.
    with made("client", endpoint) as client:
        with made("server", endpoint) as server:
            server.bind(endpoint)
            client.connect(endpoint)
            client.send(b"here I am")
            assert server.poll(WAIT_MS)
            peer, _ = server.recv_multipart()
            for _ in range(100):
                server.send_multipart([peer, bytes(200_000)])
        for _ in range(100):
            assert client.poll(WAIT_MS)
            assert len(client.recv()) == 200_000


# -- peers that are gone, slow, late ----------------------------------------------------------


def test_what_cannot_be_routed_is_an_error_for_strangers_and_for_gone_peers(
    endpoint: str,
) -> None:
    with made("server", endpoint) as server:
        server.bind(endpoint)
        with made("client", endpoint) as client:
            client.connect(endpoint)
            client.send(b"here I am")
            assert server.poll(WAIT_MS)
            peer, _ = server.recv_multipart()
            with pytest.raises(zmq.ZMQError) as unknown:
                server.send_multipart([b"nobody", b"x"])
            assert unknown.value.errno == errno.EHOSTUNREACH

        def send() -> None:
            # A ROUTER that only sends never learns of it: LoopSocket looks after each send, too.
            server.poll(0)
            server.send_multipart([peer, b"x"])

        with pytest.raises(zmq.ZMQError) as gone:
            _for_ever(send)
        assert gone.value.errno == errno.EHOSTUNREACH


@pytest.mark.parametrize("sender", ["server", "client"])
def test_what_a_slow_peer_has_no_room_for_is_refused_and_the_rest_arrives(
    endpoint: str, sender: str
) -> None:
    with made("server", endpoint) as server, made("client", endpoint) as client:
        # The client's own limit is off, as its replies are as many as its requests.
        client.setsockopt(zmq.RCVHWM, 10)
        server.bind(endpoint)
        client.connect(endpoint)
        client.send(b"here I am")
        assert server.poll(WAIT_MS)
        peer, _ = server.recv_multipart()
        source, reader, prefix = (
            (server, client, [peer]) if sender == "server" else (client, server, [])
        )
        numbers = count()
        with pytest.raises(zmq.Again):
            _for_ever(
                lambda: source.send_multipart(
                    [*prefix, next(numbers).to_bytes(4, "big") + bytes(10_000)], zmq.NOBLOCK
                )
            )
        num_accepted = next(numbers) - 1
        assert num_accepted > 10
        for number in range(num_accepted):
            assert reader.poll(WAIT_MS)
            assert int.from_bytes(reader.recv_multipart()[-1][:4], "big") == number
        assert not reader.poll(0)


def test_a_subscriber_that_does_not_read_costs_the_others_nothing(endpoint: str) -> None:
    at = events_endpoint(endpoint)
    with (
        made("publisher", at) as publisher,
        made("subscriber", at) as deaf,
        made("subscriber", at) as reader,
    ):
        publisher.bind(at)
        for subscriber in (deaf, reader):
            subscriber.setsockopt(zmq.SUBSCRIBE, b"")
            subscriber.connect(at)
            grant(publisher)
        for number in range(5000):
            publisher.send(number.to_bytes(4, "big") + bytes(2000))
            assert reader.poll(WAIT_MS)
            assert int.from_bytes(reader.recv()[:4], "big") == number
        got: list[int] = []
        while deaf.poll(0):
            got.append(int.from_bytes(deaf.recv()[:4], "big"))
        # Dropped events show as a gap in their numbers; what came is in order.
        assert got == sorted(set(got))
        assert len(got) < 5000


def test_every_subscription_is_heard_also_a_second_one_to_a_topic(endpoint: str) -> None:
    # By default XPUB passes on only the first subscription to a topic; whoever comes later would
    # get no snapshot. One that waits for the subscription loses nothing.
    at = events_endpoint(endpoint)
    with made("publisher", at) as publisher:
        publisher.bind(at)
        for _ in range(3):
            with made("subscriber", at) as subscriber:
                subscriber.setsockopt(zmq.SUBSCRIBE, b"state")
                subscriber.connect(at)
                while (said := grant(publisher)) != b"\x01state":
                    assert said == b"\x00state"  # the one before has left
                for number in range(100):
                    publisher.send(b"state" + bytes([number]))
                for number in range(100):
                    assert subscriber.poll(WAIT_MS)
                    assert subscriber.recv() == b"state" + bytes([number])


def test_a_second_peer_with_an_identity_gets_nothing_that_is_meant_for_the_first(
    endpoint: str,
) -> None:
    with made("server", endpoint) as server, made("client", endpoint) as first:
        assert first.getsockopt(zmq.ROUTING_ID) == b""  # ours have none: the server makes them
        server.bind(endpoint)
        first.setsockopt(zmq.ROUTING_ID, b"the scheduler")
        first.connect(endpoint)
        first.send(b"hello")
        assert server.poll(WAIT_MS)
        assert server.recv_multipart() == [b"the scheduler", b"hello"]
        with made("client", endpoint) as second:
            second.setsockopt(zmq.ROUTING_ID, b"the scheduler")
            with second.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
                second.connect(endpoint)
                second.send(b"I am the scheduler")
                # The connection is there and means nothing; what follows came after it.
                with made("client", endpoint) as third:
                    third.connect(endpoint)
                    third.send(b"here I am")
                    assert server.poll(WAIT_MS)
                    assert server.recv_multipart()[1] == b"here I am"
                server.send_multipart([b"the scheduler", b"welcome"])
                assert first.poll(WAIT_MS)
                assert first.recv() == b"welcome"
                assert not second.poll(0)
                second.disable_monitor()
                monitor.close()


def test_many_clients_have_as_many_names(endpoint: str) -> None:
    with made("server", endpoint) as server, zmq.Context() as context:
        server.bind(endpoint)
        clients = []
        for number in range(100):
            client = context.socket(zmq.DEALER)
            configure_client(client, endpoint)
            client.connect(endpoint)
            client.send(str(number).encode())
            clients.append(client)
        names: dict[bytes, bytes] = {}
        while len(names) < 100:
            assert server.poll(WAIT_MS)
            peer, number_text = server.recv_multipart()
            names[peer] = number_text
        for peer, number_text in names.items():
            server.send_multipart([peer, number_text])
        for number, client in enumerate(clients):
            assert client.poll(WAIT_MS)
            assert client.recv() == str(number).encode()
            client.close()


async def test_a_cancelled_ask_takes_no_reply_of_others_with_it() -> None:
    # A receive that is cancelled while its message is there loses the message.
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint, observe=True) as remote,
    ):
        for _ in range(200):
            doomed = asyncio.ensure_future(remote.ask(m.GetStatus()))
            kept = remote.submit(m.GetStatus())
            await asyncio.sleep(0)
            doomed.cancel()
            assert (await kept).state == "uninit"
            with suppress(asyncio.CancelledError):
                await doomed


# -- a stopped worker -------------------------------------------------------------------------

SERVING = """
import asyncio, sys
from gpuworker.ipc import serve
from gpuworker.testing import fake_worker
async def main():
    async with fake_worker() as worker:
        await serve(worker, sys.argv[1], on_ready=lambda e: print(e, flush=True))
asyncio.run(main())
"""


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_a_worker_that_was_stopped_is_noticed_by_the_heartbeats(scheme: str) -> None:
    # Nothing ends a connection to a process that only stands still.
    endpoint = default_endpoint() if scheme == "ipc" else "tcp://127.0.0.1:*"
    with subprocess.Popen(
        [sys.executable, "-c", SERVING, endpoint], stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        bound = (await asyncio.to_thread(child.stdout.readline)).strip()
        try:
            async with connect(bound, observe=True) as remote:
                assert (await remote.ask(m.GetStatus())).state == "uninit"
                child.send_signal(signal.SIGSTOP)
                with pytest.raises(ConnectionLost, match="went away"):
                    await remote.submit(m.GetStatus())
        finally:
            child.send_signal(signal.SIGCONT)
            child.send_signal(signal.SIGINT)
            child.wait()


# -- files ------------------------------------------------------------------------------------


def test_nobody_else_reaches_a_socket_whatever_the_umask_is() -> None:
    endpoint = default_endpoint()
    path = ipc_path(endpoint)
    assert path is not None
    before = os.umask(0)
    try:
        with owned(path), made("server", endpoint) as server:
            server.bind(endpoint)
            assert stat.S_IMODE(path.stat().st_mode) == 0o777  # what libzmq makes of it
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700  # what guards it
    finally:
        os.umask(before)
    assert not path.parent.exists()


def test_a_live_path_is_not_bound_twice(endpoint: str) -> None:
    # libzmq alone lets the second one have it, and all clients from then on.
    path = ipc_path(endpoint)
    with made("server", endpoint) as server, made("server", endpoint) as thief:
        server.bind(endpoint)
        with pytest.raises(ConfigError, match="a worker lives on"), owned(path):
            thief.bind(endpoint)
        with made("client", endpoint) as client:
            client.connect(endpoint)
            client.send(b"whose is it?")
            assert server.poll(WAIT_MS)


# -- strangers --------------------------------------------------------------------------------


def _old(frame: bytes) -> bytes:
    """A frame of ZMTP 1.0 from an anonymous peer."""
    return b"\x01\x00" + bytes([len(frame) + 1, 0]) + frame


@pytest.mark.parametrize("side", ["server", "publisher"])
def test_the_old_protocol_delivers_nothing(side: str, endpoint: str) -> None:
    with made(side, endpoint) as ours, socket.socket(socket.AF_UNIX) as stranger:
        ours.bind(endpoint)
        stranger.settimeout(20)
        stranger.connect(endpoint.removeprefix("ipc://"))
        with suppress(ConnectionError):
            stranger.sendall(_old(b"\x01state"))
            while stranger.recv(4096):  # until it is cut off
                pass
        assert not ours.poll(0)


@pytest.mark.parametrize("side", ["client", "subscriber"])
def test_a_worker_of_the_old_protocol_is_not_believed(side: str, endpoint: str) -> None:
    with made(side, endpoint) as ours, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(endpoint.removeprefix("ipc://"))
        listener.listen()
        if side == "subscriber":
            ours.setsockopt(zmq.SUBSCRIBE, b"")
        with ours.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            ours.connect(endpoint)
            connection, _ = listener.accept()
            with connection:
                connection.sendall(_old(b"a reply") * 3)
                assert monitor.poll(WAIT_MS)
            ours.disable_monitor()
        assert not ours.poll(0)


def test_a_peer_that_says_nothing_is_put_out(endpoint: str) -> None:
    # Default: it may keep a descriptor of ours for half a minute.
    with made("server", endpoint) as server, socket.socket(socket.AF_UNIX) as silent:
        server.bind(endpoint)
        silent.settimeout(20)
        silent.connect(endpoint.removeprefix("ipc://"))
        while silent.recv(4096):  # its greeting, then the end
            pass


def test_a_frame_beyond_the_limit_is_not_delivered_and_ends_its_connection(endpoint: str) -> None:
    with pair(endpoint) as (server, client, _):
        with client.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            client.send(bytes(MAX_BODY_BYTES + 1000))
            assert monitor.poll(WAIT_MS)
            event = parse_monitor_message(monitor.recv_multipart())["event"]
            assert event == zmq.EVENT_DISCONNECTED
            client.disable_monitor()
        assert not server.poll(0)


def test_a_subscriber_cannot_fill_the_publisher(endpoint: str) -> None:
    at = events_endpoint(endpoint)
    with made("publisher", at) as publisher, made("subscriber", at) as stranger:
        publisher.bind(at)
        stranger.connect(at)
        with stranger.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
            stranger.setsockopt(zmq.SUBSCRIBE, bytes(1000))
            assert monitor.poll(WAIT_MS)
            stranger.disable_monitor()
        assert not publisher.poll(0)
