"""Replies are not trusted either: whatever a worker answers, a client raises what is typed."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from gpuworker import messages as m
from gpuworker.errors import ClientError, ConnectionLost, RequestTimeout, WorkerError
from gpuworker.ipc import BlockingClient, PendingReply, connect
from gpuworker.ipc.wire import MAX_BODY_BYTES, MAX_HEADER_BYTES
from gpuworker.step import Logprobs, Refusal
from gpuworker.testing import empty_step, fake_worker
from ipc_serving import raw_router
from mutation import Mutator, header_of

SEED = int(os.environ.get("GPUWORKER_FUZZ_SEED", "21"))
BOOT_ID = "0123456789abcdef"
NUM_CONVERSATIONS = 100 * int(os.environ.get("GPUWORKER_FUZZ_SCALE", "1"))
NUM_REQUESTS = 100
DEADLINE_S = 20.0
HONEST = 0.3
GREETING_HONEST = 0.9
"""Shares of replies that are left alone, so that conversations get somewhere."""
FAILURES = tuple(
    msgspec.msgpack.encode(m.Failure(code=code, message="no", state="serving"))
    for code in ("busy", "stale_epoch", "no_such_code", "aborted", "")
)
REQUESTS: tuple[m.Request[m.Reply], ...] = (
    m.GetHealth(),
    m.GetStatus(),
    m.GetLimits(),
    m.GetKVCacheSpec(),
    m.InitDevice(),
    m.LoadModel(),
    m.Cancel(corr=1),
    m.DropRequests(),
    empty_step(1),
    m.Sleep(),
)


async def _honest_replies() -> dict[str, bytes]:
    """A valid reply of every kind that the fuzz asks for, from a real worker, by its request."""
    async with fake_worker() as worker:
        replies: dict[str, m.Reply] = {
            "init_device": await worker.ask(m.InitDevice()),
            "load_model": await worker.ask(m.LoadModel()),
        }
        for request in (m.ProfileMemory(), m.AllocateKVCache(num_blocks=8), m.WarmUp()):
            await worker.ask(request)
        await worker.ask(m.StartServing())
        for request in REQUESTS:
            tag = m.message_tag(type(request).__name__)
            if tag not in replies and not isinstance(request, m.Cancel):
                replies[tag] = await worker.ask(request)
    step = replies["execute_model"]
    assert isinstance(step, m.StepOutput)
    replies["execute_model"] = msgspec.structs.replace(
        step,
        logprobs=Logprobs(num_columns=1, token_ids=b"1234", values=b"1234", ranks=b"1234"),
        refusals=(Refusal(request_id="a", code="busy", message="b"),),
    )
    session = m.SessionHealth(highest_epoch=3, client="x", live=True, silent_s=0.5)
    health = replies["get_health"]
    assert isinstance(health, m.HealthReport)
    replies["get_health"] = msgspec.structs.replace(health, session=session, boot_id=BOOT_ID)
    replies["cancel"] = m.Cancelled(outcome="started")
    replies["end_session"] = m.SessionEnded()
    replies["hello"] = m.Welcome(
        version=1,
        boot_id=BOOT_ID,
        epoch=4,
        state="serving",
        window=2,
        num_replays=64,
        lease_ms=0,
        features=("replay",),
        max_body_bytes=1 << 24,
        events="",
    )
    return {tag: msgspec.msgpack.encode(reply) for tag, reply in replies.items()}


def _is_decisive(frames: Sequence[bytes], corr: int) -> bool:
    """Say whether a client must end its waiting: for this request, or for all of them."""
    header = frames[0]
    if len(frames) != 2 or len(header) > MAX_HEADER_BYTES or header[:3] != b"GW\x01":
        return True
    try:
        fields = msgspec.msgpack.decode(header[3:])
    except (ValueError, TypeError, RecursionError):
        return True
    if not isinstance(fields, list) or len(fields) != 5:
        return True
    numbers, boot_id = fields[:4], fields[4]
    is_readable = all(type(n) is int and 0 <= n < 2**53 for n in numbers) and (
        isinstance(boot_id, str) and len(boot_id) <= 32
    )
    return not is_readable or fields[0] != 2 or fields[1] == corr


class Liar(threading.Thread):
    """Answers on a ROUTER; what it says is damaged more often than not.

    Every request gets an answer that ends its waiting, so that a client that waits for long has
    overlooked one.
    """

    def __init__(self, router: zmq.Socket[bytes], replies: dict[str, bytes], seed: int) -> None:
        super().__init__(name="liar")
        self.num_lies = 0
        self.stop = threading.Event()
        self._router = router
        self._peers: set[bytes] = set()
        self._replies = replies
        self._rng = random.Random(seed)
        self._mutator = Mutator(self._rng, tuple(replies.values()))

    def run(self) -> None:
        while not self.stop.is_set():
            if self._router.poll(20):
                peer, header, body = self._router.recv_multipart()
                self._answer(peer, header, body)

    def _answer(self, peer: bytes, header: bytes, body: bytes) -> None:
        rng = self._rng
        _, corr, epoch, seq, _ = msgspec.msgpack.decode(header[3:])
        tag = msgspec.msgpack.decode(body)[0]
        honest = [header_of(2, corr, epoch, seq, BOOT_ID), self._replies[tag]]
        is_first = peer not in self._peers
        self._peers.add(peer)
        if rng.random() < (GREETING_HONEST if is_first or tag == "hello" else HONEST):
            self._router.send_multipart([peer, *honest])
            return
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            self.num_lies += 1
            frames = [honest[0], rng.choice((honest[1], *FAILURES))]
            if rng.random() < 0.9:
                frames = self._mutator.mutate(frames)
            self._router.send_multipart([peer, *frames])
        if not _is_decisive(frames, corr):
            self._router.send_multipart([peer, *honest])


@contextmanager
def _liar(seed: int) -> Iterator[tuple[Liar, str]]:
    replies = asyncio.run(_honest_replies())
    with raw_router() as (router, endpoint):
        liar = Liar(router, replies, seed)
        liar.start()
        try:
            yield liar, endpoint
        finally:
            liar.stop.set()
            liar.join()


def _note(outcomes: Counter[str], request: m.Request[m.Reply], answer: object) -> None:
    """Count how a request ended; anything but its reply and the typed errors fails."""
    if not isinstance(answer, (WorkerError, ClientError)):
        assert type(answer) is m.REPLY_OF[type(request)], answer
    assert not isinstance(answer, RequestTimeout), f"{request} hung"
    outcomes[type(answer).__name__] += 1


def _check(outcomes: Counter[str], liar: Liar) -> None:
    assert liar.num_lies > NUM_CONVERSATIONS * NUM_REQUESTS // 4
    assert {"ConnectionLost", "WorkerError", "Busy", "StepOutput"} <= {*outcomes}, outcomes
    print(outcomes, liar.num_lies)


def test_an_asyncio_client_survives_a_worker_that_lies() -> None:
    print(f"seed {SEED}")
    outcomes: Counter[str] = Counter()
    unexpected: list[object] = []

    async def converse(endpoint: str, rng: random.Random) -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: unexpected.append(context)
        )
        for _ in range(NUM_CONVERSATIONS):
            try:
                async with connect(
                    endpoint, observe=rng.random() < 0.3, timeout_s=DEADLINE_S
                ) as worker:
                    left = NUM_REQUESTS
                    while left > 0:
                        requests = rng.choices(REQUESTS, k=rng.choice((1, 1, 2, 8)))
                        left -= len(requests)
                        answers = await asyncio.gather(
                            *(worker.ask(request) for request in requests), return_exceptions=True
                        )
                        for request, answer in zip(requests, answers, strict=True):
                            _note(outcomes, request, answer)
            except (WorkerError, ClientError) as error:  # its hello was answered so
                _note(outcomes, m.GetHealth(), error)

    with _liar(SEED) as (liar, endpoint):
        asyncio.run(converse(endpoint, random.Random(SEED)))
    _check(outcomes, liar)
    assert unexpected == []


def test_a_blocking_client_survives_a_worker_that_lies() -> None:
    print(f"seed {SEED}")
    outcomes: Counter[str] = Counter()
    rng = random.Random(SEED)
    with _liar(SEED) as (liar, endpoint):
        for _ in range(NUM_CONVERSATIONS):
            try:
                with BlockingClient(
                    endpoint, observe=rng.random() < 0.3, timeout_s=DEADLINE_S
                ) as client:
                    left = NUM_REQUESTS
                    while left > 0:
                        requests = rng.choices(REQUESTS, k=rng.choice((1, 1, 2, 8)))
                        left -= len(requests)
                        pending = [client.submit(request) for request in requests]
                        for request, reply in zip(requests, pending, strict=True):
                            _note(outcomes, request, _outcome(reply))
            except (WorkerError, ClientError) as error:
                _note(outcomes, m.GetHealth(), error)
    _check(outcomes, liar)


def _outcome(reply: PendingReply[m.Reply]) -> m.Reply | WorkerError | ClientError:
    try:
        return reply.result()
    except (WorkerError, ClientError) as error:
        return error


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_reply_beyond_every_limit_is_a_lost_connection(kind: str) -> None:
    with raw_router() as (router, endpoint):

        def answer() -> None:
            peer, header, _ = router.recv_multipart()
            corr = msgspec.msgpack.decode(header[3:])[1]
            router.send_multipart(
                [peer, header_of(2, corr, 0, 0, BOOT_ID), bytes(2 * MAX_BODY_BYTES)]
            )

        def ask() -> None:
            with BlockingClient(endpoint, observe=True, timeout_s=DEADLINE_S) as client:
                client.ask(m.GetHealth())

        async def ask_in_time() -> None:
            async with connect(endpoint, observe=True, timeout_s=DEADLINE_S) as worker:
                await worker.ask(m.GetHealth())

        answering = asyncio.create_task(asyncio.to_thread(answer))
        with pytest.raises(ConnectionLost, match="outcome of GetHealth is unknown"):
            await (ask_in_time() if kind == "asyncio" else asyncio.to_thread(ask))
        await answering
