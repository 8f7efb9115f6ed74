"""A scheduler that repeats, skips, withdraws and hurries: each step runs as its answer says."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import pytest
import zmq

from chaos_worker import STEPS_PER_EPOCH, Log, chaos_step, chaos_worker
from gpuworker import messages as m
from gpuworker.ipc import BlockingClient
from gpuworker.ipc.wire import decode_reply_header
from gpuworker.launch import WorkerProcess
from ipc_serving import request_frames
from processes import TO_SERVING, WALK, fake_config

SEED = int(os.environ.get("GPUWORKER_CHAOS_SEED", "6"))
NUM_SESSIONS = 40
NUM_ACTIONS = 120
DEADLINE_S = 20.0
DID_NOT_RUN = {"cancelled", "deadline_exceeded", "aborted", "stale_kv_epoch"}


class Wild:
    """Says what a session may say, in any order; remembers every answer by the step's number."""

    def __init__(self, socket: zmq.Socket[bytes], rng: random.Random) -> None:
        self.answers: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        """Bodies by epoch and number, of steps that were accepted."""
        self.codes: Counter[str] = Counter()
        self._socket = socket
        self._rng = rng
        self._corr = 0
        self._asked: dict[int, int] = {}  # corr -> epoch
        self._epoch = 0
        self._next_seq = 1
        self._hoped: dict[int, int] = {}  # corr -> number, of steps that have no answer yet
        self._aborted_after: int | None = None

    def session(self, epoch: int) -> None:
        self._epoch, self._next_seq, self._aborted_after = epoch, 1, None
        self._hoped.clear()
        self._say(m.Hello(min_version=1, max_version=1, epoch=epoch))
        while epoch in self._asked.values():
            self._take()  # the answers to the old session come, too
        for _ in range(NUM_ACTIONS):
            self._act()
            while self._socket.poll(self._rng.choice((0, 0, 1, 3))):
                self._take()

    def settle(self) -> None:
        while self._asked:
            self._take()

    def _act(self) -> None:
        rng = self._rng
        way = rng.random()
        if self._aborted_after is not None and way < 0.4:
            self._say(m.ResumeSteps(step_id=self._aborted_after))
            self._aborted_after = None
        elif way < 0.1:
            self._say(m.Cancel(corr=max(self._corr - rng.randrange(4), 0)))
        else:
            seq = max([self._next_seq - 1, *self._hoped.values()]) + 1  # ahead of the answers
            if way < 0.3:
                seq = max(seq + rng.choice((-70, -3, -2, -1, 1, 2)), 1)
            budget_us = rng.choice((0, 0, 0, 0, 0, 0, 1, 2000))
            kv_epoch = int(rng.random() < 0.03)
            self._say(chaos_step(self._epoch, seq, kv_epoch), seq, budget_us)
            self._hoped[self._corr] = seq

    def _say(self, request: m.Request[m.Reply], seq: int = 0, budget_us: int = 0) -> None:
        self._corr += 1
        self._asked[self._corr] = self._epoch
        self._socket.send_multipart(
            request_frames(self._corr, request, epoch=self._epoch, seq=seq, budget_us=budget_us)
        )

    def _take(self) -> None:
        assert self._socket.poll(int(DEADLINE_S * 1000)), f"no answer to {self._asked}"
        frames = self._socket.recv_multipart()
        header = decode_reply_header(frames)
        epoch = self._asked.pop(header.corr)  # exactly one answer each
        self._hoped.pop(header.corr, None)
        reply = msgspec.msgpack.decode(frames[1])
        code = reply[1] if reply[0] == "failure" else reply[0]
        self.codes[code] += 1
        if header.seq:
            self.answers[epoch, header.seq].add(frames[1])
            if epoch == self._epoch:
                self._next_seq = max(self._next_seq, header.seq + 1)
                if code in DID_NOT_RUN - {"aborted"}:
                    self._aborted_after = epoch * STEPS_PER_EPOCH + header.seq


def _drive(endpoint: str, rng: random.Random) -> Wild:
    with BlockingClient(endpoint, timeout_s=DEADLINE_S) as client:
        for request in WALK[:TO_SERVING]:
            client.ask(request)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(endpoint)
        wild = Wild(socket, rng)
        for epoch in range(2, NUM_SESSIONS + 2):
            wild.session(epoch)
        wild.settle()
        return wild


@pytest.mark.parametrize("step_s", [0.0, 0.003])
async def test_each_step_runs_as_its_answer_says(step_s: float, tmp_path: Path) -> None:
    print(f"seed {SEED}")
    log = Log(tmp_path / "log")
    process = WorkerProcess(fake_config(), command=chaos_worker(log.path, step=step_s))
    started = time.monotonic()
    async with process:
        wild = await asyncio.to_thread(_drive, process.endpoint, random.Random(SEED))
    executed = log.steps()
    ran = {divmod(step_id, STEPS_PER_EPOCH) for step_id in executed}
    assert len(executed) == len(ran), "a step was carried out twice"
    assert executed == sorted(executed)
    assert ran <= {*wild.answers}, "a step ran whose number was not accepted"
    for (epoch, seq), bodies in wild.answers.items():
        assert len(bodies) == 1, f"step {seq} of {epoch} was answered in two ways: {bodies}"
        reply = msgspec.msgpack.decode(bodies.pop())
        if reply[0] == "step_output":
            assert (epoch, seq) in ran, reply
        elif reply[1] in DID_NOT_RUN:
            assert (epoch, seq) not in ran, reply
        else:
            assert reply[1] == "stale_epoch", reply
    assert {"step_output", *DID_NOT_RUN, "stale_epoch", "out_of_order", "busy"} <= {*wild.codes}
    assert process.returncode == 0
    print(f"{len(executed)} steps ran in {time.monotonic() - started:.1f} s: {wild.codes}")
