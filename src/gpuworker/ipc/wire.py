"""Layer 0. Frames and messages; the only place that knows bytes.

A request travels as [header | body], a reply likewise; on the worker's socket ZeroMQ puts the
sender's routing id before them. The header is b"GW", one byte major version, and a msgpack array
[kind, corr]; the version can be read before anything is decoded. The body is one tagged msgpack
array of the message table. corr is the sender's number for a request; its reply carries it back.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Annotated, Any, Union

import msgspec

from gpuworker.errors import MalformedMessage, WorkerError, error_class
from gpuworker.messages import REPLY_OF, REQUESTS, Failure, Reply, Request

__all__ = [
    "MAX_BODY_BYTES",
    "MAX_HEADER_BYTES",
    "VERSION",
    "Kind",
    "decode_header",
    "decode_reply",
    "decode_request",
    "encode_reply",
    "encode_request",
    "error_of",
    "failure_of",
]

VERSION = 1
MAX_HEADER_BYTES = 256
MAX_BODY_BYTES = 16 << 20
_MAGIC = b"GW"
_NUM_FRAMES = 2
_MAX_REASON = 200

Frames = Sequence[bytes]


class Kind(enum.IntEnum):
    """What a body is; sessions and events will add kinds, never change these."""

    REQUEST = 1
    REPLY = 2


class _Header(msgspec.Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    kind: Annotated[int, msgspec.Meta(ge=0, le=255)]
    corr: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


_encoder = msgspec.msgpack.Encoder()
_header_decoder = msgspec.msgpack.Decoder(_Header)
_request_decoder: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(
    Union[REQUESTS]  # noqa: UP007  # a tuple of types cannot be joined with |
)
_reply_decoders: dict[type[Request[Any]], msgspec.msgpack.Decoder[Reply]] = {
    request: msgspec.msgpack.Decoder(Union[reply, Failure])  # noqa: UP007
    for request, reply in REPLY_OF.items()
}


def encode_request(corr: int, request: Request[Any]) -> list[bytes]:
    """Encode a request; raises MalformedMessage when it has no place on the wire."""
    return _encode(Kind.REQUEST, corr, request)


def encode_reply(corr: int, reply: Reply) -> list[bytes]:
    """Encode a reply; raises MalformedMessage when it is larger than the wire takes."""
    return _encode(Kind.REPLY, corr, reply)


def _encode(kind: Kind, corr: int, message: msgspec.Struct) -> list[bytes]:
    try:
        body = _encoder.encode(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessage(f"{type(message).__name__} cannot be encoded: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise MalformedMessage(
            f"{type(message).__name__} has {len(body)} bytes, the limit is {MAX_BODY_BYTES}; send "
            "less at a time"
        )
    return [_header(kind, corr), body]


def decode_header(frames: Frames, kind: Kind) -> int:
    """Return corr; raises MalformedMessage for anything but two frames of our version and kind.

    Sizes are checked before a byte is decoded.
    """
    if len(frames) != _NUM_FRAMES:
        raise MalformedMessage(f"a message has {_NUM_FRAMES} frames, this one has {len(frames)}")
    header, body = frames
    if len(header) > MAX_HEADER_BYTES or len(body) > MAX_BODY_BYTES:
        raise MalformedMessage(
            f"header of {len(header)} and body of {len(body)} bytes; the limits are "
            f"{MAX_HEADER_BYTES} and {MAX_BODY_BYTES}"
        )
    start = len(_MAGIC) + 1
    if len(header) <= start or header[: len(_MAGIC)] != _MAGIC:
        raise MalformedMessage("the header does not begin with GW and a version")
    if header[len(_MAGIC)] != VERSION:
        raise MalformedMessage(f"version {header[len(_MAGIC)]} is not spoken here; use {VERSION}")
    try:
        decoded = _header_decoder.decode(memoryview(header)[start:])
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"header: {_reason(error)}") from error
    if decoded.kind != kind:
        raise MalformedMessage(f"kind {decoded.kind} is not expected here, {kind.value} is")
    return decoded.corr


def decode_request(body: bytes) -> Request[Any]:
    """Decode a body by the table of requests; raises MalformedMessage with path and reason."""
    try:
        return _request_decoder.decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(_reason(error)) from error


def decode_reply(request: type[Request[Any]], body: bytes) -> Reply:
    """Decode the reply to a request, or a Failure; raises MalformedMessage."""
    try:
        return _reply_decoders[request].decode(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedMessage(f"reply: {_reason(error)}") from error


def failure_of(error: WorkerError) -> Failure:
    """Turn an error into what travels; error_of turns it back."""
    # A path in a message may hold bytes that are no text; the wire has text only.
    message = error.message.encode("utf-8", "backslashreplace").decode()
    return Failure(code=error.code, message=message, state=error.state, accepted=error.accepted)


def error_of(failure: Failure) -> WorkerError:
    """Turn a failure into the exception of its code."""
    return error_class(failure.code)(
        failure.message, state=failure.state, accepted=failure.accepted
    )


def _header(kind: Kind, corr: int) -> bytes:
    return _MAGIC + bytes([VERSION]) + _encoder.encode(_Header(kind, corr))


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:_MAX_REASON]
