"""The publisher: everybody gets a snapshot, numbers have no gaps, the slow hold nobody up."""

from __future__ import annotations

import asyncio
import gc
import socket as sockets
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from event_source import BOOT, ToySource, following, free_endpoint, published
from gpuworker import events as e
from gpuworker.errors import ConfigError
from gpuworker.ipc.publisher import Publisher
from gpuworker.ipc.subscriber import Follower, Gap, Heard
from gpuworker.ipc.wire import decode_event_header

DEADLINE_S = 20.0
MAX_GROWTH_BYTES = 2 << 20


async def _next(follower: Follower) -> Heard | Gap:
    async with asyncio.timeout(DEADLINE_S):
        return await anext(follower)


async def _snapshot(follower: Follower) -> Heard:
    while True:
        item = await _next(follower)
        if isinstance(item, Heard) and item.is_snapshot:
            return item


async def _event(follower: Follower) -> Heard:
    """The next that is no snapshot, which may be meant for somebody else."""
    while True:
        item = await _next(follower)
        assert isinstance(item, Heard), item
        if not item.is_snapshot:
            return item


async def test_each_late_joiner_gets_the_snapshot_of_its_moment() -> None:
    async with published() as (source, at):

        async def go_on_changing() -> None:
            while True:
                source.change_state()
                await asyncio.sleep(0.001)

        changing = asyncio.create_task(go_on_changing())
        for _ in range(100):
            async with following(at, "state") as follower:
                snapshot = await _snapshot(follower)
                assert isinstance(snapshot.event, e.StateChanged)
                assert int(snapshot.event.state) == snapshot.seq
                assert (await _event(follower)).seq == snapshot.seq + 1
        changing.cancel()
        await asyncio.wait([changing])


async def test_all_who_come_at_the_same_time_get_it() -> None:
    async with published() as (source, at), AsyncExitStack() as stack:
        followers = [
            await stack.enter_async_context(following(at, *topics))
            for topics in [("state",), ("kv_epoch",), ("state", "kv_epoch"), ()] * 5
        ]
        for follower in followers:
            await _snapshot(follower)
        source.change_state()
        source.change_epoch()
        for index, follower in enumerate(followers):
            kind = e.KVEpochChanged if index % 4 == 1 else e.StateChanged
            item = await _event(follower)
            assert (type(item.event), item.seq) == (kind, 1)


async def test_a_topic_is_numbered_without_gaps_and_frames_say_whose_it_is() -> None:
    async with published() as (source, at):
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as raw:
            raw.connect(at)
            raw.subscribe("")
            for _ in range(2):  # the snapshot
                await raw.recv_multipart()
            for number in range(60):
                source.change_state()
                if number % 3 == 0:
                    source.change_epoch()
            seqs: dict[bytes, list[int]] = {b"state": [], b"kv_epoch": []}
            for _ in range(80):
                async with asyncio.timeout(DEADLINE_S):
                    topic, frame, _ = await raw.recv_multipart()
                header = decode_event_header(frame)
                assert (header.kind, header.is_snapshot, header.boot_id) == (3, False, BOOT)
                seqs[topic].append(header.seq)
    assert seqs == {b"state": list(range(1, 61)), b"kv_epoch": list(range(1, 21))}


async def test_a_slow_subscriber_finds_every_gap_and_holds_nobody_up() -> None:
    num_events = 3000
    async with (
        published() as (source, at),
        following(at, "state", queue=1) as deaf,
        following(at, "state") as reader,
    ):
        for follower in (deaf, reader):
            await _snapshot(follower)
        source.padding = "x" * 2000
        for number in range(1, num_events + 1):
            source.change_state()
            assert (await _event(reader)).seq == number
        num_heard = num_missed = last = 0
        while not num_missed:
            item = await _next(deaf)
            if isinstance(item, Gap):
                num_missed = item.num_missed
            elif not item.is_snapshot:
                num_heard, last = num_heard + 1, item.seq
                source.change_state()  # dropped until the queue has room again
        assert last == num_heard
        after = await _next(deaf)
        assert isinstance(after, Heard)
        assert after.seq == num_heard + num_missed + 1
        assert num_missed > num_events - num_heard


JUNK = {
    "zmtp 1.0": b"\x01\x00\x07\x00\x01state" * 40,
    "a subscription without a greeting": b"\x00\x06\x01state",
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "noise": bytes(index * 7 % 256 for index in range(4096)),
    "half a greeting": b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03",
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK)
async def test_junk_on_the_socket_does_not_end_it(junk: bytes) -> None:
    async with published() as (source, at), following(at, "state") as witness:
        await _snapshot(witness)
        for _ in range(20):
            with sockets.socket(sockets.AF_UNIX) as raw:
                raw.connect(at.removeprefix("ipc://"))
                raw.sendall(junk)
        async with following(at, "state") as follower:
            assert (await _snapshot(follower)).seq == 0
        source.change_state()
        assert (await _event(witness)).seq == 1


async def test_only_topics_can_be_subscribed_to_and_junk_is_no_subscription() -> None:
    async with published() as (source, at):
        with zmq.asyncio.Context() as context, context.socket(zmq.XSUB) as rude:
            rude.connect(at)
            for said in (b"", b"\x07", b"\x02state", b"\x01sta", b"\x01statement", b"x" * 200):
                await rude.send(said)
            await rude.send_multipart([b"\x07", b"state"])
            await rude.send(b"\x01kv_epoch")
            async with asyncio.timeout(DEADLINE_S):
                assert (await rude.recv_multipart())[0] == b"kv_epoch"
            source.change_state()
            source.change_epoch()
            async with asyncio.timeout(DEADLINE_S):
                topic, header, _ = await rude.recv_multipart()
            assert (topic, decode_event_header(header).seq) == (b"kv_epoch", 1)


async def test_who_unsubscribes_hears_no_more_and_who_leaves_takes_nothing_from_others() -> None:
    async with published() as (source, at), following(at, "state") as stays:
        await _snapshot(stays)
        async with following(at, "state") as leaves:
            await _snapshot(leaves)
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as fickle:
            fickle.connect(at)
            fickle.subscribe("state")
            async with asyncio.timeout(DEADLINE_S):
                await fickle.recv_multipart()
            fickle.unsubscribe("state")
            fickle.subscribe("kv_epoch")  # processed after the other, as its snapshot shows
            async with asyncio.timeout(DEADLINE_S):
                while (await fickle.recv_multipart())[0] != b"kv_epoch":
                    pass
                source.change_state()
                source.change_epoch()
                assert (await fickle.recv_multipart())[0] == b"kv_epoch"
        assert (await _event(stays)).seq == 1


def _resident_bytes() -> int:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def test_subscribing_and_unsubscribing_does_not_grow_memory() -> None:
    async with published() as (_, at), following(at, "kv_epoch") as witness:
        await _snapshot(witness)

        async def cycles(number: int) -> None:
            with zmq.asyncio.Context() as context, context.socket(zmq.XSUB) as fickle:
                fickle.setsockopt(zmq.SNDHWM, 0)  # it would drop what the publisher is to hear
                fickle.connect(at)
                for _ in range(number):
                    await fickle.send(b"\x01state")
                    await fickle.send(b"\x00state")
                await fickle.send(b"\x01kv_epoch")
                async with asyncio.timeout(DEADLINE_S):
                    while (await fickle.recv_multipart())[0] != b"kv_epoch":
                        pass

        await cycles(1000)
        before = _resident_bytes()
        for _ in range(5):
            await cycles(1000)
        assert _resident_bytes() - before < MAX_GROWTH_BYTES


async def test_a_publisher_that_was_stopped_says_no_more() -> None:
    faults: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    source = ToySource()
    publisher = Publisher(source, BOOT)
    with free_endpoint() as endpoint, zmq.Context() as context:
        at = publisher.start(context, endpoint)
        async with following(at, "state") as follower:
            await _snapshot(follower)
            async with following(at, "state"):
                async with asyncio.timeout(DEADLINE_S):
                    while not publisher._newly_subscribed:
                        await asyncio.sleep(0)
                publisher.stop()  # while a snapshot is due
                assert not source.listeners
                source.change_state()
                loop = asyncio.get_running_loop()
                due = loop.create_future()
                loop.call_later(0.02, due.set_result, None)  # after the snapshot was due
                await due
    assert faults == []


async def test_time_is_let_pass_and_the_figures_are_due_now_and_then() -> None:
    source = ToySource()
    publisher = Publisher(source, BOOT)
    with free_endpoint() as endpoint, zmq.Context() as context:
        publisher.start(context, endpoint)
        running = asyncio.create_task(publisher.run())
        async with asyncio.timeout(DEADLINE_S):
            while len(source.ticks) < 5:
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        publisher.stop()
    assert source.ticks[:5] == [True, False, False, False, True]


async def test_an_endpoint_that_cannot_be_bound_is_an_error_before_anything_is_listened_to() -> (
    None
):
    source = ToySource()
    with zmq.Context() as context, pytest.raises(ConfigError, match=r"cannot bind ipc:///nowhere"):
        Publisher(source, BOOT).start(context, "ipc:///nowhere/there")
    assert not source.listeners
