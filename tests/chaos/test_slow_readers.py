"""A client that stops reading: the others go on, and it gets what it is owed or is told."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq

from chaos_scheduler import bring_up
from chaos_worker import chaos_step, chaos_worker
from gpuworker import messages as m
from gpuworker.ipc import connect
from gpuworker.launch import WorkerProcess
from ipc_serving import request_frames
from processes import fake_config

SCRIPT = str(Path(__file__).parents[1] / "stopped_client.py")
DEADLINE_S = 30.0
NUM_REQUESTS = 6_000
"""More replies than the queues and the socket's buffers hold."""
NUM_DEAF = 12
NUM_DEAF_REQUESTS = 2_000
STEP_LIMIT_S = 6.0
"""Less than if the worker waited a second for each client that does not read."""


@pytest.mark.parametrize("kind", ["asyncio", "blocking"])
async def test_a_stopped_client_holds_nobody_up_and_its_accounts_are_even(
    kind: str, tmp_path: Path
) -> None:
    process = WorkerProcess(fake_config(), command=chaos_worker(tmp_path / "log"))
    async with process, connect(process.endpoint, timeout_s=DEADLINE_S) as worker:
        kv_epoch = await bring_up(worker)
        client = await asyncio.create_subprocess_exec(
            *(sys.executable, SCRIPT, process.endpoint, str(NUM_REQUESTS), kind),
            stdout=asyncio.subprocess.PIPE,
        )
        assert client.stdout is not None
        try:
            async with asyncio.timeout(DEADLINE_S):
                assert await client.stdout.readline() == b"stops\n"
            for number in range(1, 301):
                await worker.ask(chaos_step(1, number, kv_epoch))
            client.send_signal(signal.SIGCONT)
            async with asyncio.timeout(DEADLINE_S):
                words = (await client.stdout.readline()).decode().split()
        finally:
            if client.returncode is None:
                client.kill()
            await client.communicate()
        assert (await worker.ask(m.GetHealth())).ready
    assert words[::2] == ["answered", "lost", "missing"]
    answered, lost, missing = map(int, words[1::2])
    assert (answered + lost, missing) == (NUM_REQUESTS, 0)


async def test_many_clients_that_do_not_read_hold_nobody_up(tmp_path: Path) -> None:
    process = WorkerProcess(fake_config(), command=chaos_worker(tmp_path / "log"))
    async with process, connect(process.endpoint, timeout_s=STEP_LIMIT_S) as worker:
        kv_epoch = await bring_up(worker)

        def flood(sockets: list[zmq.Socket[bytes]]) -> None:
            for corr in range(1, NUM_DEAF_REQUESTS):
                for socket in sockets:
                    with suppress(zmq.Again):
                        socket.send_multipart(request_frames(corr, m.GetStatus()), zmq.NOBLOCK)

        with zmq.Context() as context, ExitStack() as stack:
            deaf = [stack.enter_context(context.socket(zmq.DEALER)) for _ in range(NUM_DEAF)]
            for socket in deaf:
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.RCVHWM, 1)
                socket.connect(process.endpoint)
            flooding = asyncio.create_task(asyncio.to_thread(flood, deaf))
            number = 0
            while not flooding.done() or number < 200:
                number += 1
                await worker.ask(chaos_step(1, number, kv_epoch))
            await flooding
            assert (await worker.ask(m.GetHealth())).ready
