"""When two answers count as the same."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import pytest

from gpuworker import messages as m
from gpuworker.errors import OutOfDeviceMemory, StepFailed
from gpuworker.step import Logprobs, Refusal, pack_sampled
from gpuworker.steplog.compare import Mismatch, compare_replies, decode_reply
from gpuworker.steplog.recording import failure_of

TOLERANCE = 1e-3


def logprobs(
    ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]], ranks: Sequence[int] = (1, 2)
) -> Logprobs:
    return Logprobs(
        num_columns=len(ids[0]),
        token_ids=np.asarray(ids, "<i4").data.cast("B"),
        values=np.asarray(values, "<f4").data.cast("B"),
        ranks=np.asarray(ranks, "<i4").data.cast("B"),
    )


def output(
    num_sampled: Sequence[int] = (1, 0, 1),
    tokens: Sequence[int] = (7, 9),
    chances: Logprobs | None = None,
    **fields: object,
) -> m.StepOutput:
    return msgspec.structs.replace(
        m.StepOutput(
            step_id=3,
            kv_epoch=1,
            num_rows=len(num_sampled),
            step_s=0.5,
            buffer=pack_sampled(np.asarray(num_sampled, "<i4"), np.asarray(tokens, "<i4")),
            logprobs=chances,
        ),
        **fields,
    )


def compared(expected: m.Reply, got: m.Reply, tolerance: float = TOLERANCE) -> Mismatch | None:
    return compare_replies(expected, got, tolerance=tolerance)


IDS = [[7, 7, 1, 2], [9, 3, 9, 5]]
VALUES = [[-0.1, -0.1, -2.0, -2.0005], [-3.0, -0.5, -3.0, -4.0]]
CHANCES = logprobs(IDS, VALUES)


def test_an_answer_equals_itself_and_its_bytes() -> None:
    for reply in (output(), output(chances=CHANCES), m.Closed(), failure_of(StepFailed("x"))):
        again = decode_reply(msgspec.msgpack.encode(reply))
        assert compared(reply, again, 0.0) is None


def test_times_are_not_compared() -> None:
    assert compared(output(), output(step_s=9.0)) is None


@pytest.mark.parametrize(
    ("other", "mismatch"),
    [
        (output(step_id=4), Mismatch(what="step_id", expected="3", got="4")),
        (output(kv_epoch=2), Mismatch(what="kv_epoch", expected="1", got="2")),
        (output((1, 0), (7,)), Mismatch(what="num_rows", expected="3", got="2")),
        (output((1, 1, 0)), Mismatch(what="num_sampled", expected="0", got="1", row=1)),
        (output(tokens=(7, 8)), Mismatch(what="token", expected="9", got="8", row=2)),
        (
            output(refusals=(Refusal(request_id="a", code="b", message="c"),)),
            Mismatch(what="refusals", expected="none", got="a: b"),
        ),
        (
            output(chances=CHANCES),
            Mismatch(what="num_columns of logprobs", expected="none", got="4"),
        ),
        (
            failure_of(StepFailed("why")),
            Mismatch(what="answer", expected="step_output", got="step_failed: why"),
        ),
    ],
)
def test_the_first_difference_of_a_step_is_named(other: m.Reply, mismatch: Mismatch) -> None:
    assert compared(output(), other) == mismatch


def changed(place: tuple[int, int], by: float) -> Logprobs:
    values = np.asarray(VALUES, np.float32)
    values[place] += by
    return logprobs(IDS, values.tolist())


def test_logprobs_are_compared_within_the_tolerance() -> None:
    near, far = changed((1, 3), 5e-4), changed((1, 3), 5e-3)
    assert compared(output(chances=CHANCES), output(chances=near)) is None
    mismatch = compared(output(chances=CHANCES), output(chances=far))
    assert mismatch is not None
    assert (mismatch.what, mismatch.row, mismatch.expected) == ("logprob", 2, "-4.0")
    exact = compared(output(chances=CHANCES), output(chances=near), 0.0)
    assert exact is not None
    assert exact.what == "logprob"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_is_none_equals_only_itself(value: float) -> None:
    broken = changed((0, 0), value)
    assert compared(output(chances=broken), output(chances=broken)) is None
    for old, new in ((broken, CHANCES), (CHANCES, broken)):
        mismatch = compared(output(chances=old), output(chances=new))
        assert mismatch is not None
        assert (mismatch.what, mismatch.row) == ("logprob", 0)


def test_top_tokens_may_swap_only_where_they_are_as_likely() -> None:
    swapped = logprobs([[7, 7, 2, 1], IDS[1]], VALUES)
    assert compared(output(chances=CHANCES), output(chances=swapped)) is None
    assert compared(output(chances=CHANCES), output(chances=swapped), 0.0) == Mismatch(
        what="top token", expected="1", got="2", row=0
    )
    wrong = logprobs([IDS[0], [9, 4, 9, 5]], VALUES)
    assert compared(output(chances=CHANCES), output(chances=wrong)) == Mismatch(
        what="top token", expected="3", got="4", row=2
    )
    sampled = logprobs([IDS[0], [8, 3, 9, 5]], VALUES)
    assert compared(output(chances=CHANCES), output(chances=sampled)) is not None


def test_ranks_count_only_bit_by_bit() -> None:
    other = logprobs(IDS, VALUES, (1, 3))
    assert compared(output(chances=CHANCES), output(chances=other)) is None
    assert compared(output(chances=CHANCES), output(chances=other), 0.0) == Mismatch(
        what="rank", expected="2", got="3", row=2
    )


def test_failures_are_compared_by_code() -> None:
    assert compared(failure_of(StepFailed("a")), failure_of(StepFailed("b"))) is None
    mismatch = compared(failure_of(StepFailed("a")), failure_of(OutOfDeviceMemory("b")))
    assert mismatch == Mismatch(
        what="answer", expected="step_failed: a", got="out_of_device_memory: b"
    )
    assert compared(failure_of(StepFailed("a")), output()) is not None


def test_of_a_move_only_what_does_not_depend_on_time_or_memory_counts() -> None:
    old = m.KVCacheAllocated(num_blocks=8, block_size=4, kv_cache_bytes=100, kv_epoch=0)
    assert compared(old, msgspec.structs.replace(old, kv_cache_bytes=200)) is None
    assert compared(old, msgspec.structs.replace(old, num_blocks=9)) == Mismatch(
        what="num_blocks", expected="8", got="9"
    )
    assert compared(m.Closed(), old) == Mismatch(
        what="answer", expected="closed", got="kv_cache_allocated"
    )


def test_every_compared_field_exists() -> None:
    from gpuworker.steplog.compare import _COMPARED

    for reply, fields in _COMPARED.items():
        assert set(fields) <= set(reply.__struct_fields__), reply
