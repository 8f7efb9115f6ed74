"""Layer 0. Every error that a caller can meet.

WorkerError                  answered by the worker
|-- ProtocolError            the sender is wrong; nothing changed
|   |-- MalformedMessage       bytes do not decode
|   |   |-- MessageTooLarge      more bytes or frames than a message may have
|   |   `-- UnsupportedVersion   another major version of the protocol
|   |-- UnknownMessage         no message of that name
|   |-- IllegalMessage         not accepted in this state; carries state and accepted
|   |-- InvalidRequest         well formed, but against the configuration or a limit
|   |-- StaleKVEpoch           the step believes in KV contents that no longer exist
|   |-- WeightsUndefined       the weights hold no model; load them first
|   `-- SessionError           the connection may not say this now
|       |-- NoSession            say hello first
|       |-- StaleEpoch           another scheduler has taken over
|       |-- Fenced               the epoch of a hello is not newer than the highest one seen
|       |-- OutOfOrder           a step number is missing before this one
|       |-- DuplicateExpired     an old step number whose answer is no longer kept
|       `-- RepliesLost          the connection did not read; clients raise ConnectionLost
|-- ConfigError              the configuration cannot work on this machine; nothing changed
|-- CheckpointError          the model directory is not usable; nothing changed
|   |-- CheckpointNotFound     directory, file or shard is not there
|   |-- CheckpointMismatch     files and configuration contradict each other
|   `-- UnsupportedModel       no decoder for this architecture or option
|-- Busy                     try again; nothing changed
|   `-- MailboxFull            too many messages wait
|-- DeadlineExceeded         its time was over before its turn came; nothing changed
|-- RequestCancelled         withdrawn before its turn came; nothing changed
|-- StepFailed               the forward pass raised; the step's effects are undone
|-- StepAborted              a step before it did not run; nothing changed, resume_steps goes on
|-- ResourceError            rolled back; other numbers may work
|   |-- OutOfDeviceMemory
|   |-- InsufficientKVMemory
|   `-- SpillFailed            host storage for sleeping weights cannot be written
|-- WorkerFaulted            this worker is finished; its state is FAULTED
|   |-- DeviceFault            sticky device error, or an undo that failed
|   `-- PeerLost               a collective or a pipeline exchange failed or timed out
`-- WorkerClosed             asked after Shutdown; also the answer to everything still queued
ClientError                  raised on the client side only
|-- RequestTimeout             outcome unknown
`-- ConnectionLost             outcome unknown

Three questions choose the branch: was it me, did anything change, can this worker go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

__all__ = [
    "Busy",
    "CheckpointError",
    "CheckpointMismatch",
    "CheckpointNotFound",
    "ClientError",
    "ConfigError",
    "ConnectionLost",
    "DeadlineExceeded",
    "DeviceFault",
    "DuplicateExpired",
    "Fenced",
    "IllegalMessage",
    "InsufficientKVMemory",
    "InvalidRequest",
    "MailboxFull",
    "MalformedMessage",
    "MessageTooLarge",
    "NoSession",
    "OutOfDeviceMemory",
    "OutOfOrder",
    "PeerLost",
    "ProtocolError",
    "RepliesLost",
    "RequestCancelled",
    "RequestTimeout",
    "ResourceError",
    "SessionError",
    "SpillFailed",
    "StaleEpoch",
    "StaleKVEpoch",
    "StepAborted",
    "StepFailed",
    "UnknownMessage",
    "UnsupportedModel",
    "UnsupportedVersion",
    "WeightsUndefined",
    "WorkerClosed",
    "WorkerError",
    "WorkerFaulted",
    "error_class",
]


class WorkerError(Exception):
    """Raised when the worker answers with a failure."""

    code: ClassVar[str] = "worker_error"
    retryable: ClassVar[bool] = False
    """Whether the same message may simply be sent again."""

    def __init__(self, message: str, *, state: str = "", accepted: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.state = state
        self.accepted = accepted


class ProtocolError(WorkerError):
    """Raised when the sender is wrong; nothing changed."""

    code = "protocol_error"


class MalformedMessage(ProtocolError):
    """Raised when bytes do not decode to a message."""

    code = "malformed_message"


class MessageTooLarge(MalformedMessage):
    """Raised when a message has more bytes or frames than the wire takes."""

    code = "message_too_large"


class UnsupportedVersion(MalformedMessage):
    """Raised when a message speaks another major version of the protocol."""

    code = "unsupported_version"


class UnknownMessage(ProtocolError):
    """Raised when a message has a tag that this worker does not know."""

    code = "unknown_message"


class IllegalMessage(ProtocolError):
    """Raised when the current state does not accept the message; names what it does accept."""

    code = "illegal_message"


class InvalidRequest(ProtocolError):
    """Raised when a well-formed message contradicts the configuration or a limit."""

    code = "invalid_request"


class StaleKVEpoch(ProtocolError):
    """Raised when a step relies on KV contents of an earlier epoch."""

    code = "stale_kv_epoch"


class WeightsUndefined(ProtocolError):
    """Raised when serving is asked for while the weights hold no model."""

    code = "weights_undefined"


class SessionError(ProtocolError):
    """Raised when a connection may not say this now; the worker did nothing."""

    code = "session_error"


class NoSession(SessionError):
    """Raised for a message that needs a session, before hello or after the lease has run out."""

    code = "no_session"


class StaleEpoch(SessionError):
    """Raised when the session belongs to the past: another scheduler has taken over."""

    code = "stale_epoch"


class Fenced(SessionError):
    """Raised when the epoch of a hello is not above the highest one that was ever seen."""

    code = "fenced"


class OutOfOrder(SessionError):
    """Raised when step numbers are missing before this one; it was not accepted."""

    code = "out_of_order"


class DuplicateExpired(SessionError):
    """Raised for a step number that was answered so long ago that the answer is gone."""

    code = "duplicate_expired"


class RepliesLost(SessionError):
    """Raised when replies to a connection were dropped because it did not read them."""

    code = "replies_lost"


class ConfigError(WorkerError):
    """Raised when the configuration cannot work on this machine."""

    code = "config_error"


class CheckpointError(WorkerError):
    """Raised when a model directory is not usable; nothing was allocated."""

    code = "checkpoint_error"


class CheckpointNotFound(CheckpointError):
    """Raised when a directory, a file or a shard named by the index is not there."""

    code = "checkpoint_not_found"


class CheckpointMismatch(CheckpointError):
    """Raised when the files contradict the configuration or each other."""

    code = "checkpoint_mismatch"


class UnsupportedModel(CheckpointError):
    """Raised when no decoder exists for the architecture or for one of its options."""

    code = "unsupported_model"


class Busy(WorkerError):
    """Raised when as much is under way as may be; nothing was accepted, try after a reply."""

    code = "busy"
    retryable = True


class MailboxFull(Busy):
    """Raised when too many messages wait; try again."""

    code = "mailbox_full"


class DeadlineExceeded(WorkerError):
    """Raised when the time of a message was over before its turn came; nothing was done."""

    code = "deadline_exceeded"


class RequestCancelled(WorkerError):
    """Raised when a message was withdrawn before its turn came; nothing was done."""

    code = "cancelled"


class StepFailed(WorkerError):
    """Raised when the forward pass of a step raised; requests are as before the step."""

    code = "step_failed"


class StepAborted(WorkerError):
    """Raised for a step behind one that did not run, until ResumeSteps; nothing was done."""

    code = "aborted"


class ResourceError(WorkerError):
    """Raised when a resource ran out; everything was rolled back."""

    code = "resource_error"


class OutOfDeviceMemory(ResourceError):
    """Raised when device memory cannot be allocated."""

    code = "out_of_device_memory"


class InsufficientKVMemory(ResourceError):
    """Raised when the requested KV cache exceeds what the profile left over."""

    code = "insufficient_kv_memory"


class SpillFailed(ResourceError):
    """Raised when the host copy of the weights cannot be written or read back."""

    code = "spill_failed"


class WorkerFaulted(WorkerError):
    """Raised when the worker cannot go on; only GetStatus and Shutdown are answered."""

    code = "worker_faulted"


class DeviceFault(WorkerFaulted):
    """Raised on a sticky device error, or when an undo failed and the device is unknown."""

    code = "device_fault"


class PeerLost(WorkerFaulted):
    """Raised when another rank stopped answering."""

    code = "peer_lost"


class WorkerClosed(WorkerError):
    """Raised for every message after Shutdown, and for those it found in the queue."""

    code = "worker_closed"


class ClientError(Exception):
    """Raised on the client side; the worker did not say this."""


class RequestTimeout(ClientError):
    """Raised when no reply came in time; whether the request took effect is unknown."""


class ConnectionLost(ClientError):
    """Raised when the worker went away; whether the request took effect is unknown."""


def _tree(root: type[WorkerError]) -> Iterator[type[WorkerError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_BY_CODE: dict[str, type[WorkerError]] = {cls.code: cls for cls in _tree(WorkerError)}


def error_class(code: str) -> type[WorkerError]:
    """Return the class of an error code; a code from a newer worker gives WorkerError."""
    return _BY_CODE.get(code, WorkerError)
