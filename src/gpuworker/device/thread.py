"""Layer 1. The only thread that touches the device; first in, first out."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import anyio

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

    def start(self) -> None:
        """Bind to the running loop and start the thread."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def submit(self, call: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        """Queue a call; the future settles on the loop, in order of submission."""
        assert self._loop is not None
        future: asyncio.Future[T] = self._loop.create_future()
        self._queue.put((lambda: call(*args), future))
        return future

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """Run a call and wait for it, even while being cancelled."""
        future = self.submit(call, *args)
        with anyio.CancelScope(shield=True):
            await asyncio.wait([future])
        return future.result()

    async def drain(self) -> None:
        """Wait until everything submitted before has finished."""
        await self.run(int)

    async def stop(self) -> None:
        """Finish what was submitted and end the thread."""
        with anyio.CancelScope(shield=True):
            await self.drain()
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            call, future = item
            try:
                result = call()
            except BaseException as error:
                self._settle(future, None, error)
            else:
                self._settle(future, result, None)
            del call, item

    def _settle(
        self, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        assert self._loop is not None

        def settle() -> None:
            # The waiter may be gone: an abandoned step is not an error.
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._loop.call_soon_threadsafe(settle)
