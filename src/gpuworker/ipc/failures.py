"""Layer 0. Every code of a failure, and what it says about the number of the step it answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from gpuworker import errors as e

__all__ = ["NumberOfStep", "error_classes", "number_of_step"]

NumberOfStep = Literal["free", "used", "gone", "see seq", ""]
"""free: to be used again; used: the next one is due; gone: used long ago, although the header of
the reply has 0; see seq: the header decides; "": no step is ever answered with it."""

_FREE: frozenset[type[e.WorkerError]] = frozenset(
    {
        e.UnsupportedVersion,
        e.UnknownMessage,
        e.NoSession,
        e.OutOfOrder,
        e.Busy,
        e.MailboxFull,
    }
)
_USED: frozenset[type[e.WorkerError]] = frozenset(
    {
        e.IllegalMessage,
        e.StaleKVEpoch,
        e.WeightsUndefined,
        e.DeadlineExceeded,
        e.RequestCancelled,
        e.StepFailed,
        e.StepAborted,
        e.OutOfDeviceMemory,
        e.WorkerFaulted,
        e.DeviceFault,
        e.PeerLost,
    }
)
_EITHER: frozenset[type[e.WorkerError]] = frozenset(
    {
        e.WorkerError,
        e.MalformedMessage,  # also of a step's answer that cannot be sent
        e.MessageTooLarge,
        e.InvalidRequest,
        e.StaleEpoch,
        e.WorkerClosed,
    }
)


def error_classes(root: type[e.WorkerError] = e.WorkerError) -> Iterator[type[e.WorkerError]]:
    """Yield the classes whose codes travel, each before those that derive from it."""
    yield root
    for child in root.__subclasses__():
        if child.__module__ == e.__name__:  # what others derive does not travel under its name
            yield from error_classes(child)


def number_of_step(error: type[e.WorkerError]) -> NumberOfStep:
    """Say whether a step that is answered with this error has used its number up."""
    if error in _FREE:
        return "free"
    if error in _USED:
        return "used"
    if error is e.DuplicateExpired:
        return "gone"
    return "see seq" if error in _EITHER else ""
