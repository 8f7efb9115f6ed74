"""The ring: records in order whatever their sizes, and the same rules as on the socket."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.errors import (
    ConfigError,
    ConnectionLost,
    DeadlineExceeded,
    DeviceFault,
    IllegalMessage,
    InvalidRequest,
    MalformedMessage,
    MessageTooLarge,
    StaleEpoch,
    StaleKVEpoch,
    StepAborted,
)
from gpuworker.ipc import BlockingClient, connect
from gpuworker.ipc.ring import COUNTERS_BYTES, RingReader, RingWriter
from gpuworker.ipc.ring_memory import RING_BYTES, ClientRings
from gpuworker.lifecycle import State
from gpuworker.testing import empty_step, fake_worker, walk_to
from ipc_serving import Gate, runtime_of, served

CAPACITY = 256


def _pair(capacity: int = CAPACITY) -> tuple[RingWriter, RingReader, memoryview]:
    memory = memoryview(bytearray(COUNTERS_BYTES + capacity))
    return RingWriter(memory), RingReader(memory), memory


@given(
    st.lists(
        st.one_of(
            st.just("pop"), st.tuples(st.binary(max_size=20), st.binary(max_size=CAPACITY + 8))
        ),
        max_size=200,
    )
)
def test_any_pushes_and_pops_are_a_queue(events: list[str | tuple[bytes, bytes]]) -> None:
    writer, reader, _ = _pair()
    queue: deque[tuple[bytes, bytes]] = deque()
    used = 0
    for event in events:
        if isinstance(event, str):
            assert reader.is_empty() is (not queue)
            assert reader.pop() == (queue.popleft() if queue else None)
            used = sum(_size(record) for record in queue)
        elif _size(event) > CAPACITY:
            with pytest.raises(MessageTooLarge, match="without a ring"):
                writer.push(*event)
        else:
            fits = used + _size(event) <= CAPACITY
            assert writer.push(*event) is fits
            if fits:
                queue.append(event)
                used += _size(event)


def _size(record: tuple[bytes, bytes]) -> int:
    return -(-(8 + len(record[0]) + len(record[1])) // 8) * 8


@given(
    st.binary(min_size=COUNTERS_BYTES + CAPACITY, max_size=COUNTERS_BYTES + CAPACITY),
    st.integers(0, 40),
)
def test_whatever_a_peer_writes_reading_it_ends(junk: bytes, num_records: int) -> None:
    writer, reader, memory = _pair()
    for _ in range(num_records % 5):
        writer.push(b"h", b"body")
    memory[: len(junk)] = junk
    with suppress(MalformedMessage):
        for _ in range(CAPACITY):
            reader.pop()
    with suppress(MalformedMessage):
        writer.push(b"h", b"body")


@given(st.integers(0, CAPACITY - 1), st.integers(0, 255))
def test_a_changed_byte_is_a_record_or_malformed(at: int, value: int) -> None:
    writer, reader, memory = _pair()
    for number in range(4):
        writer.push(b"header", bytes([number]) * 20)
    memory[COUNTERS_BYTES + at] = value
    with suppress(MalformedMessage):
        for _ in range(8):
            record = reader.pop()
            assert record is None or sum(map(len, record)) <= CAPACITY


def _note_steps(worker: GPUWorker) -> list[tuple[int, str]]:
    """Note which steps run, and on which thread."""
    ran: list[tuple[int, str]] = []
    runtime_of(worker).before_step = lambda step: ran.append(
        (step.step_id, threading.current_thread().name)
    )
    return ran


async def test_the_whole_lifecycle_goes_over_a_ring() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (server, endpoint),
        connect(endpoint, ring=True) as remote,
    ):
        for request in (
            m.InitDevice(),
            m.LoadModel(),
            m.ProfileMemory(),
            m.AllocateKVCache(num_blocks=8),
            m.WarmUp(),
            m.StartServing(),
            empty_step(1),
            m.Sleep(level=1),
            m.WakeUp(),
        ):
            assert type(await remote.ask(request)) is m.REPLY_OF[type(request)]
        with pytest.raises(StaleKVEpoch):
            await remote.ask(empty_step(2))
        with pytest.raises(StepAborted):
            await remote.ask(empty_step(3, kv_epoch=1))
        await remote.ask(m.ResumeSteps(step_id=2))
        assert (await remote.ask(empty_step(4, kv_epoch=1))).step_id == 4
        with pytest.raises(IllegalMessage) as refusal:
            await remote.ask(m.WakeUp())
        assert refusal.value.state == "serving"
        assert (await remote.ask(m.GetHealth())).session is not None
        assert isinstance(await remote.ask(m.Shutdown()), m.Closed)
        assert server.statistics().num_malformed == 0


def test_the_blocking_client_keeps_steps_under_way_on_a_ring() -> None:
    async def main() -> None:
        async with fake_worker() as worker, served(worker) as (_, endpoint):
            await walk_to(worker, State.SERVING)
            ran = _note_steps(worker)

            def drive() -> list[int]:
                with BlockingClient(endpoint, ring=True, timeout_s=20) as client:
                    pending = [client.submit(empty_step(step_id)) for step_id in range(1, 40)]
                    return [reply.result().step_id for reply in reversed(pending)]

            assert await asyncio.to_thread(drive) == list(range(39, 0, -1))
            assert [step_id for step_id, _ in ran] == list(range(1, 40))
            assert {name for _, name in ran} == {"device"}

    asyncio.run(main())


async def test_messages_of_a_ring_take_effect_in_their_order() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint, ring=True) as remote,
    ):
        await walk_to(worker, State.SERVING)
        for round_number in range(30):
            epoch = runtime_of(worker).kv_epoch()
            first, last = 2 * round_number + 1, 2 * round_number + 2
            replies = [
                remote.submit(empty_step(first, kv_epoch=epoch)),
                remote.submit(m.Sleep()),
                remote.submit(m.WakeUp()),
                remote.submit(empty_step(last, kv_epoch=epoch + 1)),
            ]
            answers = await asyncio.gather(*replies)
            assert [type(answer) for answer in answers] == [
                m.StepOutput, m.Asleep, m.Awake, m.StepOutput,
            ]  # fmt: skip


async def test_a_new_scheduler_ends_the_ring_of_the_old_one() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        ran, gate = _note_steps(worker), Gate(worker)
        async with connect(endpoint, ring=True) as old:
            step = old.submit(empty_step(1))
            assert await asyncio.to_thread(gate.entered.wait, 20)
            behind = old.submit(empty_step(2))

            async def take_over() -> int:
                async with connect(endpoint, ring=True) as new:
                    return (await new.ask(empty_step(1))).step_id

            successor = asyncio.create_task(take_over())
            async with connect(endpoint, observe=True) as observer:
                while (await observer.ask(m.GetHealth())).session.highest_epoch < 2:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
            gate.open.set()
            assert await successor == 1
            with pytest.raises((StaleEpoch, ConnectionLost)):
                await step
            with pytest.raises((StaleEpoch, ConnectionLost)):
                await behind
        assert ran == []  # the gate took the note's place: see how often it was entered
        assert runtime_of(worker).progress.num_steps == 2


async def test_a_client_that_dies_gives_the_ring_back() -> None:
    client = (
        "import sys\n"
        "from gpuworker.ipc import BlockingClient\n"
        "from gpuworker.testing import empty_step\n"
        "client = BlockingClient(sys.argv[1], ring=True, timeout_s=20)\n"
        "print(client.ask(empty_step(1)).step_id, flush=True)\n"
        "sys.stdin.readline()\n"
    )
    before = set(os.listdir("/proc/self/fd"))
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        for _ in range(3):
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-c", client, endpoint,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            assert process.stdout is not None
            assert await process.stdout.readline() == b"1\n"
            process.kill()
            await process.communicate()
            async with asyncio.timeout(20):
                while worker._device._lane is not None:
                    await asyncio.sleep(0.01)
        async with connect(endpoint) as remote:
            assert (await remote.ask(empty_step(1))).step_id == 1
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1


async def test_the_end_of_the_worker_is_noticed_on_the_ring() -> None:
    async with fake_worker() as worker:
        async with served(worker) as (_, endpoint):
            context = connect(endpoint, ring=True)
            remote = await context.__aenter__()
            await remote.ask(m.InitDevice())

        async def ask_on() -> None:
            async with asyncio.timeout(20):
                while True:
                    await remote.ask(m.DropRequests(), timeout_s=20)

        with pytest.raises(ConnectionLost):
            await ask_on()
        await context.__aexit__(None, None, None)


async def test_what_is_wrong_on_a_ring_is_answered_and_what_is_junk_ends_it() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint, ring=True) as remote,
    ):
        await walk_to(worker, State.SERVING)
        wrong = m.ExecuteModel(step_id=-1, kv_epoch=0, num_rows=0)  # refused by its type
        for step_id in range(1, 4):
            with pytest.raises(InvalidRequest, match="execute_model"):
                await remote.ask(wrong)
            assert (await remote.ask(empty_step(step_id))).step_id == step_id
        rings = remote._rings
        assert rings is not None
        rings.send([b"junk", b"junk"])
        with pytest.raises(ConnectionLost):
            async with asyncio.timeout(20):
                await remote.ask(m.GetLimits())
        async with connect(endpoint, ring=True) as other:
            assert (await other.ask(empty_step(1))).step_id == 1


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_stuck_step_on_a_ring_leaves_nobody_waiting(kind: str) -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)

        async def ask() -> None:
            async with connect(endpoint, ring=True, timeout_s=20) as remote:
                await remote.ask(empty_step(1))

        def ask_blocking() -> None:
            with BlockingClient(endpoint, ring=True, timeout_s=20) as client:
                client.ask(empty_step(1))

        asking = asyncio.create_task(
            ask() if kind == "asyncio" else asyncio.to_thread(ask_blocking)
        )
        assert await asyncio.to_thread(gate.entered.wait, 20)
        worker.give_up(DeviceFault("stuck"))
        with pytest.raises(ConnectionLost, match="unknown"):
            await asking
        async with connect(endpoint) as remote:
            assert (await remote.ask(m.GetHealth())).fault == "device_fault: stuck"
        gate.open.set()
        await asyncio.to_thread(worker._device._thread.join, 0.05)


async def test_deadlines_and_sizes_hold_on_a_ring() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint, ring=True) as remote,
    ):
        await walk_to(worker, State.SERVING)
        huge = m.ExecuteModel(
            step_id=1, kv_epoch=0, num_rows=0, buffer=memoryview(bytes(RING_BYTES))
        )
        with pytest.raises(MessageTooLarge, match="without a ring"):
            remote.submit(huge)
        gate = Gate(worker)
        ahead = remote.submit(empty_step(1))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        late = remote.submit(m.Sleep(), budget_s=1e-6)
        gate.open.set()
        await ahead
        with pytest.raises(DeadlineExceeded):
            await late
        assert worker.state is State.SERVING
        assert (await remote.ask(empty_step(2))).step_id == 2


async def test_a_ring_is_opened_before_anything_is_under_way_or_not_at_all() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        async with connect(endpoint) as remote:
            step = remote.submit(empty_step(1))
            with pytest.raises(InvalidRequest, match="1 requests are unanswered"):
                await remote.ask(m.OpenRing())
            gate.open.set()
            await step
        async with connect(endpoint) as remote:
            await remote.ask(m.OpenRing())
            with pytest.raises(InvalidRequest, match="its steps go there"):
                await remote.ask(empty_step(1))
        with pytest.raises(ConfigError, match="neither epoch, lease nor ring"):
            async with connect(endpoint, observe=True, ring=True):
                pass
    nobody = m.RingOpened(
        pid=2**22 + 1, memory_fd=3, request_bell_fd=4, reply_bell_fd=5, ring_bytes=RING_BYTES
    )
    with pytest.raises(ConfigError, match="same machine, user and process namespace"):
        ClientRings.open(nobody)
