"""Sessions over real sockets: taking over, numbers, deadlines, withdrawing, asking again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.errors import (
    Busy,
    DeadlineExceeded,
    Fenced,
    IllegalMessage,
    NoSession,
    OutOfOrder,
    RequestCancelled,
    StaleEpoch,
    StaleKVEpoch,
    StepAborted,
    StepFailed,
    UnsupportedVersion,
    error_class,
)
from gpuworker.ipc import BlockingClient, connect
from gpuworker.ipc.ledger import NUM_REPLAYS
from gpuworker.ipc.wire import decode_reply, decode_reply_header, error_of
from gpuworker.lifecycle import State
from gpuworker.testing import empty_step, fake_worker, walk_to
from ipc_serving import Gate, request_frames, runtime_of, served


def _executed(worker: GPUWorker) -> list[int]:
    """Note the ids of the steps that really ran from now on."""
    executed: list[int] = []
    runtime = runtime_of(worker)
    original = runtime.execute_model

    def execute(step: m.ExecuteModel) -> m.StepOutput:
        output = original(step)
        executed.append(step.step_id)
        return output

    runtime.execute_model = execute  # type: ignore[method-assign]
    return executed


class Raw:
    """A client that says exactly what a test wants."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self._socket = socket
        self.epoch = 0

    async def send(
        self, request: m.Request, corr: int, *, seq: int = 0, epoch: int | None = None,
        budget_us: int = 0,
    ) -> None:  # fmt: skip
        epoch = self.epoch if epoch is None else epoch
        await self._socket.send_multipart(
            request_frames(corr, request, epoch=epoch, seq=seq, budget_us=budget_us)
        )

    async def receive(self, message: type[m.Request]) -> tuple[int, int, m.Reply]:
        """Return corr, seq and the reply."""
        async with asyncio.timeout(20):
            frames = await self._socket.recv_multipart()
        header = decode_reply_header(frames)
        return header.corr, header.seq, decode_reply(message, frames[1])

    async def hello(self, epoch: int) -> m.Reply:
        await self.send(m.Hello(min_version=1, max_version=1, epoch=epoch), 1, epoch=0)
        reply = (await self.receive(m.Hello))[2]
        self.epoch = epoch
        return reply


@asynccontextmanager
async def raw(endpoint: str) -> AsyncIterator[Raw]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        yield Raw(socket)


def _code(reply: m.Reply) -> str:
    assert isinstance(reply, m.Failure), reply
    return reply.code


async def test_a_new_scheduler_waits_for_the_running_step_and_gets_a_clean_worker() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        executed, gate = _executed(worker), Gate(worker)
        async with connect(endpoint, epoch=7) as old:
            steps = [old.submit(empty_step(1)), old.submit(empty_step(2))]
            assert await asyncio.to_thread(gate.entered.wait, 20)

            async def take_over() -> int:
                async with connect(endpoint, epoch=8, client="successor") as new:
                    assert new.welcome is not None
                    assert new.welcome.state == "serving"
                    return (await new.ask(empty_step(1))).step_id

            successor = asyncio.create_task(take_over())
            async with connect(endpoint, observe=True) as observer:
                while (await observer.ask(m.GetHealth())).session.highest_epoch < 8:  # type: ignore[union-attr]
                    await asyncio.sleep(0)
            with pytest.raises(StaleEpoch):  # at once, although the step still runs
                await old.ask(m.Sleep())
            assert not successor.done()
            gate.open.set()
            assert await successor == 1
            for step in steps:  # one ran and its result is dropped, one never ran
                with pytest.raises(StaleEpoch, match="successor with epoch 8"):
                    await step
            with pytest.raises(StaleEpoch):
                await old.ask(empty_step(3))
        assert executed == [1, 1]
        assert runtime_of(worker).num_drops == 2  # once for each hello


async def test_an_old_scheduler_does_not_win_after_the_worker_was_started_again(
    tmp_path: Path,
) -> None:
    tmp_path.chmod(0o700)
    endpoint = f"ipc://{tmp_path}/rank0"
    async with fake_worker() as worker, served(worker, endpoint), connect(endpoint, epoch=12):
        pass
    async with fake_worker() as worker, served(worker, endpoint):
        with pytest.raises(Fenced, match="not above 12"):
            async with connect(endpoint, epoch=12):
                pass
        with pytest.raises(Fenced, match="not above 12"):
            await asyncio.to_thread(BlockingClient, endpoint, epoch=3)
        async with connect(endpoint) as remote:  # the next one by itself
            assert remote.welcome is not None
            assert remote.welcome.epoch == 13


async def test_without_a_session_questions_are_answered_and_nothing_else() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        async with connect(endpoint, observe=True) as observer:
            assert (await observer.ask(m.GetStatus())).state == "uninit"
            health = await observer.ask(m.GetHealth())
            assert (health.state, health.ready, health.health) == ("uninit", False, "ok")
            assert len(health.boot_id) == 16
            with pytest.raises(NoSession, match="say hello"):
                await observer.ask(m.InitDevice())
            with pytest.raises(NoSession):
                await observer.ask(m.EndSession())
        assert worker.state is State.UNINIT


async def test_a_session_that_was_ended_says_nothing_more() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint), raw(endpoint) as client:
        await client.hello(3)
        await client.send(m.EndSession(), 2)
        assert isinstance((await client.receive(m.EndSession))[2], m.SessionEnded)
        await client.send(m.InitDevice(), 3)
        assert _code((await client.receive(m.InitDevice))[2]) == "no_session"
        assert worker.state is State.UNINIT
        assert isinstance(await client.hello(4), m.Welcome)


async def test_versions_that_do_not_meet_are_refused_before_anything_changes() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint), raw(endpoint) as client:
        await client.send(m.Hello(min_version=2, max_version=9, epoch=5), 1)
        reply = (await client.receive(m.Hello))[2]
        assert isinstance(error_of(reply), UnsupportedVersion)  # type: ignore[arg-type]
        assert isinstance(await client.hello(1), m.Welcome)


async def test_a_step_that_is_sent_twice_runs_once() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint), raw(endpoint) as client:
        await walk_to(worker, State.SERVING)
        executed, gate = _executed(worker), Gate(worker)
        await client.hello(1)
        for corr in (10, 11):  # the second while the first one runs
            await client.send(empty_step(1), corr, seq=1)
        assert await asyncio.to_thread(gate.entered.wait, 20)
        gate.open.set()
        first, second = await client.receive(m.ExecuteModel), await client.receive(m.ExecuteModel)
        assert (first[0], second[0]) == (10, 11)
        assert first[1:] == second[1:]
        assert first[1] == 1
        await client.send(empty_step(1), 12, seq=1)  # and when it is done
        again = await client.receive(m.ExecuteModel)
        assert (again[0], *again[1:]) == (12, *first[1:])
        assert executed == [1]


async def test_an_answer_that_is_no_longer_kept_is_said_to_be_gone() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint), raw(endpoint) as client:
        await walk_to(worker, State.SERVING)
        executed = _executed(worker)
        await client.hello(1)
        for seq in range(1, NUM_REPLAYS + 2):
            await client.send(empty_step(seq), seq + 1, seq=seq)
            assert (await client.receive(m.ExecuteModel))[1] == seq
        await client.send(empty_step(2), 500, seq=2)
        assert isinstance((await client.receive(m.ExecuteModel))[2], m.StepOutput)
        await client.send(empty_step(1), 501, seq=1)
        assert _code((await client.receive(m.ExecuteModel))[2]) == "duplicate_expired"
        assert executed == list(range(1, NUM_REPLAYS + 2))


async def test_a_number_that_was_not_accepted_is_free_again() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint), raw(endpoint) as client:
        await walk_to(worker, State.SERVING)
        executed, gate = _executed(worker), Gate(worker)
        await client.hello(1)
        await client.send(empty_step(9), 2, seq=2)
        assert (await client.receive(m.ExecuteModel))[1:2] == (0,)  # out of order
        for seq in (1, 2, 3):  # the window has room for two
            await client.send(empty_step(seq), seq + 2, seq=seq)
        corr, seq, reply = await client.receive(m.ExecuteModel)
        assert (corr, seq, _code(reply)) == (5, 0, "busy")
        assert isinstance(reply, m.Failure)
        assert reply.retryable
        gate.open.set()
        assert [(await client.receive(m.ExecuteModel))[1] for _ in range(2)] == [1, 2]
        await client.send(empty_step(3), 6, seq=3)
        assert (await client.receive(m.ExecuteModel))[1] == 3
        assert executed == [1, 2, 3]


async def test_the_clients_use_a_free_number_again() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        async with connect(endpoint) as remote:
            replies = [remote.submit(empty_step(step_id)) for step_id in (1, 2, 3, 4)]
            with pytest.raises(Busy):
                await replies[2]
            with pytest.raises(OutOfOrder):
                await replies[3]
            gate.open.set()
            assert [(await reply).step_id for reply in replies[:2]] == [1, 2]
            assert (await remote.ask(empty_step(5))).step_id == 5
        await asyncio.to_thread(_drive_blocking, endpoint)


def _drive_blocking(endpoint: str) -> None:
    with BlockingClient(endpoint, timeout_s=20) as client:
        wrong = m.ExecuteModel(step_id=-1, kv_epoch=0, num_rows=0)  # refused by its type
        for step in (empty_step(1), empty_step(2)):
            assert error_class(_refused(client, wrong)).code == "invalid_request"
            assert client.ask(step).step_id == step.step_id


def _refused(client: BlockingClient, step: m.ExecuteModel) -> str:
    with pytest.raises(error_class("invalid_request")) as refusal:
        client.ask(step)
    return refusal.value.code


@pytest.mark.parametrize("way", ["fails", "is refused", "is withdrawn", "expires"])
async def test_steps_behind_one_that_did_not_run_are_aborted_until_resumed(way: str) -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        executed, gate = _executed(worker), Gate(worker)
        ahead = remote.submit(empty_step(1))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        if way == "fails":

            def fail(step: m.ExecuteModel) -> None:
                if step.step_id == 2:
                    raise StepFailed("injected")

            runtime_of(worker).before_step = fail
        lost = remote.submit(
            empty_step(2, kv_epoch=9 if way == "is refused" else 0),
            budget_s=1e-6 if way == "expires" else None,
        )
        if way == "is withdrawn":
            assert (await remote.cancel(lost)).outcome == "withdrawn"
        else:
            await remote.ask(m.GetStatus())
        gate.open.set()
        assert (await ahead).step_id == 1
        error = {
            "fails": StepFailed,
            "is refused": StaleKVEpoch,
            "is withdrawn": RequestCancelled,
            "expires": DeadlineExceeded,
        }[way]
        with pytest.raises(error):
            await lost
        for step_id in (3, 4):
            with pytest.raises(StepAborted, match="step 2 did not run"):
                await remote.ask(empty_step(step_id))
        assert (await remote.ask(m.GetHealth())).aborted_after == 2
        with pytest.raises(error_class("invalid_request"), match="it was 2"):
            await remote.ask(m.ResumeSteps(step_id=3))
        await remote.ask(m.ResumeSteps(step_id=2))
        assert (await remote.ask(empty_step(5))).step_id == 5
        assert executed == [1, 5]


async def test_a_move_that_waits_too_long_or_is_withdrawn_never_begins() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        step = remote.submit(empty_step(1))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        late = remote.submit(m.Sleep(), budget_s=1e-6)
        withdrawn = remote.submit(m.Sleep())
        assert (await remote.cancel(withdrawn)).outcome == "withdrawn"
        assert (await remote.cancel(step)).outcome == "started"
        gate.open.set()
        await step
        with pytest.raises(DeadlineExceeded):
            await late
        with pytest.raises(RequestCancelled):
            await withdrawn
        assert (await remote.cancel(step)).outcome == "unknown"
        assert worker.state is State.SERVING
        assert (await remote.ask(m.GetHealth())).last_error == ""


async def test_a_caller_that_gives_up_withdraws_what_has_not_started() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint) as remote,
    ):
        await walk_to(worker, State.SERVING)
        gate = Gate(worker)
        step = remote.submit(empty_step(1))
        assert await asyncio.to_thread(gate.entered.wait, 20)
        sleep = asyncio.create_task(remote.ask(m.Sleep()))
        await remote.ask(m.GetStatus())
        sleep.cancel()
        await asyncio.wait([sleep])
        await remote.ask(m.GetStatus())
        gate.open.set()
        await step
        await remote.ask(m.ExecuteDummyBatch())
        assert worker.state is State.SERVING


async def test_the_asyncio_client_renews_its_lease() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        connect(endpoint, lease_s=0.06) as remote,
    ):
        assert remote.welcome is not None
        assert remote.welcome.lease_ms == 60
        await asyncio.sleep(0.3)  # five leases
        await remote.ask(m.InitDevice())


async def test_the_lease_of_a_silent_scheduler_runs_out() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):

        def drive() -> None:
            with BlockingClient(endpoint, lease_s=0.001, timeout_s=20) as client:
                with BlockingClient(endpoint, observe=True, timeout_s=20) as observer:
                    while observer.ask(m.GetHealth()).session.live:  # type: ignore[union-attr]
                        pass
                with pytest.raises(NoSession, match="lease"):
                    client.ask(m.InitDevice())

        await asyncio.to_thread(drive)
        assert worker.state is State.UNINIT


async def test_a_scheduler_may_join_a_faulted_worker_to_read_why_and_to_end_it() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint):
        worker._lifecycle.fault()
        async with connect(endpoint) as remote:
            assert (await remote.ask(m.GetHealth())).health == "faulted"
            with pytest.raises(IllegalMessage):
                await remote.ask(m.InitDevice())
            assert isinstance(await remote.ask(m.Shutdown()), m.Closed)


async def test_replies_name_the_worker_that_gave_them() -> None:
    async with fake_worker() as worker, served(worker) as (_, endpoint), raw(endpoint) as client:
        welcome = await client.hello(1)
        assert isinstance(welcome, m.Welcome)
        await client.send(m.GetHealth(), 2)
        assert (await client.receive(m.GetHealth))[2].boot_id == welcome.boot_id  # type: ignore[attr-defined]
        await client.send(m.GetStatus(), 3)
        async with asyncio.timeout(20):
            header, _ = await client._socket.recv_multipart()
        assert msgspec.msgpack.decode(header[3:])[4] == welcome.boot_id
