"""Layer 0. The protocol as bytes: every message and failure once, and what must be refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from gpuworker.errors import (
    IllegalMessage,
    MalformedMessage,
    RepliesLost,
    UnsupportedVersion,
    WorkerError,
)
from gpuworker.events import TOPIC_OF, encode_event
from gpuworker.ipc.examples import (
    EVENT_EXAMPLES,
    FAILURE_EXAMPLE,
    REPLY_EXAMPLES,
    REQUEST_EXAMPLES,
)
from gpuworker.ipc.failures import error_classes, number_of_step
from gpuworker.ipc.wire import (
    EventHeader,
    Kind,
    ReplyHeader,
    RequestHeader,
    decode_request,
    decode_request_header,
    encode_body,
    encode_request,
    event_header,
    failure_of,
    reply_header,
)
from gpuworker.messages import ExecuteModel, Hello, StepOutput, message_tag
from gpuworker.step import pack_step

__all__ = ["protocol_vectors"]

_BOOT_ID = "00d1ce5eed5eed00"
_EPOCH = 7
_SEQ = 3


def protocol_vectors() -> dict[str, Any]:
    """Return the examples: frames as hexadecimal text, and what they mean.

    Binary fields appear as {"bin": hexadecimal}. What is short leaves out trailing defaults,
    and means the same as its full header and body.
    """
    return {
        "version": 1,
        "requests": list(_requests()),
        "short": list(_short()),
        "replies": list(_replies()),
        "failures": list(_failures()),
        "events": list(_events()),
        "snapshots": list(_events(is_snapshot=True)),
        "refused": list(_refused()),
    }


def _requests() -> Iterator[dict[str, Any]]:
    for corr, request in enumerate(REQUEST_EXAMPLES, 1):
        is_step = isinstance(request, ExecuteModel)
        header = RequestHeader(
            Kind.REQUEST,
            corr,
            0 if isinstance(request, Hello) else _EPOCH,
            _SEQ if is_step else 0,
            50_000 if is_step else 0,
        )
        yield _vector(message_tag(type(request).__name__), encode_request(header, request))


def _replies() -> Iterator[dict[str, Any]]:
    for corr, reply in enumerate((*REPLY_EXAMPLES, FAILURE_EXAMPLE), 1):
        seq = _SEQ if isinstance(reply, StepOutput) else 0
        header = reply_header(ReplyHeader(Kind.REPLY, corr, _EPOCH, seq, _BOOT_ID))
        yield _vector(message_tag(type(reply).__name__), [header, encode_body(reply)])


def _short() -> Iterator[dict[str, Any]]:
    pack = msgspec.msgpack.encode
    new = ["r-7", 4, 3, 0, {"temperature": 0}]  # an integer where a float is meant
    tokens = pack_step([], [504, 3575, 282])
    cases: tuple[tuple[list[Any], list[Any]], ...] = (
        ([1, 1], ["hello", 1, 1, 8]),
        ([1, 2, 8], ["sleep"]),
        ([1, 3, 8], ["execute_dummy_batch"]),
        ([1, 4, 8, 1], ["execute_model", 0, 1, 0]),
        ([1, 5, 8, 2], ["execute_model", 1, 1, 0, 0, 3, [new], [], tokens]),
    )
    for fields, body in cases:
        frames = [b"GW\x01" + pack(fields), pack(body)]
        full = encode_request(decode_request_header(frames), decode_request(frames))
        yield {
            **_vector(body[0], frames),
            "full_header": _plain(msgspec.msgpack.decode(full[0][3:])),
            "full_body": _plain(msgspec.msgpack.decode(full[1])),
        }


def _failures() -> Iterator[dict[str, Any]]:
    for corr, cls in enumerate(error_classes(), 1):
        is_illegal = cls is IllegalMessage
        error = cls(
            "what was wrong, the limit, and the way out",
            state="uninit" if is_illegal else "",
            accepted=("init_device", "shutdown") if is_illegal else (),
        )
        header = ReplyHeader(
            Kind.REPLY,
            0 if cls in (RepliesLost, UnsupportedVersion) else corr,
            _EPOCH,
            _SEQ if number_of_step(cls) == "used" else 0,
            _BOOT_ID,
        )
        yield _vector(cls.code, [reply_header(header), encode_body(failure_of(error))])


def _events(*, is_snapshot: bool = False) -> Iterator[dict[str, Any]]:
    for seq, event in enumerate(EVENT_EXAMPLES, 0 if is_snapshot else 1):
        header = event_header(EventHeader(Kind.EVENT, seq, is_snapshot, _BOOT_ID))
        vector = _vector(message_tag(type(event).__name__), [header, encode_event(event)])
        yield {"topic": TOPIC_OF[type(event)], **vector}


def _refused() -> Iterator[dict[str, Any]]:
    header, body = encode_request(RequestHeader(Kind.REQUEST, 1, _EPOCH), REQUEST_EXAMPLES[-2])
    pack = msgspec.msgpack.encode
    cases: dict[str, list[bytes]] = {
        "an HTTP request": [b"GET / HTTP/1.1", b""],
        "a header that ends after its version": [b"GW\x01", body],
        "another major version": [b"GW\x02" + header[3:], body],
        "a header with a field too many": [b"GW\x01" + pack([1, 1, 0, 0, 0, 0]), body],
        "corr 0": [b"GW\x01" + pack([1, 0, 0, 0, 0]), body],
        "a number that is no double": [b"GW\x01" + pack([1, 2**53, 0, 0, 0]), body],
        "one frame": [header],
        "three frames": [header, body, b""],
        "nine frames": [header, *[body] * 8],
        "an empty body": [header, b""],
        "a body that is cut off": [header, body[:-1]],
        "bytes behind the body": [header, body + b"\x00"],
        "a map": [header, pack({"get_health": 1})],
        "a pickle": [header, b"\x80\x05cposix\nsystem\n."],
        "a list that says it has 2**32 - 1 items": [header, b"\xdd\xff\xff\xff\xff"],
        "no tag": [header, pack([1])],
        "an unknown tag": [header, pack(["no_such_message"])],
        "a field too many": [header, pack(["get_health", 1])],
        "a missing field": [header, pack(["allocate_kv_cache"])],
        "a value of the wrong type": [header, pack(["sleep", True])],
        "a value out of range": [header, pack(["allocate_kv_cache", -1])],
    }
    for name, frames in cases.items():
        yield {"name": name, "frames": [frame.hex() for frame in frames], **_error(frames)}


def _error(frames: list[bytes]) -> dict[str, Any]:
    try:
        decode_request_header(frames)
    except MalformedMessage as error:
        return {"code": error.code, "answered": error.code != MalformedMessage.code}
    try:
        decode_request(frames)
    except WorkerError as error:
        return {"code": error.code, "answered": True}
    raise AssertionError("every one of these is refused")


def _vector(name: str, frames: list[bytes]) -> dict[str, Any]:
    header, body = frames
    return {
        "name": name,
        "header": _plain(msgspec.msgpack.decode(header[3:])),
        "header_hex": header.hex(),
        "body": _plain(msgspec.msgpack.decode(body)),
        "body_hex": body.hex(),
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bin": value.hex()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
