"""Layer 1. The only thread that touches the device; first in, first out."""

from __future__ import annotations

import asyncio
import os
import queue
import select
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import anyio

from gpuworker.errors import DeviceFault

__all__ = ["DeviceThread", "Lane", "Pending"]

_SPIN_S = 200e-6
"""How long the thread looks at a lane before it sleeps; longer costs idle time, shorter latency."""
_PARK_MS = 1000

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
_Item = tuple[Callable[[], Any], asyncio.Future[Any]]


class Pending(ABC, Generic[T_co]):
    """What a call returns that has only begun something: its outcome comes later."""

    @abstractmethod
    def result(self) -> T_co:
        """Wait for the outcome and return it, or raise. Any thread, any number of times."""


class _Outcome(NamedTuple):
    """What a future is waiting for: a value that may still be pending, or an error."""

    future: asyncio.Future[Any]
    value: Any
    error: BaseException | None
    since: float


class Lane(Protocol):
    """Something that the device thread looks at when its queue is empty."""

    @property
    def is_over(self) -> bool:
        """Whether it need not be looked at any more."""

    @property
    def descriptor(self) -> int:
        """What becomes readable when there is something to take."""

    def take(self) -> bool:
        """Do one piece of work, if there is one, and say whether there was."""

    def is_empty(self) -> bool:
        """Say whether there is nothing to take, having read the descriptor out."""

    def end(self) -> None:
        """Let nothing more be taken. Any thread."""

    def close(self) -> None:
        """Let go of it. Idempotent."""


class DeviceThread:
    """Runs calls one after the other on a thread of its own.

    submit queues without waiting, so calls pipeline; run waits. Work that has started cannot
    be interrupted: run shields until the call returned, and a deadline is noticed between
    calls. start and every other method belong to the event loop's thread.

    A call that returns a Pending has begun work that goes on without the thread: the next call
    starts at once, while a second thread waits for the outcome. Futures settle in the order of
    submission all the same, so what waits for a call waits for the pending ones before it.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outstanding: deque[asyncio.Future[Any]] = deque()  # in the order of submission
        self._lost: DeviceFault | None = None
        self._busy_since: float | None = None
        self._outcomes: deque[_Outcome] = deque()  # begun before, not settled yet
        self._has_outcome = threading.Semaphore(0)
        self._finisher = threading.Thread(target=self._finish, name="finisher", daemon=True)
        self._lane: Lane | None = None  # of the device thread
        self._bell: int | None = None  # wakes it beside a lane

    @property
    def is_lost(self) -> bool:
        """Whether the thread was given up."""
        return self._lost is not None

    @property
    def busy_since(self) -> float | None:
        """When the oldest call that goes on began, on time.monotonic; None without. Any thread."""
        with suppress(IndexError):
            return self._outcomes[0].since
        return self._busy_since

    def start(self) -> None:
        """Bind to the running loop and start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._finisher.start()

    def submit(self, call: Callable[..., T | Pending[T]], *args: Any) -> asyncio.Future[T]:
        """Queue a call; the future settles on the loop, in order of submission."""
        assert self._loop is not None
        future: asyncio.Future[T] = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(self._lost)
            return future
        self._outstanding.append(future)
        self._put((lambda: call(*args), future))
        return future

    def attach(self, lane: Lane) -> None:
        """Look at a lane too from now on, in place of any other, until it is over."""
        if self._bell is None:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.submit(self._look_at, lane)

    async def run(self, call: Callable[..., T | Pending[T]], *args: Any) -> T:
        """Run a call and wait for it, even while being cancelled."""
        future = self.submit(call, *args)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    async def drain(self) -> None:
        """Wait until everything submitted before has finished, or was given up."""
        if self._lost is None:
            await self.run(int)

    async def stop(self) -> None:
        """Finish what was submitted and end the thread; one that was given up is left alone."""
        with anyio.CancelScope(shield=True), suppress(DeviceFault):
            await self.drain()
        self._put(None)
        if self._lost is None:
            self._thread.join()
            self._finisher.join()
            self._look_at(None)
            if self._bell is not None:
                os.close(self._bell)
                self._bell = None

    def abandon(self, error: DeviceFault) -> None:
        """Give a stuck thread up: calls that wait, the running one too, and later ones fail.

        Should the running call ever return, nothing that waits behind it is carried out.
        """
        if self._lost is not None:
            return
        self._lost = error
        if self._lane is not None:  # whoever waits there hears the end of it
            self._lane.end()
            self._lane.close()
        while self._outstanding:
            future = self._outstanding.popleft()
            if not future.done():
                future.set_exception(error)

    def _put(self, item: _Item | None) -> None:
        self._queue.put(item)
        if self._bell is not None:
            os.eventfd_write(self._bell, 1)

    def _look_at(self, lane: Lane | None) -> None:
        if self._lane is not None:
            self._lane.close()
        self._lane = lane

    def _next(self) -> _Item | None:
        """Return what was submitted next; until then work off the lane."""
        while (lane := self._lane) is not None and self._queue.empty():
            if lane.is_over:
                self._look_at(None)
            elif not self._work_off(lane):
                self._park(lane)
        return self._queue.get()

    def _work_off(self, lane: Lane) -> bool:
        """Take what comes within a short time of the last; False when nothing has come."""
        poller = select.poll()
        until = time.perf_counter() + _SPIN_S
        while not lane.take():
            if time.perf_counter() > until or lane.is_over or not self._queue.empty():
                return False
            poller.poll(0)  # lets the other threads run
        return True

    def _park(self, lane: Lane) -> None:
        """Sleep until something is submitted or comes on the lane."""
        assert self._bell is not None
        with suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        if not lane.is_empty() or not self._queue.empty() or lane.is_over:
            return
        poller = select.poll()
        poller.register(self._bell, select.POLLIN)
        poller.register(lane.descriptor, select.POLLIN)
        poller.poll(_PARK_MS)

    def _serve(self) -> None:
        while (item := self._next()) is not None:
            if self._lost is not None:
                continue
            call, future = item
            since = self._busy_since = time.monotonic()
            try:
                result = call()
            except BaseException as error:
                self._conclude(_Outcome(future, None, error, since))
            else:
                self._conclude(_Outcome(future, result, None, since))
                del result
            finally:
                self._busy_since = None
            del call, item, future
        self._has_outcome.release()  # nothing follows: the finisher ends, too

    def _conclude(self, outcome: _Outcome) -> None:
        """Settle a future at once, or behind those that are still pending."""
        if self._outcomes or isinstance(outcome.value, Pending):
            self._outcomes.append(outcome)
            self._has_outcome.release()
        else:
            self._settle(outcome.future, outcome.value, outcome.error)

    def _finish(self) -> None:
        """Settle what could not be settled at once, in order."""
        while True:
            self._has_outcome.acquire()
            if not self._outcomes:
                return
            future, value, error, _ = self._outcomes[0]
            if isinstance(value, Pending):
                try:
                    value = value.result()
                except BaseException as failure:
                    value, error = None, failure
            self._settle(future, value, error)
            # Only now: a later outcome that finds nothing before it settles at once.
            self._outcomes.popleft()
            del future, value, error

    def _settle(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        assert self._loop is not None

        def settle() -> None:
            if self._outstanding and self._outstanding[0] is future:  # else given up by now
                self._outstanding.popleft()
            # The waiter may be gone: an abandoned step is not an error.
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        if self._lost is None:  # else its future has failed, and the loop may be gone
            self._loop.call_soon_threadsafe(settle)
