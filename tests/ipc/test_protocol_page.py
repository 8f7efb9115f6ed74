"""The protocol's page holds: what it says about step numbers is what a worker does."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.cli.docs import generated_pages
from gpuworker.config import LimitsConfig, ModelConfig, SupervisionConfig, WorkerConfig
from gpuworker.errors import DeviceFault, StepFailed
from gpuworker.ipc.failures import error_classes
from gpuworker.ipc.ledger import NUM_REPLAYS
from gpuworker.ipc.wire import decode_reply, decode_reply_header
from gpuworker.lifecycle import State
from gpuworker.testing import empty_step, fake_worker, walk_to
from ipc_serving import Gate, request_frames, runtime_of, served

DOCS = Path(__file__).parents[2] / "docs"
_ROW = re.compile(r"^\| `(\w+)` \| .* \| (yes|) ?\| (free|used|gone|see seq|) ?\|$", re.M)
COLUMNS = {
    code: (retryable == "yes", number)
    for code, retryable, number in _ROW.findall((DOCS / "protocol.md").read_text())
}


class Peer:
    """A scheduler that writes its headers by hand."""

    def __init__(self, socket: zmq.asyncio.Socket, epoch: int) -> None:
        self._socket = socket
        self._epoch = epoch
        self._corr = 0

    async def send(self, request: m.Request, *, seq: int = 0, budget_us: int = 0) -> int:
        """Send and return the corr."""
        self._corr += 1
        epoch = 0 if isinstance(request, m.Hello) else self._epoch
        frames = request_frames(self._corr, request, epoch=epoch, seq=seq, budget_us=budget_us)
        await self._socket.send_multipart(frames)
        return self._corr

    async def send_body(self, body: bytes, seq: int) -> None:
        """Send a step's header before a body of any kind."""
        self._corr += 1
        header = request_frames(self._corr, m.GetStatus(), epoch=self._epoch, seq=seq)[0]
        await self._socket.send_multipart([header, body])

    async def receive(self, message: type[m.Request] = m.ExecuteModel) -> tuple[int, m.Reply]:
        """Return seq and the reply."""
        async with asyncio.timeout(20):
            frames = await self._socket.recv_multipart()
        return decode_reply_header(frames).seq, decode_reply(message, frames[1])

    async def hello(self) -> None:
        await self.send(m.Hello(min_version=1, max_version=1, epoch=self._epoch))
        assert isinstance((await self.receive(m.Hello))[1], m.Welcome)

    async def number(self, code: str, seq: int) -> str:
        """Take the next reply, which has this code, and say what became of the step's number."""
        told, reply = await self.receive()
        assert isinstance(reply, m.Failure), reply
        assert reply.code == code
        assert reply.retryable is COLUMNS[code][0]
        assert told in (0, seq)
        return "used" if told else "free"


@asynccontextmanager
async def peer(endpoint: str, epoch: int) -> AsyncIterator[Peer]:
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.connect(endpoint)
        yield Peer(socket, epoch)


@asynccontextmanager
async def scheduler(config: WorkerConfig | None = None) -> AsyncIterator[tuple[GPUWorker, Peer]]:
    """Serve a fake worker in the state SERVING, and hold its session."""
    async with fake_worker(config) as worker, served(worker) as (_, endpoint):
        await walk_to(worker, State.SERVING)
        async with peer(endpoint, 1) as client:
            await client.hello()
            yield worker, client


def _is(code: str, number: str) -> None:
    assert COLUMNS[code][1] == number


@pytest.mark.parametrize("name", ["protocol.md", "protocol.vectors.json"])
def test_what_is_generated_is_current(name: str) -> None:
    assert (DOCS / name).read_text() == generated_pages()[name], "run: make docs"


def test_every_code_has_a_row() -> None:
    codes = [cls.code for cls in error_classes()]
    assert list(COLUMNS) == codes
    assert len(set(codes)) == len(codes)


async def test_a_full_window_and_a_gap_leave_the_number_free() -> None:
    async with scheduler() as (worker, client):
        gate = Gate(worker)
        for seq in (1, 2):
            await client.send(empty_step(seq), seq=seq)
        await client.send(empty_step(3), seq=3)
        _is("busy", await client.number("busy", 3))
        await client.send(empty_step(3), seq=4)
        _is("out_of_order", await client.number("out_of_order", 4))
        gate.open.set()
        assert [(await client.receive())[0] for _ in range(2)] == [1, 2]
        await client.send(empty_step(3), seq=3)  # as free as the page says
        assert (await client.receive())[0] == 3


async def test_a_full_mailbox_leaves_the_number_free() -> None:
    limited = WorkerConfig(
        model=ModelConfig(model="fake"),
        limits=LimitsConfig(window=4),
        supervision=SupervisionConfig(mailbox_limit=2),
    )
    async with scheduler(limited) as (worker, client):
        gate = Gate(worker)
        for seq in (1, 2, 3):
            await client.send(empty_step(seq), seq=seq)
        _is("mailbox_full", await client.number("mailbox_full", 3))
        gate.open.set()
        assert [(await client.receive())[0] for _ in range(2)] == [1, 2]
        await client.send(empty_step(3), seq=3)
        assert (await client.receive())[0] == 3


async def test_bytes_that_are_no_step_leave_the_number_free() -> None:
    async with scheduler() as (_, client):
        await client.send_body(b"\x91\xa4none", 1)
        _is("unknown_message", await client.number("unknown_message", 1))
        await client.send_body(b"\xc1", 1)
        assert await client.number("malformed_message", 1) == "free"
        await client.send_body(b"\x92\xadexecute_model\xa0", 1)
        assert await client.number("invalid_request", 1) == "free"
        await client.send(empty_step(1), seq=1)
        assert (await client.receive())[0] == 1


async def test_without_a_session_no_number_is_used() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        peer(endpoint, 0) as stranger,
    ):
        await stranger.send(empty_step(1), seq=1)
        _is("no_session", await stranger.number("no_session", 1))


async def test_an_answer_that_is_gone_has_seq_0_although_its_number_was_used() -> None:
    async with scheduler() as (_, client):
        for seq in range(1, NUM_REPLAYS + 2):
            await client.send(empty_step(seq), seq=seq)
            assert (await client.receive())[0] == seq
        await client.send(empty_step(1), seq=1)
        assert await client.number("duplicate_expired", 1) == "free"
        _is("duplicate_expired", "gone")


@pytest.mark.parametrize(
    "code", ["step_failed", "stale_kv_epoch", "deadline_exceeded", "cancelled", "device_fault"]
)
async def test_a_step_that_was_accepted_and_did_not_run_has_used_its_number(code: str) -> None:
    async with scheduler() as (worker, client):
        gate = Gate(worker)
        await client.send(empty_step(1), seq=1)
        assert await asyncio.to_thread(gate.entered.wait, 20)

        def fail(step: m.ExecuteModel) -> None:
            raise StepFailed("injected") if code == "step_failed" else DeviceFault("injected")

        corr = await client.send(
            empty_step(2, kv_epoch=9 if code == "stale_kv_epoch" else 0),
            seq=2,
            budget_us=1 if code == "deadline_exceeded" else 0,
        )
        if code == "cancelled":
            await client.send(m.Cancel(corr=corr))
            assert (await client.receive(m.Cancel))[1] == m.Cancelled(outcome="withdrawn")
        await client.send(m.GetHealth())  # the step has arrived when this is answered
        assert isinstance((await client.receive(m.GetHealth))[1], m.HealthReport)
        if code in ("step_failed", "device_fault"):
            runtime_of(worker).before_step = fail
        gate.open.set()
        assert (await client.receive())[0] == 1
        _is(code, await client.number(code, 2))
        await client.send(empty_step(2), seq=2)  # the same answer again: the number is used
        assert await client.number(code, 2) == "used"
        await client.send(empty_step(3), seq=3)
        behind = "illegal_message" if code == "device_fault" else "aborted"
        _is(behind, await client.number(behind, 3))


async def test_a_state_that_takes_no_steps_uses_the_number() -> None:
    async with (
        fake_worker() as worker,
        served(worker) as (_, endpoint),
        peer(endpoint, 1) as client,
    ):
        await client.hello()
        await client.send(empty_step(1), seq=1)
        _is("illegal_message", await client.number("illegal_message", 1))
