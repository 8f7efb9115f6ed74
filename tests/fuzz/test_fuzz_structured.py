"""Messages of the table with fields that are valid or not, drawn from the types themselves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from fuzzer import MAX_EPOCH, Fuzzer
from gpuworker import messages as m
from gpuworker.errors import InvalidRequest, MalformedMessage, UnknownMessage
from gpuworker.ipc.wire import decode_request
from gpuworker.lifecycle import State
from gpuworker.testing import fake_worker, walk_to
from ipc_serving import served
from mutation import EXTREMES, header_of

HEADER = header_of(1, 1)
DRAWN = tuple(request for request in m.REQUESTS if request is not m.Shutdown)


def _valid(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Draw what a type of msgspec takes, as the builtins that travel."""
    match kind:
        case inspect.IntType():
            low, high = kind.ge if kind.ge is not None else -(2**63), kind.le
            return st.integers(low, high if high is not None else 2**63 - 1)
        case inspect.FloatType():
            return st.floats()
        case inspect.StrType():
            return st.text(min_size=kind.min_length or 0, max_size=min(kind.max_length or 9, 9))
        case inspect.LiteralType():
            return st.sampled_from(kind.values)
        case inspect.NoneType():
            return st.none()
        case inspect.MemoryViewType():
            return st.binary(max_size=80)
        case inspect.UnionType():
            return st.one_of([_valid(one) for one in kind.types])
        case inspect.VarTupleType():
            return st.lists(_valid(kind.item_type), max_size=min(kind.max_length or 3, 3))
        case inspect.DictType():
            return st.dictionaries(_valid(kind.key_type), _valid(kind.value_type), max_size=3)
        case inspect.StructType() if kind.array_like:
            fields = [_valid(field.type) for field in kind.fields]
            tag = [st.just(kind.tag)] if kind.tag is not None else []
            return st.tuples(*tag, *fields).map(list)
        case inspect.StructType():
            return st.fixed_dictionaries(
                {}, optional={field.encode_name: _valid(field.type) for field in kind.fields}
            )
    raise AssertionError(kind)


@cache
def _valid_fields(request: type[m.Request[Any]]) -> st.SearchStrategy[list[Any]]:
    return _valid(inspect.type_info(request))


@st.composite
def _spoilt_fields(draw: st.DrawFn, request: type[m.Request[Any]]) -> list[Any]:
    fields = draw(_valid_fields(request))
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, len(fields) - 1))
        fields[at] = draw(st.sampled_from(EXTREMES))
    return fields


valid_bodies = st.sampled_from(DRAWN).flatmap(_valid_fields).map(msgspec.msgpack.encode)
spoilt_bodies = st.sampled_from(DRAWN).flatmap(_spoilt_fields).map(msgspec.msgpack.encode)


@settings(max_examples=500)
@given(valid_bodies)
def test_what_the_types_allow_is_decoded_to_what_was_said(body: bytes) -> None:
    request = decode_request([HEADER, body])
    again = decode_request([HEADER, msgspec.msgpack.encode(request)])
    assert msgspec.msgpack.encode(again) == msgspec.msgpack.encode(request)
    assert msgspec.msgpack.decode(body)[0] == type(request).__struct_config__.tag


@settings(max_examples=500)
@given(spoilt_bodies)
def test_what_is_spoilt_is_decoded_or_refused_with_a_typed_error(body: bytes) -> None:
    with suppress(InvalidRequest, MalformedMessage, UnknownMessage):  # and nothing else
        assert type(decode_request([HEADER, body])) in m.REQUESTS


@contextmanager
def _served_elsewhere() -> Iterator[str]:
    """Serve a fake worker from an event loop on another thread."""
    bound: list[str] = []
    is_bound, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with fake_worker() as worker, served(worker) as (_, endpoint):
            await walk_to(worker, State.SERVING)
            bound.append(endpoint)
            is_bound.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert is_bound.wait(20)
        yield bound[0]
    finally:
        stop.set()
        thread.join()


def _keeps_epochs(body: bytes) -> bool:
    """Leave epochs for those that follow."""
    try:
        return msgspec.msgpack.decode(body, type=m.Hello).epoch < MAX_EPOCH
    except msgspec.DecodeError:
        return True


def test_a_served_worker_answers_all_of_them_once() -> None:
    any_body = st.one_of(valid_bodies, spoilt_bodies).filter(_keeps_epochs)

    with _served_elsewhere() as endpoint, Fuzzer(endpoint, 0) as fuzzer:

        @settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(st.tuples(any_body, st.integers(0, 3)), min_size=1, max_size=12))
        def say(messages: list[tuple[bytes, int]]) -> None:
            fuzzer.say([body for body, _ in messages], [seq for _, seq in messages])
            assert fuzzer.suspects == []

        say()
        assert fuzzer.num_messages > 300
