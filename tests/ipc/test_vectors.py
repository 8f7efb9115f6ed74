"""The protocol's byte examples: they decode to what they say, and nothing is left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gpuworker import events as e
from gpuworker import messages as m
from gpuworker.errors import WorkerError
from gpuworker.ipc.examples import EVENT_EXAMPLES, REPLY_EXAMPLES, REQUEST_EXAMPLES
from gpuworker.ipc.wire import (
    decode_event_header,
    decode_failure,
    decode_reply,
    decode_reply_header,
    decode_request,
    decode_request_header,
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


def test_every_message_reply_and_event_has_an_example() -> None:
    assert [type(request) for request in REQUEST_EXAMPLES] == list(m.REQUESTS)
    assert [type(reply) for reply in REPLY_EXAMPLES] == list(m.REPLY_OF.values())
    assert [type(event) for event in EVENT_EXAMPLES] == list(e.EVENTS)


@pytest.mark.parametrize("vector", VECTORS["requests"], ids=lambda vector: vector["name"])
def test_a_request_decodes_to_its_example(vector: dict[str, Any]) -> None:
    frames = _frames(vector)
    example = REQUEST_EXAMPLES[vector["header"][1] - 1]
    assert decode_request(frames) == example
    assert msgspec.structs.astuple(decode_request_header(frames)) == tuple(vector["header"])
    assert msgspec.msgpack.decode(frames[1]) == _raw(vector["body"])


@pytest.mark.parametrize("vector", VECTORS["replies"], ids=lambda vector: vector["name"])
def test_a_reply_decodes_to_its_example(vector: dict[str, Any]) -> None:
    frames = _frames(vector)
    header = decode_reply_header(frames)
    assert msgspec.structs.astuple(header) == tuple(vector["header"])
    if vector["name"] == "failure":
        assert decode_failure(frames[1]).retryable
    else:
        assert (
            decode_reply(m.REQUESTS[header.corr - 1], frames[1]) == REPLY_EXAMPLES[header.corr - 1]
        )
    assert msgspec.msgpack.decode(frames[1]) == _raw(vector["body"])


@pytest.mark.parametrize("vector", VECTORS["events"], ids=lambda vector: vector["name"])
def test_an_event_decodes_to_its_example(vector: dict[str, Any]) -> None:
    header, body = _frames(vector)
    event = e.decode_event(body)
    assert event == EVENT_EXAMPLES[decode_event_header(header).seq - 1]
    assert vector["topic"] == e.TOPIC_OF[type(event)]


@pytest.mark.parametrize("vector", VECTORS["refused"], ids=lambda vector: vector["name"])
def test_what_must_be_refused_is_refused_with_its_code(vector: dict[str, Any]) -> None:
    frames = [bytes.fromhex(frame) for frame in vector["frames"]]

    def decode() -> None:
        decode_request_header(frames)
        decode_request(frames)

    with pytest.raises(WorkerError) as refusal:
        decode()
    assert refusal.value.code == vector["code"]


def test_the_schema_describes_what_the_examples_hold() -> None:
    schema = json.loads((Path(__file__).parents[2] / "docs" / "messages.schema.json").read_text())

    def shape(reference: dict[str, str]) -> dict[str, Any]:
        found: dict[str, Any] = schema["$defs"][reference["$ref"].rpartition("/")[2]]
        return found

    for reference in schema["oneOf"]:
        items = shape(reference)["prefixItems"]
        (vector,) = (v for v in VECTORS["requests"] if v["name"] == items[0]["enum"][0])
        assert len(vector["body"]) <= len(items)
    for vector in VECTORS["events"]:
        items = shape(schema["x-events"][vector["name"]])["prefixItems"]
        assert len(vector["body"]) == len(items)
    for kind, vectors in (("request", "requests"), ("reply", "replies"), ("event", "events")):
        items = shape(schema["x-headers"][kind])["prefixItems"]
        assert {len(vector["header"]) for vector in VECTORS[vectors]} == {len(items)}
