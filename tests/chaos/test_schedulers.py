"""Schedulers that are killed, stopped and replaced: the newest is served, each step runs once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from chaos_scheduler import bring_up
from chaos_worker import STEPS_PER_EPOCH, Log, chaos_step, chaos_worker
from gpuworker import messages as m
from gpuworker.ipc import connect
from gpuworker.launch import WorkerProcess
from processes import fake_config, until
from real_worker import tiny_config

SCRIPT = str(Path(__file__).parents[1] / "chaos_scheduler.py")
SEED = int(os.environ.get("GPUWORKER_CHAOS_SEED", "5"))
DEADLINE_S = 30.0
HEARTBEAT_S = 2.5
SLOW = {
    "step": 0.004,
    "load_model": 0.06,
    "profile_memory": 0.03,
    "warm_up": 0.03,
    "keep_weights": 0.03,
    "release": 0.03,
    "resume": 0.02,
    "reload_weights": 0.05,
}


class Scheduler:
    """A scheduler process and what it has said."""

    def __init__(self, process: asyncio.subprocess.Process, epoch: int) -> None:
        self.epoch = epoch
        self.lines: list[str] = []
        self._process = process

    async def until_said(self, *beginnings: str) -> None:
        """Read until a line begins so; fails when the scheduler ends before or takes too long."""
        async with asyncio.timeout(DEADLINE_S):
            while not (line := await self._line()).startswith(beginnings):
                assert line, f"scheduler {self.epoch} did not say {beginnings}: {self.lines}"

    async def end(self) -> None:
        """Read what is left and wait for the end."""
        async with asyncio.timeout(DEADLINE_S):
            while await self._line():
                pass
            await self._process.wait()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def steps(self, verb: str) -> list[int]:
        """Ids of the steps that were sent, got, or ended with an error."""
        return [int(line.split()[-1]) for line in self.lines if line.startswith(verb)]

    async def _line(self) -> str:
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        if line.endswith("\n"):  # the last one may be cut off
            self.lines.append(line.strip())
        return line


@asynccontextmanager
async def scheduler(endpoint: str, epoch: int, *options: str) -> AsyncIterator[Scheduler]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, SCRIPT, endpoint, str(epoch), *options), stdout=asyncio.subprocess.PIPE
    )
    try:
        yield Scheduler(process, epoch)
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def check_log(log: Log) -> Counter[int]:
    """Each step began once, sessions follow each other, nothing outlives its session.

    Returns how many steps each session had.
    """
    steps = log.steps()
    assert len(steps) == len(set(steps)), "a step was carried out twice"
    epochs = [step_id // STEPS_PER_EPOCH for step_id in steps]
    assert epochs == sorted(epochs), "a step of an older session ran after one of a newer one"
    assert log.leaks() == []
    return Counter(epochs)


BRINGING_UP = ("welcome", "init", "load", "profile", "allocate", "warm_up", "start")
SERVING = ("sent", "got", "got", "sleep", "sleep", "resume_pools", "reload", "wake_up", "awake")
"""After one of these a scheduler is killed, or after a step if it does not come so far."""
KILLS = 26


async def test_killed_schedulers_leave_a_worker_that_serves_the_next_one(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    log = Log(tmp_path / "log")
    epoch = 0
    answered: list[int] = []
    process = WorkerProcess(fake_config(), command=chaos_worker(log.path, **SLOW))
    async with process:
        for kill in range(KILLS):
            epoch += rng.choice((1, 1, 7))
            async with scheduler(process.endpoint, epoch) as victim:
                if kill < len(BRINGING_UP):
                    await victim.until_said(BRINGING_UP[kill], "got")
                elif rng.random() < 0.2:  # while it starts, connects or says hello
                    await asyncio.sleep(rng.random() * 0.4)
                else:
                    await victim.until_said("serving")  # always, whatever was left behind
                    await victim.until_said(rng.choice(SERVING), "awake")
                await asyncio.sleep(rng.random() * 0.02)  # anywhere within what comes next
                victim.signal(signal.SIGKILL)
                await victim.end()
            got, sent = victim.steps("got"), victim.steps("sent")
            assert victim.steps("error") == []
            assert 0 <= len(sent) - len(got) <= 2  # the outcome of the rest is unknown
            answered += got
        epoch += 1
        async with connect(process.endpoint, epoch=epoch, timeout_s=DEADLINE_S) as last:
            kv_epoch = await bring_up(last)
            assert (await last.ask(m.GetStatus())).num_requests == 0  # nothing is left behind
            for number in range(1, 20):
                await last.ask(chaos_step(epoch, number, kv_epoch))
            health = await last.ask(m.GetHealth())
        assert health.session is not None
        assert (health.ready, health.session.highest_epoch) == (True, epoch)
    assert process.returncode == 0
    assert "Traceback" not in process.last_words()
    counts = check_log(log)
    assert {*answered} <= {*log.steps()}
    assert counts[epoch] == 19
    assert len(counts) > 10
    print(f"{KILLS} schedulers killed, {len(log.steps())} steps, {len(answered)} answered")


async def test_a_real_worker_outlives_its_schedulers(tiny_model: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    num_sent = num_got = 0
    async with WorkerProcess(tiny_config(tiny_model)) as process:
        for epoch, first in enumerate((*BRINGING_UP[2:4], *["serving"] * 4), 1):
            async with scheduler(process.endpoint, epoch, "real") as victim:
                await victim.until_said(first, "got")
                if first == "serving":
                    await victim.until_said(rng.choice(SERVING), "awake")
                await asyncio.sleep(rng.random() * 0.02)
                victim.signal(signal.SIGKILL)
                await victim.end()
            assert victim.steps("error") == []
            num_sent += len(victim.steps("sent"))
            num_got += len(victim.steps("got"))
        async with connect(process.endpoint, timeout_s=DEADLINE_S) as last:
            await bring_up(last)
            limits = await last.ask(m.GetLimits())
            assert (limits.live_requests, limits.next_step_id) == ((), 0)
            health = await last.ask(m.GetHealth())
        async with scheduler(process.endpoint, 100, "real") as survivor:
            for _ in range(50):  # over a sleep
                await survivor.until_said("got")
    assert health.ready
    assert num_got <= health.num_steps <= num_sent
    assert process.returncode == 0
    print(f"{num_sent} steps sent, {health.num_steps} carried out, {num_got} answered")


async def test_a_stopped_scheduler_that_wakes_up_later_changes_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path / "log")
    process = WorkerProcess(fake_config(), command=chaos_worker(log.path, step=0.01))
    async with process, scheduler(process.endpoint, 1) as old:
        await old.until_said("got")
        old.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        async with scheduler(process.endpoint, 2) as new:
            await new.until_said("got")
            stopped_s = time.monotonic() - stopped
            old.signal(signal.SIGCONT)
            await old.until_said("error")
            await old.end()
            for _ in range(20):
                await new.until_said("got")
            new.signal(signal.SIGKILL)
            await new.end()
    sent, got, failed = (old.steps(verb) for verb in ("sent", "got", "error"))
    assert sorted(got + failed) == sent  # each had an answer, or was lost
    errors = {line.split()[1] for line in old.lines if line.startswith("error")}
    assert errors <= {"StaleEpoch", "ConnectionLost"}
    if stopped_s < HEARTBEAT_S:  # else its own socket gives the connection up
        assert "StaleEpoch" in errors
    counts = check_log(log)
    assert counts[1] <= len(got) + 2  # the one that ran when it was replaced, never a later one
    assert counts[2] >= 20
    assert new.steps("error") == []


@pytest.mark.parametrize("num_rivals", [6])
async def test_schedulers_that_start_together_end_with_the_newest(
    num_rivals: int, tmp_path: Path
) -> None:
    log = Log(tmp_path / "log")
    process = WorkerProcess(fake_config(), command=chaos_worker(log.path, **SLOW))
    async with process:
        rivals = [scheduler(process.endpoint, epoch) for epoch in range(1, num_rivals + 1)]
        started = await asyncio.gather(*(rival.__aenter__() for rival in rivals))
        newest = started[-1]
        try:
            for _ in range(30):
                await newest.until_said("got")
            for other in started[:-1]:
                await other.end()  # refused, or told so, at the latest with its next step
                assert other.lines[-1] == "end"
                assert other.lines[-2].split()[0] in ("refused", "error"), other.lines
        finally:
            for rival in rivals:
                await rival.__aexit__(None, None, None)
        async with connect(process.endpoint, observe=True, timeout_s=DEADLINE_S) as observer:

            async def is_idle() -> bool:
                return (await observer.ask(m.GetHealth())).running_step_id is None

            await until(is_idle)
    assert check_log(log)[num_rivals] >= 30
    assert newest.steps("error") == []
