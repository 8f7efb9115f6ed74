"""Public case B22: large replies to a slow reader arrive whole, and stay as they were."""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from pathlib import Path

import pytest

from chaos_scheduler import bring_up
from chaos_worker import chaos_step, chaos_worker, is_whole
from gpuworker import messages as m
from gpuworker.ipc import BlockingClient, PendingReply, connect
from gpuworker.launch import WorkerProcess
from processes import TO_SERVING, WALK, fake_config

NUM_REPLIES = 2_000
MIN_BYTES, MAX_BYTES = 70 << 10, 1 << 20
MAX_SLEEP_S = 0.005
NUM_KEPT = 100
DEADLINE_S = 60.0


class Keeper:
    """Checks each reply when it comes, and again a hundred replies later."""

    def __init__(self) -> None:
        self.num_checked = 0
        self._kept: deque[m.StepOutput] = deque()

    def take(self, output: m.StepOutput, step_id: int) -> None:
        assert output.step_id == step_id
        assert MIN_BYTES <= output.buffer.nbytes <= MAX_BYTES
        assert is_whole(output), f"reply {step_id} did not arrive whole"
        self._kept.append(output)
        if len(self._kept) > NUM_KEPT:
            self._check_oldest()

    def close(self) -> None:
        while self._kept:
            self._check_oldest()

    def _check_oldest(self) -> None:
        output = self._kept.popleft()
        assert is_whole(output), f"reply {output.step_id} has changed since"
        self.num_checked += 1


async def test_an_asyncio_reader(tmp_path: Path) -> None:
    rng = random.Random(22)
    keeper = Keeper()
    process = WorkerProcess(
        fake_config(), command=chaos_worker(tmp_path / "log", large=float(MAX_BYTES))
    )
    async with process, connect(process.endpoint, timeout_s=DEADLINE_S) as worker:
        kv_epoch = await bring_up(worker)
        pending: deque[asyncio.Future[m.StepOutput]] = deque()
        for number in range(1, NUM_REPLIES + 1):
            pending.append(worker.submit(chaos_step(1, number, kv_epoch)))
            if len(pending) == 2 or number == NUM_REPLIES:
                await asyncio.sleep(rng.random() * MAX_SLEEP_S)  # this reader is slow
            while len(pending) == 2 or (pending and number == NUM_REPLIES):
                async with asyncio.timeout(DEADLINE_S):
                    output = await pending.popleft()
                keeper.take(output, 1_000_000 + number - len(pending))
    keeper.close()
    assert keeper.num_checked == NUM_REPLIES


@pytest.mark.parametrize("num_replies", [NUM_REPLIES // 4])
async def test_a_blocking_reader(num_replies: int, tmp_path: Path) -> None:
    keeper = Keeper()
    process = WorkerProcess(
        fake_config(), command=chaos_worker(tmp_path / "log", large=float(MAX_BYTES))
    )

    def read(endpoint: str) -> None:
        rng = random.Random(23)
        with BlockingClient(endpoint, timeout_s=DEADLINE_S) as client:
            for request in WALK[:TO_SERVING]:
                client.ask(request)
            pending: deque[tuple[int, PendingReply[m.StepOutput]]] = deque()
            for number in range(1, num_replies + 1):
                step = chaos_step(1, number, 0)
                pending.append((step.step_id, client.submit(step)))
                time.sleep(rng.random() * MAX_SLEEP_S)
                while len(pending) == 2 or (pending and number == num_replies):
                    step_id, reply = pending.popleft()
                    keeper.take(reply.result(), step_id)

    async with process:
        await asyncio.to_thread(read, process.endpoint)
    keeper.close()
    assert keeper.num_checked == num_replies
