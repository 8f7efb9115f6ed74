"""Step numbers: in order, within the window, answered again, never run twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.errors import Busy, DuplicateExpired, OutOfOrder
from gpuworker.ipc.ledger import MAX_REPLAY_BYTES, NUM_REPLAYS, StepLedger


def _run(ledger: StepLedger, seq: int, body: bytes = b"") -> None:
    assert ledger.check(seq)
    ledger.begin(seq)
    assert ledger.finish(seq, body) == []


def test_a_number_that_runs_is_waited_for_and_one_that_is_done_is_answered_again() -> None:
    ledger = StepLedger(window=2)
    assert ledger.check(1)
    ledger.begin(1)
    assert not ledger.check(1)
    assert ledger.answer_of(1, corr=70) is None
    assert ledger.answer_of(1, corr=71) is None
    assert ledger.finish(1, b"one") == [70, 71]
    assert not ledger.check(1)
    assert ledger.answer_of(1, corr=72) == b"one"


def test_gaps_full_windows_and_old_numbers_are_refused_and_cost_nothing() -> None:
    ledger = StepLedger(window=2)
    with pytest.raises(OutOfOrder, match="the next one is 1"):
        ledger.check(2)
    for seq in (1, 2):
        assert ledger.check(seq)
        ledger.begin(seq)
    with pytest.raises(Busy, match="the window is 2"):
        ledger.check(3)
    ledger.finish(1, b"")
    assert ledger.check(3)
    ledger.finish(2, b"")
    for seq in range(3, NUM_REPLAYS + 3):
        _run(ledger, seq)
    for seq in (1, 2):
        with pytest.raises(DuplicateExpired):
            ledger.check(seq)
    assert not ledger.check(3)


def test_large_answers_do_not_pile_up() -> None:
    ledger = StepLedger(window=1)
    body = bytes(MAX_REPLAY_BYTES // 3)
    for seq in range(1, 6):
        _run(ledger, seq, body)
    with pytest.raises(DuplicateExpired):
        ledger.check(2)
    assert ledger.answer_of(3, corr=1) is body
    _run(ledger, 6, bytes(MAX_REPLAY_BYTES + 1))
    assert ledger.answer_of(6, corr=1) is not None  # the newest is kept in any case
    with pytest.raises(DuplicateExpired):
        ledger.check(5)


@given(
    window=st.integers(1, 4),
    events=st.lists(st.one_of(st.integers(-3, 3), st.just("finish")), max_size=400),
)
def test_any_sequence_of_numbers_agrees_with_a_plain_model(
    window: int, events: list[int | str]
) -> None:
    ledger = StepLedger(window)
    running: list[int] = []
    done: list[int] = []
    for event in events:
        if event == "finish":
            if running:
                seq = running.pop(0)
                ledger.finish(seq, str(seq).encode())
                done.append(seq)
            continue
        assert isinstance(event, int)
        following = len(running) + len(done) + 1
        seq = following + event
        if seq in running or seq in done[-NUM_REPLAYS:]:
            assert not ledger.check(seq)
            answer = ledger.answer_of(seq, corr=0)
            assert answer == (None if seq in running else str(seq).encode())
        elif seq < following:
            with pytest.raises(DuplicateExpired):
                ledger.check(seq)
        elif seq > following:
            with pytest.raises(OutOfOrder):
                ledger.check(seq)
        elif len(running) == window:
            with pytest.raises(Busy):
                ledger.check(seq)
        else:
            assert ledger.check(seq)
            ledger.begin(seq)
            running.append(seq)
        assert ledger.num_running == len(running) <= window
