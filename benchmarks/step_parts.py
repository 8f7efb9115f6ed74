"""Where the wall time of a decode step goes: parts that do not overlap and add up to the step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from gpuworker.kernels.attention import PagedAttention
from gpuworker.kernels.linear import Linear
from gpuworker.kernels.norm import RmsNorm
from gpuworker.model import decoder
from gpuworker.model.decoder import Decoder
from gpuworker.model.rope import RopeTable
from gpuworker.runner import runner
from gpuworker.runner.runner import ModelRunner
from gpuworker.runner.sampler import Sampler

__all__ = ["BETWEEN", "StepClock", "clocked_steps"]

BETWEEN = "between steps: engine, event loop, device thread"
_HEAD = "head"
_STEP = "rest of the step: checks, commit, output"

# A part's time is its own: what a part called inside it takes is not counted twice.
_PARTS: tuple[tuple[object, str, str], ...] = (
    (runner, "plan_step", "step preparation"),
    (runner, "prepare_inputs", "step preparation"),
    (Decoder, "forward", "forward: residual adds, views, Python"),
    (Linear, "__call__", "matmuls of the layers"),
    (Decoder, "logits", _HEAD),
    (RmsNorm, "__call__", "norms"),
    (RopeTable, "rotation", "rope"),
    (decoder, "apply_rope", "rope"),
    (decoder, "write_kv", "KV write"),
    (PagedAttention, "attend", "attention"),
    (decoder, "gated_activation", "activation"),
    (Sampler, "sample", "sampler"),
)


class StepClock:
    """Charges every moment to the innermost part that runs, or to what is between steps."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, dict[str, float]]] = []
        """Rows and seconds by part, of each step after the first."""
        self._now: dict[str, float] = defaultdict(float)
        self._running: list[str] = []
        self._since: float | None = None

    def enter(self, part: str) -> None:
        """Begin a part inside the one that runs."""
        self._charge()
        # The head is a matmul too, and all of it is the head's.
        in_head = self._running[-1:] == [_HEAD]
        self._running.append(_HEAD if in_head else part)

    def leave(self) -> None:
        """End the part that began last."""
        self._charge()
        self._running.pop()

    def end_step(self, num_rows: int) -> None:
        """Close the books of a step; the time since the step before belongs to it."""
        if self._now[BETWEEN] > 0.0:
            self.steps.append((num_rows, dict(self._now)))
        self._now.clear()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self._now[self._running[-1] if self._running else BETWEEN] += now - self._since
        self._since = now

    def mean_by_part(self, num_rows: int, num_steps: int) -> dict[str, float]:
        """Return mean seconds by part, over the quieter half of the last num_steps steps.

        Only steps of num_rows rows count. What disturbs a machine makes steps longer, so the
        shorter half says more. The parts add up to the mean step.
        """
        whole = [parts for rows, parts in self.steps if rows == num_rows][-num_steps:]
        whole.sort(key=lambda parts: sum(parts.values()))
        quiet = whole[: max(len(whole) // 2, 1)]
        names = {name for parts in quiet for name in parts}
        return {name: sum(p.get(name, 0.0) for p in quiet) / len(quiet) for name in names}


@contextmanager
def clocked_steps() -> Iterator[StepClock]:
    """Time the parts of every step that runs inside; for a process with one worker."""
    clock = StepClock()
    execute = ModelRunner.execute

    def clocked_execute(self: ModelRunner, *args: Any) -> Any:
        clock.enter(_STEP)
        try:
            output = execute(self, *args)
        finally:
            clock.leave()
        clock.end_step(output.num_rows)
        return output

    with ExitStack() as patches:
        for owner, name, part in _PARTS:
            patches.enter_context(
                patch.object(owner, name, _clocked(clock, getattr(owner, name), part))
            )
        patches.enter_context(patch.object(ModelRunner, "execute", clocked_execute))
        yield clock


def _clocked(clock: StepClock, call: Callable[..., Any], part: str) -> Callable[..., Any]:
    def clocked(*args: Any, **keywords: Any) -> Any:
        clock.enter(part)
        try:
            return call(*args, **keywords)
        finally:
            clock.leave()

    return clocked
