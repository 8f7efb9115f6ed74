"""Aborts, refusals, lost steps and new epochs: nobody else loses a token."""

from __future__ import annotations

import pytest

from engine.driving import Run
from engine.fake_device import FakeDevice, reference_tokens
from gpuworker.errors import InvalidRequest, StepFailed, WorkerFaulted
from gpuworker.step import RESUMED, unpack_step


def _flags(device: FakeDevice) -> list[int]:
    return [
        flag
        for step in device.log
        for flag in unpack_step(
            step.buffer, step.num_rows, step.num_block_ids, step.num_token_ids
        ).flags.tolist()
    ]


def test_an_aborted_request_yields_nothing_more_and_leaves_the_others_alone() -> None:
    run = Run(FakeDevice())
    for name in ("kept", "waiting", "aborted"):
        run.add(name, (1, 2, len(name)), max_tokens=10)
    run.take(run.scheduler.abort("waiting"))
    for _ in range(3):
        run.send()
        run.land()
    run.take(run.scheduler.abort("aborted"))
    run.until_idle()
    assert run.reason("waiting") == run.reason("aborted") == "abort"
    assert run.tokens["waiting"] == []
    assert run.tokens["aborted"] == reference_tokens((1, 2, 7), 10)[:3]
    assert run.tokens["kept"] == reference_tokens((1, 2, 4), 10)
    assert run.device.slots == {}
    assert run.scheduler.abort("aborted") == []


def test_an_id_may_be_used_again_as_soon_as_its_request_ended() -> None:
    run = Run(FakeDevice())
    run.add("r", range(5), max_tokens=30)
    run.send()
    run.land()
    run.scheduler.abort("r")
    run.add("r", range(9), max_tokens=2)
    run.send()
    run.until_idle()
    assert run.tokens["r"] == reference_tokens(tuple(range(9)), 2)


def test_an_id_whose_first_request_is_aborted_unheard_waits_for_its_end_to_be_sent() -> None:
    for refused in (False, True):
        run = Run(FakeDevice())
        if refused:
            run.device.refuse.add("r")
        run.add("r", range(5), max_tokens=30)
        run.send()
        run.scheduler.abort("r")
        run.add("r", range(9), max_tokens=2)
        run.land()
        run.device.refuse.clear()
        run.until_idle()
        assert run.tokens["r"] == reference_tokens(tuple(range(9)), 2)


def test_a_refused_request_does_not_disturb_the_others() -> None:
    run = Run(FakeDevice())
    run.device.refuse.add("bad")
    for name in ("one", "bad", "two"):
        run.add(name, (3, len(name)), max_tokens=8)
    run.until_idle()
    assert run.reason("bad") == "refused"
    assert isinstance(run.ends["bad"].error, InvalidRequest)
    assert run.tokens["one"] == reference_tokens((3, 3), 8) == run.tokens["two"]
    run.device.refuse.clear()
    run.add("bad", (4, 4), max_tokens=2)
    run.until_idle()
    assert run.tokens["bad"] == reference_tokens((4, 4), 2)


def test_a_worker_that_refuses_the_step_behind_a_refusal_as_a_whole_ends_nobody() -> None:
    run = Run(FakeDevice())
    run.device.refuse.add("bad")
    run.device.fail_at[1] = InvalidRequest("a row names a slot that is not bound")
    for name in ("one", "bad"):
        run.add(name, (3, len(name)), max_tokens=8)
    run.until_idle()
    assert list(run.ends) == ["bad", "one"]
    assert run.tokens["one"] == reference_tokens((3, 3), 8)


def test_a_step_that_is_refused_for_no_earlier_reason_ends_every_request() -> None:
    run = Run(FakeDevice())
    run.device.fail_at[1] = InvalidRequest("nonsense")
    run.add("one", (1, 2), max_tokens=8)
    run.until_idle()
    assert isinstance(run.ends["one"].error, InvalidRequest)


def test_a_request_aborted_before_its_refusal_arrives_gives_its_slot_back_once() -> None:
    run = Run(FakeDevice(max_num_seqs=2))
    run.device.refuse.add("bad")
    run.add("bad", (1, 2), max_tokens=5)
    run.send()
    run.scheduler.abort("bad")
    for n in range(4):
        run.add(f"r{n}", (n, 1), max_tokens=3)
    run.until_idle()
    for n in range(4):
        assert run.tokens[f"r{n}"] == reference_tokens((n, 1), 3)


def test_a_failed_step_ends_its_own_requests_only() -> None:
    run = Run(FakeDevice(max_num_seqs=2))
    run.add("a", (1,), max_tokens=12)
    run.add("b", (2,), max_tokens=12)
    run.add("later", (3,), max_tokens=6)
    run.device.fail_at[3] = StepFailed("the kernel raised")
    run.until_idle()
    assert isinstance(run.ends["a"].error, StepFailed)
    assert isinstance(run.ends["b"].error, StepFailed)
    assert run.ends["a"].error is not run.ends["b"].error
    assert run.tokens["later"] == reference_tokens((3,), 6)
    assert run.device.slots == {}


def test_requests_outside_a_failed_step_are_computed_again_and_lose_nothing() -> None:
    # The budget leaves no room for the second prompt in the step that fails.
    run = Run(FakeDevice(max_num_batched_tokens=8))
    run.add("failing", range(20), max_tokens=2)
    run.add("other", range(5), max_tokens=7)
    run.device.fail_at[0] = StepFailed("the kernel raised")
    run.until_idle()
    assert run.reason("failing") == "refused"
    assert run.tokens["other"] == reference_tokens(tuple(range(5)), 7)


def test_an_error_of_the_whole_worker_ends_every_request() -> None:
    run = Run(FakeDevice(max_num_seqs=1))
    run.add("running", (1,), max_tokens=5)
    run.add("waiting", (2,), max_tokens=5)
    run.device.fail_at[1] = WorkerFaulted("gone")
    run.until_idle()
    assert isinstance(run.ends["running"].error, WorkerFaulted)
    assert isinstance(run.ends["waiting"].error, WorkerFaulted)


def test_a_new_epoch_in_the_middle_changes_no_token() -> None:
    run = Run(FakeDevice())
    for n in range(3):
        run.add(f"r{n}", range(n + 5), max_tokens=12)

    def change(rounds: int) -> None:
        if rounds in (4, 9):
            while run.flights:
                run.land()
            run.scheduler.new_epoch(run.device.new_epoch())

    run.until_idle(change)
    for n in range(3):
        assert run.tokens[f"r{n}"] == reference_tokens(tuple(range(n + 5)), 12)
    assert _flags(run.device).count(RESUMED) == 6
    assert run.scheduler.kv_epoch == 2


def test_a_stale_epoch_loses_no_request_not_even_one_that_was_new() -> None:
    run = Run(FakeDevice())
    run.add("old", (1, 2), max_tokens=10)
    run.send()
    run.land()
    run.device.new_epoch()
    run.add("new", (3, 4), max_tokens=10)
    run.send()
    while run.flights:
        run.land()
    assert run.scheduler.num_live == 2
    run.scheduler.new_epoch(run.device.epoch)
    run.until_idle()
    assert run.tokens["old"] == reference_tokens((1, 2), 10)
    assert run.tokens["new"] == reference_tokens((3, 4), 10)


def test_a_new_epoch_is_refused_while_steps_are_in_flight() -> None:
    run = Run(FakeDevice())
    run.add("r", (1,))
    run.send()
    with pytest.raises(InvalidRequest, match="2 steps are in flight"):
        run.scheduler.new_epoch(1)
