"""The protocol's byte examples: they decode to what they say, and nothing is left out."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuworker import events as e
from gpuworker import messages as m
from gpuworker.errors import WorkerError
from gpuworker.ipc.examples import EVENT_EXAMPLES, REPLY_EXAMPLES, REQUEST_EXAMPLES
from gpuworker.ipc.failures import error_classes
from gpuworker.ipc.wire import (
    EventHeader,
    ReplyHeader,
    RequestHeader,
    decode_event_header,
    decode_failure,
    decode_reply,
    decode_reply_header,
    decode_request,
    decode_request_header,
    encode_body,
    encode_request,
    error_of,
    event_header,
    failure_of,
    reply_header,
)
from json_schema import faults

SCHEMA: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "messages.schema.json").read_text()
)
VECTORS: dict[str, Any] = json.loads(
    (Path(__file__).parents[2] / "docs" / "protocol.vectors.json").read_text()
)


def _frames(vector: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(vector["header_hex"]), bytes.fromhex(vector["body_hex"])]


def _raw(value: Any) -> Any:
    if isinstance(value, dict):
        return bytes.fromhex(value["bin"]) if "bin" in value else value
    return [_raw(item) for item in value] if isinstance(value, list) else value


def _json(value: Any) -> Any:
    """A value as JSON of the schema: a buffer is base64 text."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return [_json(item) for item in value] if isinstance(value, list) else value


def test_every_message_reply_and_event_has_an_example() -> None:
    assert [type(request) for request in REQUEST_EXAMPLES] == list(m.REQUESTS)
    assert [type(reply) for reply in REPLY_EXAMPLES] == list(m.REPLY_OF.values())
    assert [type(event) for event in EVENT_EXAMPLES] == list(e.EVENTS)
    assert [v["name"] for v in VECTORS["failures"]] == [cls.code for cls in error_classes()]


@pytest.mark.parametrize("vector", VECTORS["requests"], ids=lambda vector: vector["name"])
def test_a_request_decodes_to_its_example(vector: dict[str, Any]) -> None:
    frames = _frames(vector)
    example = REQUEST_EXAMPLES[vector["header"][1] - 1]
    assert decode_request(frames) == example
    assert msgspec.structs.astuple(decode_request_header(frames)) == tuple(vector["header"])
    assert msgspec.msgpack.decode(frames[1]) == _raw(vector["body"])
    assert encode_request(RequestHeader(*vector["header"]), example) == frames


@pytest.mark.parametrize("vector", VECTORS["short"], ids=lambda vector: vector["name"])
def test_what_leaves_defaults_out_means_the_same_in_full(vector: dict[str, Any]) -> None:
    frames = _frames(vector)
    full = msgspec.msgpack.encode(_raw(vector["full_body"]))
    assert len(full) > len(frames[1])
    assert decode_request(frames) == decode_request([frames[0], full])
    assert decode_request_header(frames) == RequestHeader(*vector["full_header"])


@pytest.mark.parametrize("vector", VECTORS["replies"], ids=lambda vector: vector["name"])
def test_a_reply_decodes_to_its_example(vector: dict[str, Any]) -> None:
    frames = _frames(vector)
    header = decode_reply_header(frames)
    assert msgspec.structs.astuple(header) == tuple(vector["header"])
    example: m.Reply
    if vector["name"] == "failure":
        example = decode_failure(frames[1])
    else:
        example = REPLY_EXAMPLES[header.corr - 1]
        assert decode_reply(m.REQUESTS[header.corr - 1], frames[1]) == example
    assert msgspec.msgpack.decode(frames[1]) == _raw(vector["body"])
    assert [reply_header(ReplyHeader(*vector["header"])), encode_body(example)] == frames


@pytest.mark.parametrize("vector", VECTORS["failures"], ids=lambda vector: vector["name"])
def test_a_failure_decodes_to_the_error_of_its_code(vector: dict[str, Any]) -> None:
    frames = _frames(vector)
    error = error_of(decode_failure(frames[1]))
    assert error.code == vector["name"]
    assert [reply_header(ReplyHeader(*vector["header"])), encode_body(failure_of(error))] == frames
    assert [error.code, error.message, error.state, [*error.accepted], error.retryable] == (
        vector["body"][1:]
    )


@pytest.mark.parametrize(
    "vector", VECTORS["events"] + VECTORS["snapshots"], ids=lambda vector: vector["name"]
)
def test_an_event_decodes_to_its_example(vector: dict[str, Any]) -> None:
    frames = _frames(vector)
    event, header = e.decode_event(frames[1]), decode_event_header(frames[0])
    assert event == EVENT_EXAMPLES[header.seq - (not header.is_snapshot)]
    assert vector["topic"] == e.TOPIC_OF[type(event)]
    assert msgspec.msgpack.decode(frames[1]) == _raw(vector["body"])
    assert [event_header(EventHeader(*vector["header"])), e.encode_event(event)] == frames


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["name"])
def test_what_must_be_refused_is_refused_with_its_code(vector: dict[str, Any]) -> None:
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]

    def decode() -> None:
        decode_request_header(frames)
        decode_request(frames)

    with pytest.raises(WorkerError) as refusal:
        decode()
    assert refusal.value.code == vector["code"]


def _shapes(group: str, name: str) -> list[dict[str, str]]:
    """Where the schema describes a message of this group."""
    if group in ("requests", "short"):
        return [{"$ref": f"#/$defs/{cls.__name__}"} for cls in m.REQUESTS if _tag(cls) == name]
    if group in ("events", "snapshots"):
        return [SCHEMA["x-events"][name]]
    tag = "failure" if group == "failures" else name
    answers = {shape["$ref"] for replies in SCHEMA["x-replies"].values() for shape in replies}
    return [{"$ref": ref} for ref in answers if m.message_tag(ref.rpartition("/")[2]) == tag]


def _tag(cls: type[m.Request]) -> str:
    return m.message_tag(cls.__name__)


_HEADERS = {
    "requests": "request",
    "short": "request",
    "replies": "reply",
    "failures": "reply",
    "events": "event",
    "snapshots": "event",
}


@pytest.mark.parametrize(
    ("group", "vector"),
    [(group, vector) for group in _HEADERS for vector in VECTORS[group]],
    ids=lambda value: value if isinstance(value, str) else value["name"],
)
def test_the_schema_allows_every_example(group: str, vector: dict[str, Any]) -> None:
    (shape,) = _shapes(group, vector["name"])
    body = _json(_raw(vector["body"]))
    assert faults(SCHEMA, shape, body) == []
    assert faults(SCHEMA, SCHEMA["x-headers"][_HEADERS[group]], vector["header"]) == []
    assert faults(SCHEMA, shape, [*body, *[None] * 30])  # too long
    assert faults(SCHEMA, shape, ["another", *body[1:]])
    if len(body) > 1:
        assert faults(SCHEMA, shape, [body[0], {}, *body[2:]])  # of another type


@pytest.mark.parametrize(
    "vector",
    [v for v in VECTORS["refused"] if v["code"] in ("unknown_message", "invalid_request")],
    ids=lambda vector: vector["name"],
)
def test_the_schema_forbids_what_the_wire_refuses(vector: dict[str, Any]) -> None:
    body = msgspec.msgpack.decode(bytes.fromhex(vector["frames"][1]))
    assert all(faults(SCHEMA, shape, body) for shape in SCHEMA["oneOf"])
