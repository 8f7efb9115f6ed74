"""Events as bytes: every one survives, and nothing else is taken for one."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker import events as e
from gpuworker.messages import Health

_NUMBERS = st.integers(0, 2**63 - 1)
_FLOATS = st.floats(allow_nan=False)
_STRATEGIES: dict[object, st.SearchStrategy[Any]] = {
    str: st.text(max_size=40),
    int: _NUMBERS,
    float: _FLOATS,
    float | None: st.none() | _FLOATS,
    Health: st.sampled_from(get_args(Health)),
}


def _events(kind: type[e.Event]) -> st.SearchStrategy[e.Event]:
    hints = get_type_hints(kind)
    return st.builds(kind, **{name: _STRATEGIES[hints[name]] for name in kind.__struct_fields__})


EVENTS = st.one_of(*map(_events, e.EVENTS))


@given(event=EVENTS)
def test_every_event_survives(event: e.Event) -> None:
    assert e.decode_event(e.encode_event(event)) == event


@given(event=EVENTS)
def test_an_event_is_its_tag_and_its_fields_in_order(event: e.Event) -> None:
    array = msgspec.msgpack.decode(e.encode_event(event))
    tag = event.__struct_config__.tag
    assert array == [tag, *(getattr(event, name) for name in event.__struct_fields__)]


@given(event=EVENTS, data=st.data())
def test_an_event_with_a_field_more_or_less_is_refused(event: e.Event, data: st.DataObject) -> None:
    array = msgspec.msgpack.decode(e.encode_event(event))
    index = data.draw(st.integers(0, len(array) - 1))
    for wrong in ([*array, None], array[:index]):
        with pytest.raises(msgspec.DecodeError):
            e.decode_event(msgspec.msgpack.encode(wrong))


@pytest.mark.parametrize(
    "array",
    [
        ["kv_epoch_changed", -1],
        ["kv_epoch_changed", 2**63],
        ["kv_epoch_changed", True],
        ["health_changed", "fine", ""],
        ["state_changed", 1, ""],
        ["closed"],
        {"state": "serving"},
    ],
)
def test_a_value_that_is_out_of_place_is_refused(array: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        e.decode_event(msgspec.msgpack.encode(array))


@given(st.binary(max_size=200))
def test_any_bytes_are_an_event_or_a_decode_error(body: bytes) -> None:
    try:
        event = e.decode_event(body)
    except (msgspec.DecodeError, RecursionError):
        return
    assert type(event) in e.EVENTS
