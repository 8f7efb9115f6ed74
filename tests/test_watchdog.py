"""The watchdog on a clock of its own: what it reports, when it gives up, and when it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.config import SupervisionConfig
from gpuworker.errors import DeviceFault, WorkerFaulted
from gpuworker.reports import Activity
from gpuworker.testing import fake_worker
from gpuworker.watchdog import Watchdog, WorkerEnd, watch

PERIOD_S = 0.25
CONFIG = SupervisionConfig(step_limit_s=10.0, stall_grace_s=5.0)
REPORT = SupervisionConfig(step_limit_s=10.0, stall_grace_s=5.0, stall_action="report")


class FakeClock:
    """Time passes when somebody sleeps, and late() more than was asked for."""

    def __init__(self, late: Callable[[float], float] = lambda now: 0.0) -> None:
        self.time_s = 100.0
        self._late = late

    def now(self) -> float:
        return self.time_s

    async def sleep(self, delay_s: float) -> None:
        self.time_s += delay_s + self._late(self.time_s)
        await asyncio.sleep(0)


class FakeWorker:
    """Runs what its schedule says: name, begin and end of each activity."""

    def __init__(self, clock: FakeClock, *schedule: tuple[str, float, float]) -> None:
        self.fault: WorkerFaulted | None = None
        self.lags: list[float] = []
        self.given_up_at: float | None = None
        self._clock = clock
        self._schedule = schedule

    def activity(self) -> Activity | None:
        now = self._clock.now() - 100.0
        for name, begin, end in self._schedule:
            if begin <= now < end:
                return Activity("step", name, now - begin, 10.0)
        if now > 200.0:
            self.fault = WorkerFaulted("the test is over")
        return None

    def give_up(self, error: DeviceFault) -> None:
        self.given_up_at = self._clock.now() - 100.0
        self.fault = error

    def note_loop_lag(self, lag_s: float) -> None:
        self.lags.append(lag_s)


async def _run(
    *schedule: tuple[str, float, float],
    config: SupervisionConfig = CONFIG,
    late: Callable[[float], float] = lambda now: 0.0,
) -> tuple[WorkerEnd, FakeWorker, list[str]]:
    clock = FakeClock(late)
    worker = FakeWorker(clock, *schedule)
    stalls: list[Activity] = []
    watchdog = Watchdog(worker, config, on_stall=stalls.append, clock=clock, period_s=PERIOD_S)
    end = await watchdog.run()
    assert watchdog.loop_lag_s == worker.lags[-1]
    return end, worker, [stall.name for stall in stalls]


async def test_what_is_within_its_limit_is_left_alone() -> None:
    end, worker, stalls = await _run(("step 1", 0.0, 10.0), ("step 2", 10.0, 20.0))
    assert (end, worker.given_up_at, stalls) == (WorkerEnd.FAULTED, None, [])


async def test_a_stall_is_reported_once_and_given_up_after_the_grace(
    caplog: pytest.LogCaptureFixture,
) -> None:
    end, worker, stalls = await _run(("step 7", 0.0, 1000.0))
    assert (end, stalls) == (WorkerEnd.GIVEN_UP, ["step 7"])
    assert worker.given_up_at == pytest.approx(10.0 + PERIOD_S + 5.0)
    assert str(worker.fault).startswith("step 7 has run for 15.2 s; its limit is 10 s and 5 s")
    assert [record.message for record in caplog.records] == [
        "step 7 is stalled: it has run for 10.2 s, the limit is 10 s; given up in 5 s"
    ]


async def test_without_grace_it_is_given_up_at_the_first_look() -> None:
    config = SupervisionConfig(step_limit_s=10.0, stall_grace_s=0.0)
    end, worker, stalls = await _run(("step 7", 0.0, 1000.0), config=config)
    assert (end, stalls) == (WorkerEnd.GIVEN_UP, ["step 7"])
    assert worker.given_up_at == pytest.approx(10.0 + PERIOD_S)


async def test_report_only_never_gives_up() -> None:
    end, worker, stalls = await _run(("step 7", 0.0, 150.0), config=REPORT)
    assert (end, worker.given_up_at, stalls) == (WorkerEnd.FAULTED, None, ["step 7"])


async def test_what_goes_on_within_the_grace_is_forgiven_and_the_next_starts_anew(
    caplog: pytest.LogCaptureFixture,
) -> None:
    end, worker, stalls = await _run(("step 1", 0.0, 14.0), ("step 2", 14.0, 28.0))
    assert (end, worker.given_up_at, stalls) == (WorkerEnd.FAULTED, None, ["step 1", "step 2"])
    assert [record.message for record in caplog.records][1] == (
        "step 1 went on after more than 13.8 s"
    )


async def test_another_activity_of_the_same_name_is_not_the_same_stall(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # The loop is late at the change, so no look falls between the two.
    end, _, stalls = await _run(
        ("a device call", 0.0, 61.0),
        ("a device call", 61.0, 80.0),
        config=SupervisionConfig(step_limit_s=10.0, stall_grace_s=100.0),
        late=lambda now: 15.0 if now == 160.0 else 0.0,
    )
    assert (end, stalls) == (WorkerEnd.FAULTED, ["a device call", "a device call"])
    assert caplog.records[1].message == "a device call went on after more than 60.0 s"


async def test_time_in_which_the_process_was_stopped_is_no_grace() -> None:
    # It wakes up to find the step 601 s old: that is a report, not yet an end.
    end, worker, stalls = await _run(
        ("step 1", 0.0, 604.0), late=lambda now: 600.0 if now == 101.0 else 0.0
    )
    assert (end, worker.given_up_at, stalls) == (WorkerEnd.FAULTED, None, ["step 1"])


async def test_the_lag_of_the_event_loop_is_measured_and_passed_on() -> None:
    _, worker, _ = await _run(late=lambda now: 3.0 if now == 110.0 else 0.0)
    assert [lag for lag in worker.lags if lag] == [pytest.approx(3.0)]


async def test_a_worker_that_faults_by_itself_ends_the_watch() -> None:
    clock = FakeClock()
    worker = FakeWorker(clock)
    worker.fault = DeviceFault("gone")
    assert await Watchdog(worker, CONFIG, clock=clock).run() is WorkerEnd.FAULTED
    assert worker.lags == []


@given(
    durations=st.lists(st.floats(0.5, 25.0), min_size=1, max_size=6),
    grace_s=st.floats(0.0, 8.0),
)
def test_it_gives_up_exactly_what_exceeds_limit_and_grace(
    durations: list[float], grace_s: float
) -> None:
    config = SupervisionConfig(step_limit_s=10.0, stall_grace_s=grace_s)
    schedule: list[tuple[str, float, float]] = []
    now = 0.0
    for number, duration in enumerate(durations):
        schedule.append((f"step {number}", now, now + duration))
        now += duration
    end, worker, stalls = asyncio.run(_run(*schedule, config=config))
    # A look comes every PERIOD_S, so both ends of the grace are known that exactly.
    slack_s = 3 * PERIOD_S
    long = [s for s in schedule if s[2] - s[1] > 10.0 + grace_s + slack_s]
    short = [s for s in schedule if s[2] - s[1] < 10.0 + grace_s]
    if long:
        assert end is WorkerEnd.GIVEN_UP
        assert worker.given_up_at is not None
        assert worker.given_up_at <= long[0][1] + 10.0 + grace_s + slack_s
    if len(short) == len(schedule):
        assert end is WorkerEnd.FAULTED
    assert len(stalls) == len(set(stalls))
    assert not [s for s in schedule if s[0] in stalls and s[2] - s[1] < 10.0]


async def test_an_embedded_worker_is_watched_for_the_length_of_a_block() -> None:
    async with fake_worker() as worker:
        before = asyncio.all_tasks()
        async with watch(worker, worker.config.supervision) as watchdog:
            assert len(asyncio.all_tasks()) == len(before) + 1
            assert watchdog.stalled is None
        assert asyncio.all_tasks() == before
        async with watch(worker, worker.config.supervision):
            worker.give_up(DeviceFault("lost"))
