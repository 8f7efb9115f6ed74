"""Calls of the device thread whose outcome comes later."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpuworker.device.thread import DeviceThread, Pending
from gpuworker.errors import DeviceFault


class Later(Pending[int]):
    """An outcome that the test brings about."""

    def __init__(self, value: int | Exception) -> None:
        self.value = value
        self.is_there = threading.Event()

    def result(self) -> int:
        assert self.is_there.wait(10)
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


async def _turns(number: int = 20) -> None:
    for _ in range(number):
        await asyncio.sleep(0.002)


async def test_the_thread_goes_on_while_an_outcome_is_pending() -> None:
    device = DeviceThread()
    device.start()
    first, second = Later(1), Later(2)
    started: list[int] = []

    def begin(later: Later) -> Later:
        started.append(later.value if isinstance(later.value, int) else -1)
        return later

    futures = [device.submit(begin, first), device.submit(begin, second)]
    await _turns()
    assert started == [1, 2]
    second.is_there.set()
    await _turns()
    assert not any(future.done() for future in futures)
    first.is_there.set()
    assert [await future for future in futures] == [1, 2]
    await device.stop()


async def test_what_is_done_at_once_settles_behind_what_is_pending() -> None:
    device = DeviceThread()
    device.start()
    later = Later(1)
    pending = device.submit(lambda: later)
    ordinary = device.submit(lambda: 2)
    failing = device.submit(lambda: 1 // 0)
    await _turns()
    assert not ordinary.done()
    assert not failing.done()
    assert device.busy_since is not None
    later.is_there.set()
    assert (await pending, await ordinary) == (1, 2)
    with pytest.raises(ZeroDivisionError):
        await failing
    await device.stop()
    assert device.busy_since is None


async def test_a_pending_failure_reaches_its_own_caller() -> None:
    device = DeviceThread()
    device.start()
    broken, whole = Later(ValueError("no")), Later(3)
    futures = [device.submit(lambda: broken), device.submit(lambda: whole)]
    whole.is_there.set()
    broken.is_there.set()
    with pytest.raises(ValueError, match="no"):
        await futures[0]
    assert await futures[1] == 3
    await device.stop()


async def test_drain_waits_for_pending_outcomes() -> None:
    device = DeviceThread()
    device.start()
    later = Later(1)
    device.submit(lambda: later)
    drained = asyncio.ensure_future(device.drain())
    await _turns()
    assert not drained.done()
    later.is_there.set()
    await asyncio.wait_for(drained, 5)
    await device.stop()


async def test_giving_up_the_thread_fails_what_is_pending() -> None:
    device = DeviceThread()
    device.start()
    later = Later(1)
    future = device.submit(lambda: later)
    await _turns()
    device.abandon(DeviceFault("stuck"))
    with pytest.raises(DeviceFault, match="stuck"):
        await future
    later.is_there.set()
