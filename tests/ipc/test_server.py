"""Server and clients together: order, typed errors, large replies, the end."""

from __future__ import annotations

import asyncio
import random

import msgspec
import numpy as np
import pytest
import zmq
import zmq.asyncio

from gpuworker import messages as m
from gpuworker.config import ModelConfig, SupervisionConfig, WorkerConfig
from gpuworker.errors import (
    ConnectionLost,
    IllegalMessage,
    MailboxFull,
    MalformedMessage,
    RepliesLost,
    RequestTimeout,
    StaleKVEpoch,
    WorkerClosed,
    WorkerError,
)
from gpuworker.ipc import BlockingClient, connect, default_endpoint
from gpuworker.ipc.wire import MAX_BODY_BYTES, failure_of
from gpuworker.lifecycle import State
from gpuworker.step import StepRow, pack_step
from gpuworker.testing import empty_step, fake_worker, walk_to
from ipc_serving import (
    WIDE,
    Gate,
    raw_router,
    reply_frames,
    request_frames,
    runtime_of,
    served,
)


@pytest.mark.parametrize("scheme", ["ipc", "tcp"])
async def test_the_whole_lifecycle_goes_over_the_wire(scheme: str) -> None:
    endpoint = default_endpoint() if scheme == "ipc" else "tcp://127.0.0.1:*"
    async with (
        fake_worker() as worker,
        served(worker, endpoint) as (server, bound),
        connect(bound) as remote,
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
        assert (await remote.ask(m.GetStatus())).state == "serving"
        assert isinstance(await remote.ask(m.Shutdown()), m.Closed)
        assert server.statistics().num_malformed == 0


async def test_errors_arrive_as_the_class_that_was_raised() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        with pytest.raises(IllegalMessage) as refusal:
            await remote.ask(m.WakeUp())
        assert refusal.value.state == "uninit"
        assert refusal.value.accepted == ("init_device", "drop_requests", "shutdown")
        await walk_to(worker, State.SERVING)
        with pytest.raises(StaleKVEpoch):
            await remote.ask(empty_step(1, kv_epoch=9))

        def blocking() -> None:
            with BlockingClient(endpoint, timeout_s=20) as client:
                with pytest.raises(IllegalMessage) as refusal:
                    client.ask(m.WarmUp())
                assert "execute_model" in refusal.value.accepted

        await asyncio.to_thread(blocking)


async def test_steps_in_flight_answer_in_order_and_status_overtakes_them() -> None:
    async with (
        fake_worker(WIDE) as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        order: list[int] = []
        replies = [remote.submit(empty_step(step_id)) for step_id in (1, 2, 3)]
        for reply in replies:
            reply.add_done_callback(lambda done: order.append(done.result().step_id))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        status = await remote.ask(m.GetStatus())
        assert (status.running_step_id, order) == (1, [])
        gate.open.set()
        await asyncio.gather(*replies)
        assert order == [1, 2, 3]


async def test_the_blocking_client_keeps_several_requests_under_way() -> None:
    async with fake_worker(WIDE) as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)

        def drive() -> list[int]:
            with BlockingClient(endpoint, timeout_s=20) as client:
                pending = [client.submit(empty_step(step_id)) for step_id in (1, 2, 3)]
                return [reply.result().step_id for reply in reversed(pending)]

        assert await asyncio.to_thread(drive) == [3, 2, 1]


async def test_a_full_mailbox_is_told_to_the_client() -> None:
    config = WorkerConfig(
        model=ModelConfig(model="fake"),
        limits=WIDE.limits,
        supervision=SupervisionConfig(mailbox_limit=2),
    )
    async with (
        fake_worker(config) as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        replies = [remote.submit(empty_step(step_id)) for step_id in (1, 2, 3)]
        with pytest.raises(MailboxFull):
            await replies[2]
        gate.open.set()
        assert [(await reply).step_id for reply in replies[:2]] == [1, 2]


async def test_a_reply_that_does_not_come_in_time_is_an_unknown_outcome() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        with pytest.raises(RequestTimeout, match=r"ExecuteModel within 0\.01 s"):
            await remote.ask(empty_step(1), timeout_s=0.01)

        def blocking() -> None:
            with (
                BlockingClient(endpoint, observe=True) as client,
                pytest.raises(RequestTimeout, match="unknown"),
            ):
                client.ask(m.GetLimits(), timeout_s=0.01)

        await asyncio.to_thread(blocking)
        gate.open.set()
        assert (await remote.ask(empty_step(3))).step_id == 3  # late replies are ignored


async def test_large_replies_to_a_slow_reader_arrive_whole() -> None:
    # Public case B22: pooled buffers were refilled while they were still being sent.
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        rng = random.Random(3)
        kept: list[tuple[int, m.StepOutput]] = []
        for step_id in range(300):
            num_rows = rng.randrange(9_000, 40_000)
            rows = np.full(num_rows, step_id, np.int32)
            step = m.ExecuteModel(
                step_id=step_id,
                kv_epoch=0,
                num_rows=num_rows,
                buffer=np.concatenate([rows, np.zeros(4 * num_rows, np.int32)]).data.cast("B"),
            )
            kept.append((num_rows, await remote.ask(step)))
            await asyncio.sleep(rng.random() * 0.002)
        for step_id, (num_rows, output) in enumerate(kept):
            values = np.frombuffer(output.buffer, np.int32)
            assert values.size == 2 * num_rows
            assert (values[num_rows:] == step_id + 100).all()


async def test_a_request_with_buffers_arrives_as_it_was_sent() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        seen: list[bytes] = []
        runtime = runtime_of(worker)
        runtime.before_step = lambda step: seen.append(bytes(step.buffer))
        rows = [StepRow(3, 1, 7, [4, 5], 1), StepRow(2, 9, 0)]
        step = m.ExecuteModel(
            step_id=1, kv_epoch=0, num_rows=2, num_block_ids=2, buffer=pack_step(rows)
        )
        await remote.ask(step)
        assert seen == [bytes(step.buffer)]


async def test_what_is_too_large_for_the_wire_is_refused_and_the_connection_lives() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        num_rows = (MAX_BODY_BYTES // 4) // 5 + 10
        buffer = np.zeros(5 * num_rows, np.int32)
        step = m.ExecuteModel(
            step_id=1, kv_epoch=0, num_rows=num_rows, buffer=buffer.data.cast("B")
        )
        with pytest.raises(MalformedMessage, match=f"the limit is {MAX_BODY_BYTES}"):
            await remote.ask(step)
        runtime = runtime_of(worker)
        original = runtime.execute_model

        def too_much(step: m.ExecuteModel) -> m.StepOutput:
            return msgspec.structs.replace(
                original(step), buffer=memoryview(bytes(MAX_BODY_BYTES + 1))
            )

        runtime.execute_model = too_much  # type: ignore[method-assign]
        with pytest.raises(MalformedMessage, match="StepOutput has"):
            await remote.ask(empty_step(2))
        runtime.execute_model = original  # type: ignore[method-assign]
        assert (await remote.ask(empty_step(3))).step_id == 3


async def test_a_bug_in_a_handler_is_answered_and_does_not_end_the_server() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        runtime = runtime_of(worker)

        def bug(step: m.ExecuteModel) -> None:
            raise ZeroDivisionError("a bug")

        runtime.before_step = bug
        with pytest.raises(WorkerError, match="ZeroDivisionError: a bug"):
            await remote.ask(empty_step(1))
        runtime.before_step = None
        await remote.ask(m.ResumeSteps(step_id=1))
        assert (await remote.ask(empty_step(2))).step_id == 2


async def test_what_waits_behind_shutdown_is_answered_before_the_server_ends() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        step, closed = remote.submit(empty_step(1)), remote.submit(m.Shutdown())
        later = [remote.submit(m.ExecuteDummyBatch()) for _ in range(18)]
        await remote.ask(m.GetStatus())  # all of them have arrived
        gate.open.set()
        assert (await step).step_id == 1
        assert isinstance(await closed, m.Closed)
        for reply in later:
            with pytest.raises(WorkerClosed):
                await reply


async def test_a_client_that_does_not_read_loses_its_replies_and_holds_nobody_up() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (server, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as deaf:
            deaf.setsockopt(zmq.LINGER, 0)
            deaf.setsockopt(zmq.RCVHWM, 1)
            deaf.connect(endpoint)
            corr = 0
            while server.statistics().num_undeliverable < 300:  # each waiting would take for ever
                corr += 1
                await deaf.send_multipart(request_frames(corr, m.GetStatus()))
                if corr % 100 == 0:
                    assert (await remote.ask(empty_step(corr))).step_id == corr
        assert (await remote.ask(empty_step(corr + 1))).step_id == corr + 1


async def test_a_client_that_reads_again_is_told_that_it_lost_replies() -> None:
    async with fake_worker() as worker, served(worker) as (server, endpoint):
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as deaf:
            deaf.setsockopt(zmq.LINGER, 0)
            deaf.setsockopt(zmq.RCVHWM, 1)
            deaf.connect(endpoint)
            corr = 0
            while server.statistics().num_undeliverable < 10:
                corr += 1
                await deaf.send_multipart(request_frames(corr, m.GetStatus()))
                await asyncio.sleep(0)

            async def receive() -> tuple[int, bytes]:
                async with asyncio.timeout(20):
                    header, body = await deaf.recv_multipart()
                return msgspec.msgpack.decode(header[3:])[1], body

            expected = 1
            while (reply := await receive())[0]:
                assert reply[0] == expected  # up to the first one that was lost
                expected += 1
            assert msgspec.msgpack.decode(reply[1])[:2] == ["failure", "replies_lost"]
            await deaf.send_multipart(request_frames(corr + 1, m.GetStatus()))
            while (await receive())[0] != corr + 1:
                pass


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_loss_of_replies_leaves_nobody_waiting(kind: str) -> None:
    loss = reply_frames(0, failure_of(RepliesLost("dropped")))

    def ask(endpoint: str) -> None:
        with BlockingClient(endpoint, observe=True, timeout_s=20) as client:
            client.ask(m.GetStatus())

    async def ask_asyncio(endpoint: str) -> None:
        async with connect(endpoint, observe=True, timeout_s=20) as client:
            await client.ask(m.GetStatus())

    with raw_router() as (router, endpoint):
        asking = asyncio.create_task(
            ask_asyncio(endpoint) if kind == "asyncio" else asyncio.to_thread(ask, endpoint)
        )
        peer, *_ = await asyncio.to_thread(router.recv_multipart)
        router.send_multipart([peer, *loss])
        with pytest.raises(ConnectionLost, match=r"dropped; the outcome of GetStatus is unknown"):
            await asking
