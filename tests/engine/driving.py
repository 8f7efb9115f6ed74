"""Drive a scheduler against the fake device without an event loop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from engine.fake_device import FakeDevice
from gpuworker.engine import Delta, GenerationRequest, Scheduler, SchedulerLimits
from gpuworker.errors import WorkerError
from gpuworker.messages import ExecuteModel


class Run:
    """A scheduler, a device, and what came out: steps run one after the other, depth ahead."""

    def __init__(self, device: FakeDevice, depth: int = 2) -> None:
        self.device = device
        limits = device.current_limits()
        self.scheduler = Scheduler(
            SchedulerLimits.from_worker(limits, depth=depth),
            kv_epoch=limits.kv_epoch,
            first_step_id=limits.next_step_id,
        )
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, Delta] = {}
        self.flights: deque[ExecuteModel] = deque()

    def add(self, name: str, prompt: Iterable[int], max_tokens: int = 4, **options: object) -> None:
        self.scheduler.add(
            GenerationRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                max_tokens=max_tokens,
                **options,  # type: ignore[arg-type]
            )
        )
        self.tokens[name] = []
        self.ends.pop(name, None)

    def send(self) -> None:
        if not self.flights:
            self.device.aborted_after = None  # as a driver does with resume_steps
        while (step := self.scheduler.schedule()) is not None:
            self.flights.append(step)

    def land(self) -> None:
        step = self.flights.popleft()
        try:
            output = self.device.execute(step)
        except WorkerError as error:
            self.take(self.scheduler.withdraw(step, error))
        else:
            self.take(self.scheduler.complete(step, output))

    def take(self, deltas: Iterable[Delta]) -> None:
        for delta in deltas:
            assert delta.request_id not in self.ends, f"{delta} after the end"
            self.tokens[delta.request_id].extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.ends[delta.request_id] = delta

    def until_idle(self, between: Callable[[int], None] | None = None) -> None:
        """Send and land until nothing is left to do; between runs before every round."""
        for rounds in range(20_000):
            if between is not None:
                between(rounds)
            self.send()
            if not self.flights:
                assert self.scheduler.num_live == 0, "no progress"
                return
            self.land()
        raise AssertionError("does not end")

    def reason(self, name: str) -> str | None:
        return self.ends[name].finish_reason
