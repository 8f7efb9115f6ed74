"""Frames: every message survives, every error comes back, and junk is a MalformedMessage."""

from __future__ import annotations

import os

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpuworker.errors as errors
from gpuworker import messages as m
from gpuworker.errors import (
    CheckpointNotFound,
    InvalidRequest,
    MalformedMessage,
    MessageTooLarge,
    ProtocolError,
    UnknownMessage,
    WorkerError,
    error_class,
)
from gpuworker.ipc.wire import (
    MAX_BODY_BYTES,
    MAX_BUDGET_US,
    Kind,
    ReplyHeader,
    RequestHeader,
    decode_reply,
    decode_reply_header,
    decode_request,
    decode_request_header,
    encode_body,
    encode_request,
    error_of,
    failure_of,
    reply_header,
)
from gpuworker.step import Logprobs, NewRequest, Refusal, SamplingParams

COUNT = st.integers(0, 2**31 - 1)
NUMBER = st.integers(0, 2**63 - 1)
HEADER_NUMBER = st.integers(0, 2**53 - 1)
REQUEST_HEADER = st.builds(
    RequestHeader,
    kind=st.just(Kind.REQUEST),
    corr=st.integers(1, 2**53 - 1),
    epoch=HEADER_NUMBER,
    seq=HEADER_NUMBER,
    budget_us=st.integers(0, MAX_BUDGET_US),
)
REPLY_HEADER = st.builds(
    ReplyHeader,
    kind=st.just(Kind.REPLY),
    corr=HEADER_NUMBER,
    epoch=HEADER_NUMBER,
    seq=HEADER_NUMBER,
    boot_id=st.text("0123456789abcdef", min_size=16, max_size=16),
)
FLOAT = st.floats(allow_nan=False)
TEXT = st.text(max_size=20)
BUFFER = st.binary(max_size=64).map(memoryview)
SAMPLING = st.builds(
    SamplingParams,
    temperature=FLOAT,
    top_k=st.integers(-1, 100),
    seed=st.none() | NUMBER,
    logit_bias=st.dictionaries(COUNT, FLOAT, max_size=3),
    bad_token_ids=st.lists(st.lists(COUNT, max_size=3).map(tuple), max_size=2).map(tuple),
)
NEW = st.builds(
    NewRequest,
    request_id=st.text(min_size=1, max_size=128),
    slot=COUNT,
    num_prompt_tokens=COUNT,
    num_output_tokens=COUNT,
    sampling=SAMPLING,
)
LOGPROBS = st.builds(Logprobs, num_columns=COUNT, token_ids=BUFFER, values=BUFFER, ranks=BUFFER)
REFUSAL = st.builds(Refusal, request_id=TEXT, code=TEXT, message=TEXT)
TAG = st.sampled_from(["weights", "kv_cache"])
USE = st.builds(
    m.MemoryUse,
    tag=TAG,
    reserved_bytes=NUMBER,
    mapped_bytes=NUMBER,
    resident_bytes=NUMBER,
    spilled_bytes=NUMBER,
)
LAYER = st.builds(
    m.KVLayerSpec,
    layer=COUNT,
    kind=st.sampled_from(["full", "sliding"]),
    num_kv_heads=COUNT,
    head_size=COUNT,
    sliding_window=st.none() | COUNT,
    block_bytes=NUMBER,
)
# By field name, then by type; whatever is missing here fails loudly in _strategy.
BY_FIELD = {
    "new_requests": st.lists(NEW, max_size=2).map(tuple),
    "finished": st.lists(st.text(min_size=1, max_size=128), max_size=2).map(tuple),
    "logprobs": st.none() | LOGPROBS,
    "refusals": st.lists(REFUSAL, max_size=2).map(tuple),
    "memory": st.lists(USE, max_size=2).map(tuple),
    "layers": st.lists(LAYER, max_size=2).map(tuple),
    "tags": st.lists(TAG, max_size=2).map(tuple),
    "resumed": st.lists(TAG, max_size=2).map(tuple),
    "asleep": st.lists(TAG, max_size=2).map(tuple),
    "weights": st.sampled_from(["undefined", "defined", "poisoned"]),
    "health": st.sampled_from(["ok", "stalled", "faulted"]),
    "level": st.sampled_from([1, 2]),
    "warnings": st.lists(TEXT, max_size=2).map(tuple),
    "live_requests": st.lists(TEXT, max_size=2).map(tuple),
    "accepted": st.lists(TEXT, max_size=2).map(tuple),
    "eos_token_ids": st.lists(COUNT, max_size=2).map(tuple),
    "running_step_id": st.none() | NUMBER,
    "last_step_s": st.none() | FLOAT,
    "aborted_after": st.none() | NUMBER,
    "features": st.lists(TEXT, max_size=2).map(tuple),
    "outcome": st.sampled_from(["withdrawn", "started", "unknown"]),
    "peers": st.lists(
        st.builds(m.PeerHealth, rank=COUNT, alive=st.booleans(), silent_s=FLOAT), max_size=2
    ).map(tuple),
    "session": st.none()
    | st.builds(
        m.SessionHealth, highest_epoch=COUNT, client=TEXT, live=st.booleans(), silent_s=FLOAT
    ),
    "min_version": st.integers(0, 255),
    "max_version": st.integers(0, 255),
    "lease_ms": st.integers(0, 86_400_000),
}


POSITIVE = ("max_model_len", "num_blocks", "num_tokens", "epoch")


def _strategy(cls: type[msgspec.Struct]) -> st.SearchStrategy[msgspec.Struct]:
    fields = {}
    for field in msgspec.structs.fields(cls):
        kind = str(field.type)
        if field.name in BY_FIELD:
            fields[field.name] = BY_FIELD[field.name]
        elif "int" in kind:
            low = 1 if field.name in POSITIVE else 0
            fields[field.name] = st.integers(low, 2**31 - 1)
        elif "float" in kind:
            fields[field.name] = FLOAT
        elif "bool" in kind:
            fields[field.name] = st.booleans()
        elif "memoryview" in kind:
            fields[field.name] = BUFFER
        else:
            assert "str" in kind, f"{cls.__name__}.{field.name}: no strategy for {kind}"
            fields[field.name] = TEXT
    return st.builds(cls, **fields)


@pytest.mark.parametrize("message", m.REQUESTS)
@given(data=st.data(), header=REQUEST_HEADER)
def test_a_request_survives_the_wire(
    message: type[m.Request], data: st.DataObject, header: RequestHeader
) -> None:
    request = data.draw(_strategy(message))
    frames = encode_request(header, request)
    assert decode_request_header(frames) == header
    assert decode_request(frames) == request


@pytest.mark.parametrize("message", m.REQUESTS)
@given(data=st.data(), header=REPLY_HEADER)
def test_a_reply_or_a_failure_survives_the_wire(
    message: type[m.Request], data: st.DataObject, header: ReplyHeader
) -> None:
    for cls in (m.REPLY_OF[message], m.Failure):
        reply = data.draw(_strategy(cls))
        frames = [reply_header(header), encode_body(reply)]
        assert decode_reply_header(frames) == header
        assert decode_reply(message, frames[1]) == reply


def test_the_table_lists_every_request_and_tags_never_change() -> None:
    def leaves(cls: type) -> list[type]:
        return [x for sub in cls.__subclasses__() for x in (sub, *leaves(sub))]

    assert set(leaves(m.Request)) == set(m.REQUESTS)
    assert set(m.REPLY_OF.values()) | {m.Failure} == set(leaves(m.Reply))
    assert [request.__struct_config__.tag for request in m.REQUESTS] == [
        "hello",
        "end_session",
        "cancel",
        "open_ring",
        "init_device",
        "load_model",
        "get_kv_cache_spec",
        "get_limits",
        "profile_memory",
        "update_max_model_len",
        "allocate_kv_cache",
        "warm_up",
        "start_serving",
        "execute_model",
        "resume_steps",
        "drop_requests",
        "execute_dummy_batch",
        "sleep",
        "resume_pools",
        "wake_up",
        "reload_weights",
        "start_trace",
        "stop_trace",
        "get_status",
        "get_health",
        "shutdown",
    ]
    assert [reply.__struct_config__.tag for reply in m.REPLY_OF.values()] == [
        "welcome",
        "session_ended",
        "cancelled",
        "ring_opened",
        "device_ready",
        "model_loaded",
        "kv_cache_spec",
        "limits",
        "memory_profiled",
        "max_model_len_updated",
        "kv_cache_allocated",
        "warmed_up",
        "serving_started",
        "step_output",
        "steps_resumed",
        "requests_dropped",
        "dummy_batch_executed",
        "asleep",
        "pools_resumed",
        "awake",
        "weights_reloaded",
        "trace_started",
        "trace_stopped",
        "status",
        "health_report",
        "closed",
    ]
    tags = [cls.__struct_config__.tag for cls in (*leaves(m.Request), *leaves(m.Reply))]
    assert len(tags) == len(set(tags))
    assert all(cls.__struct_config__.frozen for cls in (*leaves(m.Request), *leaves(m.Reply)))


WORKER_ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, WorkerError)
]


@pytest.mark.parametrize("cls", WORKER_ERRORS)
def test_an_error_comes_back_as_the_same_class(cls: type[WorkerError]) -> None:
    error = cls("what happened", state="serving", accepted=("sleep", "shutdown"))
    failure = decode_reply(m.Sleep, encode_body(failure_of(error)))
    assert isinstance(failure, m.Failure)
    back = error_of(failure)
    assert type(back) is cls
    assert failure.retryable is cls.retryable
    assert (str(back), back.state, back.accepted) == (str(error), "serving", error.accepted)


def test_a_message_with_bytes_that_are_no_text_keeps_its_class() -> None:
    path = os.fsdecode(b"/models/\xff")
    body = encode_body(failure_of(CheckpointNotFound(f"{path} is not there")))
    failure = decode_reply(m.LoadModel, body)
    assert isinstance(failure, m.Failure)
    error = error_of(failure)
    assert type(error) is CheckpointNotFound
    assert str(error) == "/models/\\udcff is not there"


def test_every_code_has_one_class() -> None:
    assert {error_class(cls.code) for cls in WORKER_ERRORS} == set(WORKER_ERRORS)
    assert error_class("from_a_newer_worker") is WorkerError


HEAD = RequestHeader(Kind.REQUEST, corr=1)
GOOD = encode_request(HEAD, m.Sleep(level=1))
HEADERS: list[tuple[list[bytes], str]] = [
    ([], "GW"),
    ([b""] * 5, "GW"),
    ([b"", b""], "GW"),
    ([b"GW", b"x"], "GW"),
    ([b"GET / HTTP/1.1", b""], "GW"),
    ([b"GW\x09" + GOOD[0][3:], GOOD[1]], "version 9"),
    ([b"GW\x01", GOOD[1]], "GW"),
    ([b"GW\x01\xc1", GOOD[1]], "header"),
    ([b"GW\x01\x91\x01", GOOD[1]], "header"),
    ([b"GW\x01" + msgspec.msgpack.encode([1, 1, 0, 0, 0, 0]), GOOD[1]], "header"),
    ([b"GW\x01" + b"\x91" * 200, GOOD[1]], "header"),
    ([b"GW\x01" + msgspec.msgpack.encode([1, 2**53]), GOOD[1]], "header"),
    ([b"GW\x01" + msgspec.msgpack.encode([1, 0]), GOOD[1]], "header"),
    ([b"GW\x01" + msgspec.msgpack.encode([1, 1, 0, 0, MAX_BUDGET_US + 1]), GOOD[1]], "header"),
    ([GOOD[0] + b"\x00" * 300, GOOD[1]], "256"),
    ([b"GW\x01" + msgspec.msgpack.encode([2, 1, 0, 0, 0]), GOOD[1]], "kind 2"),
]


@pytest.mark.parametrize(("frames", "words"), HEADERS)
def test_a_frame_that_is_not_ours_is_refused(frames: list[bytes], words: str) -> None:
    with pytest.raises(MalformedMessage) as refusal:
        decode_request_header(frames)
    assert words in str(refusal.value)


@pytest.mark.parametrize(
    ("frames", "cls"),
    [
        (GOOD[:1], MalformedMessage),
        ([*GOOD, b""], MalformedMessage),
        ([*GOOD, *[b""] * 7], MessageTooLarge),
        ([GOOD[0], bytes(MAX_BODY_BYTES + 257)], MessageTooLarge),
    ],
)
def test_too_few_or_too_many_frames_are_refused(
    frames: list[bytes], cls: type[MalformedMessage]
) -> None:
    with pytest.raises(MalformedMessage) as refusal:
        decode_request(frames)
    assert type(refusal.value) is cls
    with pytest.raises(cls):
        decode_reply_header(frames)


pack = msgspec.msgpack.encode
BODIES: list[tuple[bytes, type[ProtocolError]]] = [
    (b"", MalformedMessage),
    (b"\xc1", MalformedMessage),
    (GOOD[1][:-1], MalformedMessage),
    (GOOD[1] + b"\x00", MalformedMessage),
    (pack([1]), MalformedMessage),
    (pack([]), MalformedMessage),
    (pack({"type": "sleep"}), MalformedMessage),
    (b"\x91" * 100_000, MalformedMessage),
    (b"\x80\x05cos\nsystem\n.", MalformedMessage),
    (b"\xdd\xff\xff\xff\xff", MalformedMessage),
    (pack(["no_such_message"]), UnknownMessage),
    (pack(["no_such_message" * 1000]), UnknownMessage),
    (pack(["sleep", 1, "extra"]), InvalidRequest),
    (pack(["sleep", 3]), InvalidRequest),
    (pack(["sleep", True]), InvalidRequest),
    (pack(["allocate_kv_cache"]), InvalidRequest),
    (pack(["allocate_kv_cache", 2**64 - 1]), InvalidRequest),
    (pack(["allocate_kv_cache", -1]), InvalidRequest),
    (pack(["resume_pools", ["weights", "everything"]]), InvalidRequest),
]


@pytest.mark.parametrize(("body", "cls"), BODIES, ids=range(len(BODIES)))
def test_a_body_that_is_no_request_is_refused_with_a_short_reason(
    body: bytes, cls: type[ProtocolError]
) -> None:
    with pytest.raises(ProtocolError) as refusal:
        decode_request([GOOD[0], body])
    assert type(refusal.value) is cls
    assert 0 < len(str(refusal.value)) <= 300
    with pytest.raises(MalformedMessage):
        decode_reply(m.Sleep, body)


@given(data=st.data())
def test_mutated_bytes_give_a_message_or_a_malformed_message(data: st.DataObject) -> None:
    step = data.draw(_strategy(m.ExecuteModel))
    frames = [bytearray(frame) for frame in encode_request(HEAD, step)]
    for _ in range(data.draw(st.integers(1, 4))):
        frame = frames[data.draw(st.integers(0, 1))]
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    mutated = [bytes(frame) for frame in frames]
    try:
        decode_request_header(mutated)
        assert type(decode_request(mutated)) in m.REQUESTS
    except ProtocolError:
        pass


def test_a_value_without_a_place_on_the_wire_is_refused_before_sending() -> None:
    with pytest.raises(MalformedMessage, match="AllocateKVCache cannot be encoded"):
        encode_request(HEAD, m.AllocateKVCache(num_blocks=2**70))
