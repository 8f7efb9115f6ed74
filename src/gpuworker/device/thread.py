"""Layer 1. The only thread that touches the device; first in, first out."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import anyio

from gpuworker.errors import DeviceFault

__all__ = ["DeviceThread"]

T = TypeVar("T")
_Item = tuple[Callable[[], Any], asyncio.Future[Any]]


class DeviceThread:
    """Runs calls one after the other on a thread of its own.

    submit queues without waiting, so calls pipeline; run waits. Work that has started cannot
    be interrupted: run shields until the call returned, and a deadline is noticed between
    calls. start and every other method belong to the event loop's thread.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="device", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outstanding: deque[asyncio.Future[Any]] = deque()  # in the order of submission
        self._lost: DeviceFault | None = None
        self._busy_since: float | None = None

    @property
    def is_lost(self) -> bool:
        """Whether the thread was given up."""
        return self._lost is not None

    @property
    def busy_since(self) -> float | None:
        """When the running call began, on time.monotonic; None when none runs. Any thread."""
        return self._busy_since

    def start(self) -> None:
        """Bind to the running loop and start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue a call; the future settles on the loop, in order of submission."""
        assert self._loop is not None
        future: asyncio.Future[T] = self._loop.create_future()
        if self._lost is not None:
            future.set_exception(self._lost)
            return future
        self._outstanding.append(future)
        self._queue.put((lambda: call(*args), future))
        return future

    async def run(self, call: Callable[..., T], *args: Any) -> T:
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
        self._queue.put(None)
        if self._lost is None:
            self._thread.join()

    def abandon(self, error: DeviceFault) -> None:
        """Give a stuck thread up: calls that wait, the running one too, and later ones fail.

        Should the running call ever return, nothing that waits behind it is carried out.
        """
        if self._lost is not None:
            return
        self._lost = error
        while self._outstanding:
            future = self._outstanding.popleft()
            if not future.done():
                future.set_exception(error)

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            if self._lost is not None:
                continue
            call, future = item
            self._busy_since = time.monotonic()
            try:
                result = call()
            except BaseException as error:
                self._settle(future, None, error)
            else:
                self._settle(future, result, None)
            finally:
                self._busy_since = None
            del call, item

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
