"""Events: what changes is said once, latecomers get a snapshot, what is missed is known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import msgspec
import pytest
import zmq
import zmq.asyncio
from hypothesis import given
from hypothesis import strategies as st

from gpuworker import events as e
from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import ModelConfig, SupervisionConfig, WorkerConfig
from gpuworker.errors import ConfigError, ConnectionLost, DeviceFault, MalformedMessage
from gpuworker.ipc import Server, connect, default_endpoint
from gpuworker.ipc.curve import load_client_keys, load_server_keys
from gpuworker.ipc.key_files import write_key_pair
from gpuworker.ipc.subscriber import Gap, Heard, Subscription, watch
from gpuworker.ipc.wire import EventHeader, Kind, decode_event_header, event_header
from gpuworker.lifecycle import State
from gpuworker.testing import FakeRuntime, empty_step, fake_worker, walk_to
from ipc_serving import served

BOOT = "0" * 16


async def _next(heard: AsyncIterator[Heard | Gap], kind: type[e.Event]) -> Heard:
    async with asyncio.timeout(20):
        async for item in heard:
            if isinstance(item, Heard) and isinstance(item.event, kind):
                return item
    raise AssertionError("the iterator ended")


def _listen(worker: GPUWorker) -> list[e.Event]:
    events: list[e.Event] = []
    worker.events.subscribe(events.append)
    return events


async def test_an_embedded_worker_says_what_changes_and_nothing_twice() -> None:
    async with fake_worker() as worker:
        events = _listen(worker)
        await walk_to(worker, State.SERVING)
        await worker.ask(empty_step(1))
        await worker.ask(m.Sleep())
        worker.events.tick(with_metrics=False)
    states = [event.state for event in events if isinstance(event, e.StateChanged)]
    assert states == [
        "device_ready", "profiled", "kv_allocated", "warmed_up", "serving", "sleeping",
    ]  # fmt: skip
    epochs = [event.kv_epoch for event in events if isinstance(event, e.KVEpochChanged)]
    assert epochs == [1]
    assert len(events) == len(states) + len(epochs)


async def test_a_stall_and_a_fault_are_said() -> None:
    stuck = threading.Event()
    config = WorkerConfig(
        model=ModelConfig(model="fake"), supervision=SupervisionConfig(step_limit_s=1e-6)
    )
    async with fake_worker(config) as worker:
        await walk_to(worker, State.SERVING)
        events = _listen(worker)
        entered = threading.Event()
        runtime = worker._runtime
        assert isinstance(runtime, FakeRuntime)

        def hang(step: m.ExecuteModel) -> None:
            entered.set()
            stuck.wait(20)

        runtime.before_step = hang
        step = worker.submit(empty_step(7))
        assert await asyncio.to_thread(entered.wait, 20)
        worker.events.tick(with_metrics=True)
        worker.give_up(DeviceFault("stuck"))
        with pytest.raises(DeviceFault):
            await step
        stuck.set()
    stalled, faulted = (event for event in events if isinstance(event, e.HealthChanged))
    assert stalled.health == "stalled"
    assert stalled.reason.startswith("step 7 runs for")
    assert (faulted.health, faulted.reason) == ("faulted", "device_fault: stuck")
    (metrics,) = (event for event in events if isinstance(event, e.Metrics))
    assert metrics.num_in_flight == 1
    assert metrics.running_step_s > 0


async def test_a_move_under_way_says_how_far_it_is() -> None:
    go_on, entered = threading.Event(), threading.Event()
    async with fake_worker() as worker:
        await walk_to(worker, State.DEVICE_READY)
        runtime = worker._runtime
        original = runtime.load_model

        def load() -> m.ModelLoaded:
            runtime.progress.note_bytes(3, 10)
            entered.set()
            assert go_on.wait(20)
            return original()

        runtime.load_model = load  # type: ignore[method-assign]
        events = _listen(worker)
        loading = worker.submit(m.LoadModel())
        assert await asyncio.to_thread(entered.wait, 20)
        worker.events.tick(with_metrics=False)
        go_on.set()
        await loading
    (progress,) = events
    assert isinstance(progress, e.MoveProgress)
    assert (progress.move, progress.done_bytes, progress.total_bytes) == ("load_model", 3, 10)


async def test_latecomers_get_a_snapshot_and_then_what_changes() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        for _ in range(20):
            async with watch(endpoint, ["state"]) as heard:
                first = await _next(heard, e.StateChanged)
                assert first.event == e.StateChanged(state="serving", previous="")
                assert first.is_snapshot
        async with watch(endpoint) as everything, watch(endpoint, ["kv_epoch"]) as epochs:
            assert (await _next(everything, e.Metrics)).is_snapshot
            before = await _next(epochs, e.KVEpochChanged)
            await worker.ask(m.Sleep())
            asleep = await _next(everything, e.StateChanged)
            assert asleep.event == e.StateChanged(state="sleeping", previous="serving")
            after = await _next(epochs, e.KVEpochChanged)
            assert (after.event.kv_epoch, after.is_snapshot) == (1, False)
            assert after.seq == before.seq + 1


async def test_the_worker_says_where_its_events_are_and_when_it_has_none() -> None:
    async with fake_worker() as worker:
        async with served(worker) as (_, endpoint), connect(endpoint) as remote:
            assert remote.welcome is not None
            assert remote.welcome.events == f"{endpoint}.events"
        server = Server(worker, default_endpoint())
        bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(server.run(bound.set_result))
        with pytest.raises(ConfigError, match="publishes no events"):
            async with watch(await bound):
                pass
        task.cancel()
        await asyncio.wait([task])
    with pytest.raises(ConfigError, match="no topic 'weather'"):
        async with watch("ipc:///x", ["weather"]):  # type: ignore[list-item]
            pass


async def test_the_end_of_the_worker_ends_the_iteration() -> None:
    async with fake_worker() as worker:
        async with served(worker) as (_, endpoint):
            context = watch(endpoint, ["state"])
            heard = await context.__aenter__()
            await _next(heard, e.StateChanged)
        with pytest.raises(ConnectionLost, match="went away"):
            await _next(heard, e.Metrics)
        await context.__aexit__(None, None, None)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_encrypted_events_go_to_listed_clients_only(
    tmp_path: pytest.TempPathFactory, scheme: str
) -> None:
    worker_public, worker_secret = write_key_pair(tmp_path / "worker", "w")  # type: ignore[operator]
    public, secret = write_key_pair(tmp_path / "client", "c")  # type: ignore[operator]
    keys = load_server_keys(worker_secret, public)
    endpoint = default_endpoint() if scheme == "ipc" else "tcp://127.0.0.1:*"
    async with fake_worker() as worker, served(worker, endpoint, keys=keys) as (server, bound):
        own = load_client_keys(secret, worker_public)
        async with watch(bound, ["state"], keys=own) as heard:
            assert (await _next(heard, e.StateChanged)).is_snapshot
        with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as stranger:
            stranger.connect(server._events)
            stranger.subscribe("")
            assert not await stranger.poll(300)


async def test_what_a_subscriber_sends_does_no_harm() -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        with zmq.asyncio.Context() as context, context.socket(zmq.XSUB) as rude:
            rude.connect(f"{endpoint}.events")
            for junk in (b"", b"\x07", b"\x01" + b"x" * 200, b"\x00state", b"\x01", b"x" * 4000):
                await rude.send(junk)
            for _ in range(1000):
                await rude.send(b"\x01state")
                await rude.send(b"\x00state")
        async with watch(endpoint, ["state"]) as heard:
            assert (await _next(heard, e.StateChanged)).is_snapshot
        assert server.statistics().num_malformed == 0


STATE = e.StateChanged(state="serving", previous="warmed_up")


def _frames(
    seq: int, event: e.Event = STATE, *, is_snapshot: bool = False, boot_id: str = BOOT
) -> list[bytes]:
    header = EventHeader(Kind.EVENT, seq, is_snapshot, boot_id)
    return [e.TOPIC_OF[type(event)].encode(), event_header(header), e.encode_event(event)]


def test_a_gap_is_noticed_and_a_topic_counts_for_itself() -> None:
    subscription = Subscription(BOOT)
    epoch = e.KVEpochChanged(kv_epoch=3)
    assert subscription.take(_frames(4, is_snapshot=True)) == [Heard(STATE, 4, True)]
    assert subscription.take(_frames(5)) == [Heard(STATE, 5, False)]
    assert subscription.take(_frames(9, epoch)) == [Heard(epoch, 9, False)]
    assert subscription.take(_frames(8)) == [Gap("state", 2), Heard(STATE, 8, False)]
    assert subscription.take(_frames(8, is_snapshot=True)) == [Heard(STATE, 8, True)]
    assert subscription.take(_frames(9)) == [Heard(STATE, 9, False)]
    with pytest.raises(ConnectionLost, match="connect again"):
        subscription.take(_frames(10, boot_id="f" * 16))


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_any_frames_are_an_event_or_are_counted(frames: list[bytes]) -> None:
    subscription = Subscription(BOOT)
    assert subscription.take(frames) == []
    assert subscription.num_malformed == 1


@given(data=st.data())
def test_mutated_events_are_events_or_are_counted(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in _frames(1)]
    for _ in range(data.draw(st.integers(1, 3))):
        frame = frames[data.draw(st.integers(0, 2))]
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    subscription = Subscription(BOOT)
    try:
        heard = subscription.take([bytes(frame) for frame in frames])
    except ConnectionLost:
        return  # the boot id
    assert len(heard) + subscription.num_malformed == 1


def test_the_table_of_events_is_whole_and_tags_never_change() -> None:
    assert set(e.Event.__subclasses__()) == set(e.EVENTS)
    assert [event.__struct_config__.tag for event in e.EVENTS] == [
        "state_changed", "kv_epoch_changed", "health_changed", "move_progress", "metrics",
    ]  # fmt: skip
    assert list(e.TOPIC_OF.values()) == ["state", "kv_epoch", "health", "progress", "metrics"]


@given(seq=st.integers(0, 2**53 - 1), is_snapshot=st.booleans())
def test_the_header_of_an_event_survives(seq: int, is_snapshot: bool) -> None:
    header = EventHeader(Kind.EVENT, seq, is_snapshot, BOOT)
    assert decode_event_header(event_header(header)) == header
    with pytest.raises(MalformedMessage):
        decode_event_header(event_header(EventHeader(Kind.REPLY, seq, is_snapshot, BOOT)))


def test_an_event_is_an_array_that_begins_with_its_tag() -> None:
    body = e.encode_event(STATE)
    assert msgspec.msgpack.decode(body) == ["state_changed", "serving", "warmed_up"]
    assert e.decode_event(body) == STATE
