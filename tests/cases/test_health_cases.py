"""Public case B18: health tells the truth while something hangs, and the worker does not stay so.

Nothing here waits for a time: the limits are short, and each change is waited for.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fake_serve import fake_serve
from gpuworker import messages as m
from gpuworker.errors import ClientError, ConnectionLost, DeviceFault, StepFailed, WorkerClosed
from gpuworker.ipc import RemoteWorker, connect
from gpuworker.launch import ExitCode, WorkerProcess
from gpuworker.testing import empty_step
from processes import fake_config, observe, until, walk

STEP_LIMIT_S = 0.5
GRACE_S = 0.5


@asynccontextmanager
async def _serving(
    behaviour: str, **supervision: object
) -> AsyncIterator[tuple[WorkerProcess, RemoteWorker]]:
    """Start a worker that behaves so, and lead it to serving."""
    config = fake_config(**{"step_limit_s": STEP_LIMIT_S, "stall_grace_s": GRACE_S, **supervision})
    async with (
        WorkerProcess(config, command=fake_serve(behaviour)) as process,
        connect(process.endpoint) as worker,
    ):
        await walk(worker)
        yield process, worker


async def _has_exited(process: WorkerProcess) -> ExitCode:
    await until(lambda: process.returncode is not None)
    assert process.returncode is not None
    return ExitCode(process.returncode)


async def test_a_step_that_never_returns_is_reported_then_given_up() -> None:
    async with _serving("step", faulted_linger_s=1.0) as (process, worker):
        step = worker.submit(empty_step(1))
        reports: list[m.HealthReport] = []
        async with observe(process.endpoint) as health:

            async def is_over() -> bool:
                try:
                    reports.append(await health())
                except (WorkerClosed, ClientError):  # lingered long enough
                    return True
                return False

            await until(is_over)
        verdicts = [report.health for report in reports]
        assert list(dict.fromkeys(verdicts)) == ["ok", "stalled", "faulted"]
        assert verdicts == sorted(verdicts, key=["ok", "stalled", "faulted"].index)
        for report in reports:
            # Before the step has begun it is as idle as it says.
            if report.health == "stalled":
                assert report.running_step_id == 1
                assert report.running_step_s > report.limit_s == STEP_LIMIT_S
                assert not report.ready
            if report.health == "faulted":
                assert "step 1 has run for" in report.fault
                assert report.state == "faulted"
        with pytest.raises(DeviceFault, match=r"step 1 has run for .* supervision\.step_limit_s"):
            await step
        assert await _has_exited(process) is ExitCode.GIVEN_UP
        assert "step 1 is stalled" in process.last_words()
        assert list(Path(process.endpoint.removeprefix("ipc://")).parent.glob("*")) == []


async def test_a_stall_may_be_reported_only_and_the_end_is_still_limited() -> None:
    async with _serving("step", stall_action="report", drain_limit_s=0.5) as (process, worker):
        step = worker.submit(empty_step(1))
        async with observe(process.endpoint) as health:

            async def is_stalled() -> bool:
                return (await health()).health == "stalled"

            await until(is_stalled)
            await until(lambda: "is stalled" in process.last_words())
            os.kill(process.pid, signal.SIGTERM)
            assert await _has_exited(process) is ExitCode.GIVEN_UP
        with pytest.raises(ConnectionLost):
            await step
        assert "0.5 s after SIGTERM" in process.last_words()
        assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()


async def test_a_move_that_never_returns_is_given_up_by_its_own_limit() -> None:
    config = fake_config(
        move_limits_s={"load_model": 0.3}, stall_grace_s=0.0, faulted_linger_s=60.0
    )
    async with (
        WorkerProcess(config, command=fake_serve("load")) as process,
        connect(process.endpoint) as worker,
    ):
        await worker.ask(m.InitDevice())
        with pytest.raises(DeviceFault, match="load_model has run for"):
            await worker.ask(m.LoadModel())
        report = await worker.ask(m.GetHealth())
        assert (report.health, report.state) == ("faulted", "faulted")
        assert "load_model has run for" in report.fault
        await worker.ask(m.Shutdown())  # no need to linger any longer
        assert await _has_exited(process) is ExitCode.GIVEN_UP


async def test_a_frozen_event_loop_ends_the_process() -> None:
    # It cannot even say that it is stalled.
    async with _serving("loop") as (process, worker):
        asking = worker.submit(m.GetHealth())
        assert await _has_exited(process) is ExitCode.GIVEN_UP
        with pytest.raises(ConnectionLost):
            await asking
        assert "the event loop has not moved" in process.last_words()
        assert not Path(process.endpoint.removeprefix("ipc://")).parent.exists()


async def test_health_shows_the_error_of_a_step() -> None:
    async with _serving("failing step") as (process, worker):
        with pytest.raises(StepFailed):
            await worker.ask(empty_step(1))
        report = await worker.ask(m.GetHealth())
        assert report.last_error == "step_failed: the forward pass raised ValueError: a reason"
        assert (report.health, report.aborted_after, report.num_steps) == ("ok", 1, 0)
        assert await process.stop() == ExitCode.ORDERLY


@pytest.mark.parametrize("linger_s", [0.0, 60.0])
async def test_a_worker_that_faulted_says_why_and_exits_with_3(linger_s: float) -> None:
    async with _serving("faulting step", faulted_linger_s=linger_s) as (process, worker):
        with pytest.raises(DeviceFault, match="illegal memory access"):
            await worker.ask(empty_step(1))
        if linger_s:
            async with observe(process.endpoint) as health:
                report = await health()
            assert (report.health, report.ready) == ("faulted", False)
            assert report.fault == "device_fault: an illegal memory access"
            await worker.ask(m.Shutdown())
        assert await _has_exited(process) is ExitCode.FAULTED
        assert "the worker had faulted: an illegal memory access" in process.last_words()
