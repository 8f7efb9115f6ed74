"""Layer 0. Frames and messages; the only place that knows bytes.

A message travels as [header | body]; on the worker's socket ZeroMQ puts the sender's routing id
before them. The header is b"GW", one byte major version, and a msgpack array: what a scheduler
sends has [kind, corr, epoch, seq, budget_us], what a worker sends [kind, corr, epoch, seq,
boot_id]. The version can be read before anything is decoded. The body is one tagged msgpack
array of the message table. Every number of a header fits into a double, because some languages
have no other numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, Union

import msgspec

from gpuworker.errors import (
    InvalidRequest,
    MalformedMessage,
    MessageTooLarge,
    UnknownMessage,
    UnsupportedVersion,
    WorkerError,
    error_class,
)
from gpuworker.messages import REPLY_OF, REQUESTS, Failure, Reply, Request

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_BUDGET_US",
    "MAX_FRAMES",
    "MAX_HEADER_BYTES",
    "MAX_REASON",
    "VERSION",
    "Answer",
    "EventHeader",
    "Kind",
    "ReplyHeader",
    "RequestHeader",
    "check_frames",
    "decode_event_header",
    "decode_failure",
    "decode_reply",
    "decode_reply_header",
    "decode_request",
    "decode_request_header",
    "encode_body",
    "encode_request",
    "error_of",
    "event_header",
    "failure_of",
    "reply_header",
]

VERSION = 1
MAX_FRAMES = 8
"""More are refused as too large, fewer or more than two as malformed."""
MAX_HEADER_BYTES = 256
MAX_BODY_BYTES = 16 << 20
MAX_BUDGET_US = 600_000_000
MAX_REASON = 1000
"""Characters of an error's message."""
_MAGIC = b"GW"
_PREFIX = _MAGIC + bytes([VERSION])
_MAX_DETAIL = 200
_NUM_FRAMES = 2
_MAX_NUMBER = 2**53 - 1

Frames = Sequence[bytes]
Answer = tuple[bytes, bytes]
"""Header and body."""


class Kind(enum.IntEnum):
    """What a body is; later versions may add kinds, never change these."""

    REQUEST = 1
    REPLY = 2
    EVENT = 3


_Number = Annotated[int, msgspec.Meta(ge=0, le=_MAX_NUMBER)]


class RequestHeader(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """What goes before the body of a request."""

    kind: Annotated[int, msgspec.Meta(ge=0, le=255)]
    corr: Annotated[int, msgspec.Meta(ge=1, le=_MAX_NUMBER)]
    """The sender's number for it; the reply carries it back."""
    epoch: _Number = 0
    """Of the sender's session; 0 without one."""
    seq: _Number = 0
    """From 1 on and without gaps for steps, 0 for everything else."""
    budget_us: Annotated[int, msgspec.Meta(ge=0, le=MAX_BUDGET_US)] = 0
    """How long after its receipt it may still start; 0, for ever."""


class ReplyHeader(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """What goes before the body of a reply."""

    kind: Annotated[int, msgspec.Meta(ge=0, le=255)]
    corr: _Number
    """That of the request; 0 with a failure that concerns the connection as a whole."""
    epoch: _Number
    """Of the worker's present session."""
    seq: _Number
    """That of the step when it was accepted; 0 when it was not, so that its number is free."""
    boot_id: Annotated[str, msgspec.Meta(max_length=32)]
    """New with every start of the worker."""


class EventHeader(
    msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True
):
    """What goes before the body of an event."""

    kind: Annotated[int, msgspec.Meta(ge=0, le=255)]
    seq: _Number
    """Of the topic, from 1 on and without gaps; in a snapshot that of the last event, or 0."""
    is_snapshot: bool
    """Whether it says how things are for one who has just subscribed."""
    boot_id: Annotated[str, msgspec.Meta(max_length=32)]


_encoder = msgspec.msgpack.Encoder()
_request_header_decoder = msgspec.msgpack.Decoder(RequestHeader)
_reply_header_decoder = msgspec.msgpack.Decoder(ReplyHeader)
_event_header_decoder = msgspec.msgpack.Decoder(EventHeader)
_TAGS = frozenset(request.__struct_config__.tag for request in REQUESTS)
_tag_decoder = msgspec.msgpack.Decoder(list[msgspec.Raw])
_request_decoder: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(
    Union[REQUESTS]  # noqa: UP007  # a tuple of types cannot be joined with |
)
_failure_decoder = msgspec.msgpack.Decoder(Failure)
_reply_decoders: dict[type[Request[Any]], msgspec.msgpack.Decoder[Reply]] = {
    request: msgspec.msgpack.Decoder(Union[reply, Failure])  # noqa: UP007
    for request, reply in REPLY_OF.items()
}


def encode_request(header: RequestHeader, request: Request[Any]) -> list[bytes]:
    """Encode a request; raises MalformedMessage when it has no place on the wire."""
    return [_frame(header), encode_body(request)]


def encode_body(message: msgspec.Struct) -> bytes:
    """Encode a message without a header; raises MalformedMessage as above."""
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise MessageTooLarge(
            f"{type(message).__name__} has {len(body)} bytes, the limit is {MAX_BODY_BYTES}; send "
            "less at a time"
        )
    return body


def reply_header(header: ReplyHeader) -> bytes:
    """Encode the header of a reply."""
    return _frame(header)


def event_header(header: EventHeader) -> bytes:
    """Encode the header of an event."""
    return _frame(header)


def decode_event_header(frame: bytes) -> EventHeader:
    """Return the header of an event; raises MalformedMessage for anything else."""
    _check_magic(frame)
    try:
        decoded = _event_header_decoder.decode(memoryview(frame)[len(_PREFIX) :])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"header: {_reason(error)}") from error
    if decoded.kind != Kind.EVENT:
        raise MalformedMessage(f"kind {decoded.kind} is not expected here, 3 is")
    return decoded


def decode_request_header(frames: Frames) -> RequestHeader:
    """Return the header of a request.

    Raises UnsupportedVersion for another major version, MalformedMessage for a first frame
    that is no header; nobody can be answered then but by corr 0. Sizes are checked before a
    byte is decoded. The number of frames is checked by check_frames.
    """
    header = frames[0] if frames else b""
    _check_magic(header)
    try:
        decoded = _request_header_decoder.decode(memoryview(header)[len(_MAGIC) + 1 :])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"header: {_reason(error)}") from error
    if decoded.kind != Kind.REQUEST:
        raise MalformedMessage(f"kind {decoded.kind} is not expected here, 1 is")
    return decoded


def decode_reply_header(frames: Frames) -> ReplyHeader:
    """Return the header of a reply; raises MalformedMessage for anything else."""
    check_frames(frames)
    _check_magic(frames[0])
    try:
        decoded = _reply_header_decoder.decode(memoryview(frames[0])[len(_MAGIC) + 1 :])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"header: {_reason(error)}") from error
    if decoded.kind != Kind.REPLY:
        raise MalformedMessage(f"kind {decoded.kind} is not expected here, 2 is")
    return decoded


def check_frames(frames: Frames) -> None:
    """Raise MessageTooLarge or MalformedMessage unless there are two frames of a fair size."""
    if len(frames) > MAX_FRAMES or sum(map(len, frames)) > MAX_BODY_BYTES + MAX_HEADER_BYTES:
        raise MessageTooLarge(
            f"{len(frames)} frames with {sum(map(len, frames))} bytes; the limits are "
            f"{_NUM_FRAMES} frames and {MAX_BODY_BYTES} bytes of body"
        )
    if len(frames) != _NUM_FRAMES:
        raise MalformedMessage(f"a message has {_NUM_FRAMES} frames, this one has {len(frames)}")


def decode_request(frames: Frames) -> Request[Any]:
    """Decode the body of a request by the table.

    Raises MessageTooLarge and MalformedMessage for bytes that are no message, UnknownMessage
    for a tag that is not in the table, and InvalidRequest for a value that is out of place.
    """
    check_frames(frames)
    body = frames[1]
    try:
        return _request_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _refusal(body, error) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(_reason(error)) from error


def _refusal(body: bytes, error: msgspec.ValidationError) -> WorkerError:
    """Tell a tag that is not known from a value that is wrong."""
    try:
        first = _tag_decoder.decode(body)[0]
        tag = msgspec.msgpack.decode(first, type=str)
    except (msgspec.DecodeError, RecursionError, IndexError):
        return MalformedMessage(f"a message is an array that begins with its tag: {_reason(error)}")
    if tag not in _TAGS:
        return UnknownMessage(f"there is no message {tag[:64]!r}; the version is {VERSION}")
    return InvalidRequest(f"{tag}: {_reason(error)}")


def decode_reply(request: type[Request[Any]], body: bytes) -> Reply:
    """Decode the reply to a request, or a Failure; raises MalformedMessage."""
    try:
        return _reply_decoders[request].decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"reply: {_reason(error)}") from error


def decode_failure(body: bytes) -> Failure:
    """Decode what travels under corr 0: it answers no request; raises MalformedMessage."""
    try:
        return _failure_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"failure: {_reason(error)}") from error


def failure_of(error: WorkerError) -> Failure:
    """Turn an error into what travels; error_of turns it back."""
    # A path in a message may hold bytes that are no text; the wire has text only.
    message = error.message.encode("utf-8", "backslashreplace").decode()
    return Failure(
        code=error.code,
        message=message[:MAX_REASON],
        state=error.state,
        accepted=error.accepted,
        retryable=error.retryable,
    )


def error_of(failure: Failure) -> WorkerError:
    """Turn a failure into the exception of its code."""
    return error_class(failure.code)(
        failure.message, state=failure.state, accepted=failure.accepted
    )


def _frame(header: RequestHeader | ReplyHeader | EventHeader) -> bytes:
    return _PREFIX + _encoder.encode(header)


def _check_magic(header: bytes) -> None:
    if len(header) > MAX_HEADER_BYTES:
        raise MalformedMessage(
            f"a header has at most {MAX_HEADER_BYTES} bytes, this one {len(header)}"
        )
    if len(header) <= len(_PREFIX) or header[: len(_MAGIC)] != _MAGIC:
        raise MalformedMessage("the header does not begin with GW and a version")
    if header[len(_MAGIC)] != VERSION:
        raise UnsupportedVersion(
            f"version {header[len(_MAGIC)]} is not spoken here; versions {VERSION} to {VERSION} are"
        )


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_DETAIL]
