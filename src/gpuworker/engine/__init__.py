"""Layer 5. The reference engine: a scheduler and generate, written against ask and submit.

It is the demo, the load of the benchmarks, and the example for those who write their own.
Tokenizer and StreamDecoder need the extra gpuworker[text] and are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuworker.engine.bring_up import BringUpStep, bring_up
from gpuworker.engine.engine import Engine, GenerationDelta
from gpuworker.engine.limits import SchedulerLimits, SchedulerStatistics
from gpuworker.engine.requests import Delta, FinishReason, GenerationRequest, TokenLogprobs
from gpuworker.engine.scheduler import Scheduler
from gpuworker.engine.worker import WorkerLike

if TYPE_CHECKING:
    from gpuworker.engine.text import StreamDecoder, Tokenizer

__all__ = [
    "BringUpStep",
    "Delta",
    "Engine",
    "FinishReason",
    "GenerationDelta",
    "GenerationRequest",
    "Scheduler",
    "SchedulerLimits",
    "SchedulerStatistics",
    "StreamDecoder",
    "TokenLogprobs",
    "Tokenizer",
    "WorkerLike",
    "bring_up",
]

_TEXT = {"StreamDecoder", "Tokenizer"}


def __getattr__(name: str) -> object:
    if name not in _TEXT:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpuworker.engine import text

    return getattr(text, name)
