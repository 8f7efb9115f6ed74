"""Layer 1. From what torch raises to what a caller is told."""

from __future__ import annotations

import traceback
from types import TracebackType

import torch

from gpuworker.errors import DeviceFault, OutOfDeviceMemory, StepFailed, WorkerError

__all__ = ["typed_failures"]

_OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate", "cannot allocate")


class typed_failures:
    """Turn an exception of the enclosed computation into a WorkerError; undoes nothing.

    Lack of memory becomes OutOfDeviceMemory, a sticky device error DeviceFault, anything else
    StepFailed. A WorkerError passes.
    """

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, WorkerError) or not isinstance(error, Exception):
            return
        # The frames hold the activations of the pass that failed.
        traceback.clear_frames(trace)
        message = f"{self._what} failed: {type(error).__name__}: {error}"
        raise _class_of(error)(message) from error


def _class_of(error: Exception) -> type[WorkerError]:
    text = str(error).lower()
    if isinstance(error, MemoryError) or any(hint in text for hint in _OUT_OF_MEMORY):
        return OutOfDeviceMemory
    if isinstance(error, torch.AcceleratorError):
        return DeviceFault
    return StepFailed
