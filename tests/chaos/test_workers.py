"""Workers that are killed: who waits is told at once, and the endpoint can be served again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from chaos_scheduler import bring_up
from chaos_worker import Log, chaos_step, chaos_worker
from gpuworker import messages as m
from gpuworker.errors import ConfigError, ConnectionLost, Fenced
from gpuworker.ipc import BlockingClient, PendingReply, Server, connect
from gpuworker.launch import WorkerProcess
from gpuworker.testing import fake_worker
from processes import TO_SERVING, WALK, fake_config, until, walk
from real_worker import tiny_config

DEADLINE_S = 20.0
FOR_EVER = -1.0
NUM_RESTARTS = 8

WORK: dict[str, tuple[dict[str, float], int, tuple[m.Request[m.Reply], ...], str]] = {
    "a load": ({"load_model": FOR_EVER}, 1, (m.LoadModel(), m.ProfileMemory()), "load_model"),
    "a step": (
        {"step": FOR_EVER},
        TO_SERVING,
        (chaos_step(1, 1, 0), chaos_step(1, 2, 0), m.Sleep(), m.GetLimits()),
        "step ",
    ),
    "a sleep": (
        {"release": FOR_EVER},
        TO_SERVING,
        (m.Sleep(), m.WakeUp(), chaos_step(1, 1, 0)),
        "release",
    ),
}
"""What takes for ever; how far to walk before; what is sent; what the log says while it runs."""


def _endpoint(tmp_path: Path) -> str:
    directory = tmp_path / "run"
    directory.mkdir(mode=0o700, exist_ok=True)
    return f"ipc://{directory}/rank0"


async def _until_logged(log: Log, beginning: str) -> None:
    await until(lambda: any(line.startswith(beginning) for line in log.lines()), DEADLINE_S)


async def _serve_again(endpoint: str, log: Path, epoch: int) -> None:
    """Serve the endpoint anew: old epochs are refused, a newer one has a fresh worker."""
    process = WorkerProcess(fake_config(), endpoint=endpoint, command=chaos_worker(log))
    async with process:
        with pytest.raises(Fenced, match=f"not above {epoch}"):
            async with connect(endpoint, epoch=epoch):
                pass
        async with connect(endpoint, timeout_s=DEADLINE_S) as worker:
            assert worker.welcome is not None
            assert (worker.welcome.epoch, worker.welcome.state) == (epoch + 1, "uninit")
            kv_epoch = await bring_up(worker)
            step = chaos_step(epoch + 1, 1, kv_epoch)
            assert (await worker.ask(step)).step_id == step.step_id
    assert process.returncode == 0


@pytest.mark.parametrize("work", WORK)
async def test_an_asyncio_client_learns_of_a_killed_worker_and_the_endpoint_is_served_again(
    work: str, tmp_path: Path
) -> None:
    times, num_moves, requests, begun = WORK[work]
    endpoint, log = _endpoint(tmp_path), Log(tmp_path / "log")
    process = WorkerProcess(
        fake_config(), endpoint=endpoint, command=chaos_worker(log.path, **times)
    )
    async with process, connect(endpoint, epoch=1) as worker:
        await walk(worker, num_moves)
        pending = [worker.submit(request) for request in requests]
        await _until_logged(log, begun)
        assert (await worker.ask(m.GetHealth())).health == "ok"
        assert not any(reply.done() for reply in pending)
        os.kill(process.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            lost = await asyncio.gather(*pending, return_exceptions=True)
        for request, error in zip(requests, lost, strict=True):
            assert isinstance(error, ConnectionLost)
            assert f"outcome of {type(request).__name__} is unknown" in str(error)
        with pytest.raises(ConnectionLost, match="nothing was sent"):
            worker.submit(m.GetStatus())
        await _serve_again(endpoint, tmp_path / "next", 1)


@pytest.mark.parametrize("work", WORK)
async def test_a_blocking_client_learns_of_a_killed_worker(work: str, tmp_path: Path) -> None:
    times, num_moves, requests, begun = WORK[work]
    log = Log(tmp_path / "log")
    process = WorkerProcess(fake_config(), command=chaos_worker(log.path, **times))

    def begin() -> tuple[BlockingClient, list[PendingReply[m.Reply]]]:
        client = BlockingClient(process.endpoint, epoch=1, timeout_s=DEADLINE_S)
        for request in WALK[:num_moves]:
            client.ask(request)
        return client, [client.submit(request) for request in requests]

    def take_in(client: BlockingClient, pending: list[PendingReply[m.Reply]]) -> None:
        with client:
            for request, reply in zip(requests, pending, strict=True):
                with pytest.raises(
                    ConnectionLost, match=f"outcome of {type(request).__name__} is unknown"
                ):
                    reply.result()
            with pytest.raises(ConnectionLost, match="nothing was sent"):
                client.submit(m.GetStatus())

    async with process:
        client, pending = await asyncio.to_thread(begin)
        await _until_logged(log, begun)
        waiting = asyncio.create_task(asyncio.to_thread(take_in, client, pending))
        os.kill(process.pid, signal.SIGKILL)
        await waiting


async def test_workers_that_are_killed_again_and_again_keep_epoch_and_accounts(
    tmp_path: Path,
) -> None:
    endpoint, rng = _endpoint(tmp_path), random.Random(8)
    executed: list[int] = []
    num_sent = num_answered = num_lost = 0
    for epoch in range(1, NUM_RESTARTS + 1):
        log = Log(tmp_path / f"log{epoch}")
        process = WorkerProcess(
            fake_config(), endpoint=endpoint, command=chaos_worker(log.path, step=0.003)
        )
        async with process, connect(endpoint, timeout_s=DEADLINE_S) as worker:
            assert worker.welcome is not None
            assert worker.welcome.epoch == epoch
            kv_epoch = await bring_up(worker)
            last = rng.randrange(1, 40)
            pending: list[asyncio.Future[m.StepOutput]] = []
            answered: list[int] = []
            try:
                for number in range(1, 1000):
                    pending.append(worker.submit(chaos_step(epoch, number, kv_epoch)))
                    if number == last:
                        os.kill(process.pid, signal.SIGKILL)
                    if number > 1:
                        async with asyncio.timeout(DEADLINE_S):
                            answered.append((await pending[number - 2]).step_id)
            except ConnectionLost:
                pass
            async with asyncio.timeout(DEADLINE_S):
                ends = await asyncio.gather(*pending, return_exceptions=True)
            lost = [end for end in ends if isinstance(end, ConnectionLost)]
            assert len(lost) + sum(isinstance(end, m.StepOutput) for end in ends) == len(pending)
            assert 1 <= len(lost) <= 2
            assert {*answered} <= {*log.steps()}
            num_sent += len(pending)
            num_lost += len(lost)
            num_answered += len(pending) - len(lost)
            executed += log.steps()
            await until(lambda: process.returncode is not None)  # noqa: B023  # called at once
    assert len(executed) == len(set(executed))
    assert num_sent == num_answered + num_lost
    assert num_answered <= len(executed) <= num_sent
    print(f"{NUM_RESTARTS} workers killed: {num_sent} steps, {num_answered} answered")


async def test_a_worker_that_is_stopped_is_lost_and_goes_on_for_the_next_scheduler(
    tmp_path: Path,
) -> None:
    log = Log(tmp_path / "log")
    process = WorkerProcess(fake_config(), command=chaos_worker(log.path, step=0.02))
    async with process:
        async with connect(process.endpoint, epoch=1) as worker:
            kv_epoch = await bring_up(worker)
            pending = [worker.submit(chaos_step(1, number, kv_epoch)) for number in (1, 2)]
            os.kill(process.pid, signal.SIGSTOP)
            later = worker.submit(m.GetHealth())
            async with asyncio.timeout(DEADLINE_S):
                ends = await asyncio.gather(*pending, later, return_exceptions=True)
            assert all(isinstance(end, (ConnectionLost, m.StepOutput)) for end in ends)
            assert isinstance(ends[2], ConnectionLost)
        os.kill(process.pid, signal.SIGCONT)
        async with connect(process.endpoint, timeout_s=DEADLINE_S) as worker:
            kv_epoch = await bring_up(worker)
            assert (await worker.ask(chaos_step(2, 1, kv_epoch))).step_id == 2_000_001
            assert (await worker.ask(m.GetStatus())).num_requests == 0
    steps = log.steps()
    assert len(steps) == len(set(steps))
    assert log.leaks() == []
    assert process.returncode == 0


async def test_a_real_worker_that_is_killed_in_a_load_or_a_step_is_replaced(
    tiny_model: Path, tmp_path: Path
) -> None:
    endpoint = _endpoint(tmp_path)
    for epoch, num_moves in enumerate((1, TO_SERVING), 1):
        process = WorkerProcess(tiny_config(tiny_model), endpoint=endpoint)
        async with process, connect(endpoint, epoch=epoch) as worker:
            await walk(worker, num_moves)
            requests: tuple[m.Request[m.Reply], ...] = (
                (m.LoadModel(), m.ProfileMemory())
                if num_moves == 1
                else (m.ExecuteDummyBatch(num_tokens=64), m.Sleep(level=1))
            )
            pending = [worker.submit(request) for request in requests]
            os.kill(process.pid, signal.SIGKILL)
            async with asyncio.timeout(DEADLINE_S):
                ends = await asyncio.gather(*pending, return_exceptions=True)
            assert isinstance(ends[1], ConnectionLost)
            assert isinstance(ends[0], (ConnectionLost, *m.REPLY_OF.values()))
    await _serve_again(endpoint, tmp_path / "log", 2)


async def test_of_many_workers_on_one_path_one_serves_and_the_others_name_it(
    tmp_path: Path,
) -> None:
    endpoint = _endpoint(tmp_path)
    rivals = [
        WorkerProcess(
            fake_config(), endpoint=endpoint, command=chaos_worker(tmp_path / f"log{number}")
        )
        for number in range(4)
    ]
    entered = await asyncio.gather(
        *(rival.__aenter__() for rival in rivals), return_exceptions=True
    )
    winners = [one for one in entered if isinstance(one, WorkerProcess)]
    try:
        assert len(winners) == 1
        for refusal in entered:
            if isinstance(refusal, BaseException):
                assert isinstance(refusal, ConnectionLost)
                assert f"ConfigError: a worker lives on {endpoint}" in str(refusal)
        async with connect(endpoint, timeout_s=DEADLINE_S) as worker:
            kv_epoch = await bring_up(worker)
            async with fake_worker() as other:
                with pytest.raises(ConfigError, match=f"a worker lives on {endpoint}"):
                    await Server(other, endpoint).run()
            assert (await worker.ask(chaos_step(1, 1, kv_epoch))).step_id == 1_000_001
    finally:
        for winner in winners:
            await winner.stop()
    assert winners[0].returncode == 0
