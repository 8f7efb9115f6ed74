"""A mailbox around the fake device: steps pipeline in order, moves come after them."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, cast

from engine.fake_device import FakeDevice
from gpuworker import messages as m
from gpuworker.errors import IllegalMessage, MailboxFull, WorkerClosed


class FakeWorker:
    """A mailbox around FakeDevice: steps pipeline in order, moves come after the steps ahead."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.state = "serving"
        self.held = False
        self.max_in_flight = 0
        self.num_moves_met_steps = 0
        self.mailbox_limit = 64
        self.crash: Exception | None = None
        self._steps: deque[tuple[m.ExecuteModel, asyncio.Future[m.StepOutput]]] = deque()

    def submit(self, request: m.Request[m.ReplyT]) -> asyncio.Future[m.ReplyT]:
        assert isinstance(request, m.ExecuteModel)
        if len(self._steps) >= self.mailbox_limit:
            raise MailboxFull("too many messages wait")
        future: asyncio.Future[m.StepOutput] = asyncio.get_running_loop().create_future()
        self._steps.append((request, future))
        self.max_in_flight = max(self.max_in_flight, len(self._steps))
        if not self.held:
            self._soon()
        return cast("asyncio.Future[m.ReplyT]", future)

    def release(self) -> None:
        """Let the held steps run, and those to come."""
        self.held = False
        self._soon()

    async def ask(self, request: m.Request[m.ReplyT]) -> m.ReplyT:
        await asyncio.sleep(0)
        if self.state == "closed":
            raise WorkerClosed("the worker is closed")
        if isinstance(request, m.GetStatus):
            return cast("m.ReplyT", self._status())
        if isinstance(request, m.GetHealth):
            return cast("m.ReplyT", self._health())
        if isinstance(request, m.ResumeSteps):
            assert request.step_id == self.device.aborted_after
            assert not self._steps
            self.device.aborted_after = None
            return cast("m.ReplyT", m.StepsResumed(next_step_id=0))
        if isinstance(request, m.ExecuteModel):
            return cast("m.ReplyT", await self.submit(request))
        if isinstance(request, m.GetLimits):  # no move, but behind the steps all the same
            if self._steps:
                await asyncio.wait([self._steps[-1][1]])
            return cast("m.ReplyT", self.device.current_limits())
        self.num_moves_met_steps += bool(self._steps)
        if self._steps:
            await asyncio.wait([self._steps[-1][1]])
        return cast("m.ReplyT", self._move(request))

    def _move(self, request: m.Request[Any]) -> m.Reply:
        if isinstance(request, m.Sleep):
            self.state = "sleeping"
            epoch = self.device.new_epoch()
            return m.Asleep(level=request.level, freed_bytes=1, spilled_bytes=0, kv_epoch=epoch,
                            sleep_s=0.0)  # fmt: skip
        if isinstance(request, m.ReloadWeights):
            epoch = self.device.new_epoch()
            return m.WeightsReloaded(weight_bytes=1, weight_version=2, kv_epoch=epoch, load_s=0.0)
        if isinstance(request, m.WakeUp) and self.state == "sleeping":
            self.state = "serving"
            return m.Awake(resumed=(), kv_epoch=self.device.epoch, wake_s=0.0)
        raise IllegalMessage(f"{type(request).__name__} in {self.state}", state=self.state)

    def _soon(self) -> None:
        # Three turns of the loop: enough for a driver to send the step behind.
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(lambda: loop.call_soon(self._run_next)))

    def _run_next(self) -> None:
        if self.held or not self._steps:
            return
        step, future = self._steps.popleft()
        try:
            if self.crash is not None:
                raise self.crash
            if self.state != "serving":
                raise IllegalMessage(f"execute_model in {self.state}", state=self.state)
            output = self.device.execute(step)
        except Exception as error:
            if not future.done():
                future.set_exception(error)
        else:
            if not future.done():
                future.set_result(output)
        if self._steps:
            self._soon()

    def _health(self) -> m.HealthReport:
        return m.HealthReport(
            health="ok",
            ready=self.state == "serving",
            state=self.state,
            weights="defined",
            asleep=(),
            num_steps=len(self.device.log),
            running_step_id=None,
            running_step_s=0.0,
            moving="",
            moving_s=0.0,
            limit_s=0.0,
            aborted_after=self.device.aborted_after,
            last_step_s=None,
            last_error="",
            fault="",
            loop_lag_s=0.0,
            uptime_s=0.0,
        )

    def _status(self) -> m.Status:
        return m.Status(
            state=self.state,
            health="ok",
            weights="defined",
            asleep=(),
            memory=(),
            process_bytes=0,
            kv_epoch=self.device.epoch,
            weight_version=1,
            num_requests=len(self.device.slots),
            num_queued=len(self._steps),
            num_steps=len(self.device.log),
            running_step_id=None,
            running_step_s=0.0,
            moving="",
            moving_s=0.0,
            last_step_s=None,
            last_error="",
        )
