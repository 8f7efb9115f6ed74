"""The subscriber: what was missed is counted, waits can be given up, nothing received hurts."""

from __future__ import annotations

import asyncio
from collections import deque

import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from event_source import BOOT, following, free_endpoint, published
from gpuworker import events as e
from gpuworker import messages as m
from gpuworker.errors import ConfigError, ConnectionLost
from gpuworker.ipc.blocking_subscriber import watch_blocking
from gpuworker.ipc.subscriber import Gap, Heard, Inbox, Subscription
from gpuworker.ipc.wire import EventHeader, Kind, event_header
from gpuworker.lifecycle import State
from gpuworker.testing import fake_worker, walk_to
from ipc_serving import served

DEADLINE_S = 20.0
STATE = e.StateChanged(state="serving", previous="warmed_up")


def _frames(seq: int, *, is_snapshot: bool = False, boot_id: str = BOOT) -> list[bytes]:
    header = EventHeader(Kind.EVENT, seq, is_snapshot, boot_id)
    return [b"state", event_header(header), e.encode_event(STATE)]


def test_a_snapshot_that_somebody_else_asked_for_does_not_hide_a_gap() -> None:
    subscription = Subscription(BOOT)
    subscription.take(_frames(3, is_snapshot=True))
    assert subscription.take(_frames(7, is_snapshot=True)) == [
        Gap("state", 4),
        Heard(STATE, 7, True),
    ]
    assert subscription.take(_frames(8)) == [Heard(STATE, 8, False)]


@given(
    said=st.lists(st.tuples(st.booleans(), st.booleans()), max_size=60),
)
def test_what_is_missed_is_counted_whatever_is_dropped(said: list[tuple[bool, bool]]) -> None:
    subscription = Subscription(BOOT)
    seq = first = last = num_heard = num_missed = 0
    has_begun = False
    for is_snapshot, arrives in said:
        seq += not is_snapshot
        if not arrives:
            continue
        items = subscription.take(_frames(seq, is_snapshot=is_snapshot))
        *gaps, heard = items
        assert heard == Heard(STATE, seq, is_snapshot)
        num_missed += sum(gap.num_missed for gap in gaps if isinstance(gap, Gap))
        if has_begun:
            num_heard += not is_snapshot
        else:
            first, has_begun = seq, True
        last = seq
    assert num_heard + num_missed == last - first


def test_what_was_heard_comes_before_the_word_that_the_connection_is_lost() -> None:
    inbox = Inbox(Subscription(BOOT), "ipc:///x")
    assert inbox.pop() is None
    inbox.take(_frames(1))
    inbox.take(_frames(3))
    inbox.take(_frames(4, boot_id="f" * 16))
    heard = [inbox.pop() for _ in range(3)]
    assert heard == [Heard(STATE, 1, False), Gap("state", 1), Heard(STATE, 3, False)]
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="connect again"):
            inbox.pop()


async def test_a_wait_that_was_given_up_can_be_begun_again() -> None:
    async with published() as (source, at), following(at, "state") as follower:
        async with asyncio.timeout(DEADLINE_S):
            await anext(follower)
        for number in range(1, 21):
            waiting = asyncio.ensure_future(anext(follower))
            await asyncio.sleep(0)
            if number % 2:  # the event is there already when the wait is given up
                source.change_state()
            waiting.cancel()
            await asyncio.wait([waiting])
            if not number % 2:
                source.change_state()
            assert waiting.cancelled()
            async with asyncio.timeout(DEADLINE_S):
                item = await anext(follower)
            assert isinstance(item, Heard)
            assert item.seq == number


async def test_a_connection_stays_lost_and_what_came_before_is_heard() -> None:
    async with published() as (source, at):
        follower_context = following(at, "state")
        follower = await follower_context.__aenter__()
        async with asyncio.timeout(DEADLINE_S):
            await anext(follower)
            for _ in range(5):
                source.change_state()
            await anext(follower)
    for seq in (2, 3, 4, 5):
        async with asyncio.timeout(DEADLINE_S):
            assert (await anext(follower))[1] == seq
    for _ in range(3):
        with pytest.raises(ConnectionLost, match="went away"):
            await asyncio.wait_for(anext(follower), DEADLINE_S)
    await follower_context.__aexit__(None, None, None)


async def test_nobody_there_is_a_lost_connection() -> None:
    with free_endpoint() as endpoint:
        async with following(endpoint) as follower:
            with pytest.raises(ConnectionLost):
                await asyncio.wait_for(anext(follower), DEADLINE_S)


async def test_a_publisher_that_sends_rubbish_is_survived_and_its_rubbish_counted() -> None:
    true = _frames(1)
    rubbish = [
        [b"state"],
        [b"state", *true[1:], b""],
        [b"metrics", *true[1:]],
        [b"state", b"GW\x02" + true[1][3:], true[2]],
        [b"state", b"", true[2]],
        [b"state", true[1], b"\x91" * 5000],
        [b"state", true[1], true[2] + b"\x00"],
        [b"state", true[1], b"\x92\xaano_such_ev\xa1x"],
        [b"state", true[1][:-1], true[2]],
    ]
    with (
        free_endpoint() as endpoint,
        zmq.asyncio.Context() as context,
        context.socket(zmq.XPUB) as liar,
    ):
        liar.bind(endpoint)
        async with following(endpoint) as follower:
            await liar.recv()
            for frames in [*rubbish, true]:
                await liar.send_multipart(frames)
            async with asyncio.timeout(DEADLINE_S):
                assert await anext(follower) == Heard(STATE, 1, False)
            assert follower.num_malformed == len(rubbish)
            await liar.send_multipart(_frames(2, boot_id="f" * 16))
            for _ in range(2):
                with pytest.raises(ConnectionLost, match="connect again"):
                    await asyncio.wait_for(anext(follower), DEADLINE_S)


async def test_the_blocking_form_hears_the_same() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        loop = asyncio.get_running_loop()

        def listen() -> list[object]:
            with watch_blocking(endpoint, ["state"]) as heard:
                first = heard.next_within(DEADLINE_S)
                nothing = heard.next_within(0)
                asyncio.run_coroutine_threadsafe(worker.ask(m.Sleep()), loop).result(DEADLINE_S)
                second = next(heard)
                while isinstance(second, Heard) and second.is_snapshot:
                    second = next(heard)
                assert heard.num_malformed == 0
                return [first, nothing, second]

        first, nothing, second = await asyncio.to_thread(listen)
    assert first == Heard(e.StateChanged(state="serving", previous=""), 5, True)
    assert nothing is None
    assert second == Heard(e.StateChanged(state="sleeping", previous="serving"), 6, False)


async def test_the_blocking_form_ends_with_the_worker() -> None:
    hears = asyncio.Event()
    async with fake_worker() as worker:
        loop = asyncio.get_running_loop()

        def listen(endpoint: str) -> None:
            with watch_blocking(endpoint) as heard:
                next(heard)
                loop.call_soon_threadsafe(hears.set)
                with pytest.raises(ConnectionLost, match="went away"):
                    deque(heard, maxlen=0)
                with pytest.raises(ConnectionLost, match="went away"):
                    heard.next_within(DEADLINE_S)

        async with served(worker) as (_, endpoint):
            listening = asyncio.create_task(asyncio.to_thread(listen, endpoint))
            async with asyncio.timeout(DEADLINE_S):
                await hears.wait()
        await listening


def test_the_blocking_form_refuses_a_topic_that_is_none() -> None:
    with (
        pytest.raises(ConfigError, match="no topic 'weather'"),
        watch_blocking("ipc:///x", ["weather"]),  # type: ignore[list-item]
    ):
        pass
