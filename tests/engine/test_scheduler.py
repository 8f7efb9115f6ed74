"""The scheduler against a device that checks every step and computes through block tables."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.driving import Run
from engine.fake_worker import FakeDevice, reference_tokens
from gpuworker.engine import SchedulerLimits
from gpuworker.errors import InvalidRequest, StepFailed, WorkerFaulted
from gpuworker.step import RESUMED, SamplingParams, unpack_step


def _flags(device: FakeDevice) -> list[int]:
    return [
        flag
        for step in device.log
        for flag in unpack_step(
            step.buffer, step.num_rows, step.num_block_ids, step.num_token_ids
        ).flags.tolist()
    ]


def _scheduled(step: object) -> list[int]:
    return unpack_step(
        step.buffer, step.num_rows, step.num_block_ids, step.num_token_ids
    ).num_scheduled.tolist()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_batch_generates_what_each_request_generates_alone(depth: int) -> None:
    run = Run(FakeDevice(depth=depth), depth)
    prompts = {f"r{n}": tuple(range(n, n + 3 + n)) for n in range(12)}
    for name, prompt in prompts.items():
        run.add(name, prompt, max_tokens=9)
    run.until_idle()
    for name, prompt in prompts.items():
        assert run.tokens[name] == reference_tokens(prompt, 9)
        assert run.reason(name) == "length"
    assert run.device.slots == {}, "the worker was told of every end"
    assert run.scheduler.block_statistics().num_owned == 0


def test_a_prompt_longer_than_a_step_is_cut_into_chunks_and_decodes_go_first() -> None:
    run = Run(FakeDevice(max_num_batched_tokens=10), 1)
    run.add("short", range(3), max_tokens=12)
    run.send()
    run.land()
    run.add("long", range(40), max_tokens=3)
    run.until_idle()
    chunks = [_scheduled(step) for step in run.device.log[1:6]]
    assert chunks == [[1, 9], [1, 9], [1, 9], [1, 9], [1, 4]]
    assert run.tokens["long"] == reference_tokens(tuple(range(40)), 3)
    assert run.tokens["short"] == reference_tokens((0, 1, 2), 12)


def test_a_cached_prefix_is_computed_once_and_changes_no_token() -> None:
    run = Run(FakeDevice())
    shared = tuple(range(16))
    for name in ("first", "second", "third"):
        run.add(name, (*shared, len(name)), max_tokens=5)
        run.until_idle()
        assert run.tokens[name] == reference_tokens((*shared, len(name)), 5)
    assert run.scheduler.statistics().num_prefix_hits == 32
    assert run.scheduler.statistics().num_prefix_queries == 51


def test_a_prompt_that_is_cached_as_a_whole_still_computes_a_token() -> None:
    run = Run(FakeDevice())
    for name in ("first", "second"):
        run.add(name, range(16), max_tokens=2)
        run.until_idle()
    assert run.tokens["second"] == run.tokens["first"] == reference_tokens(tuple(range(16)), 2)
    assert run.scheduler.statistics().num_prefix_hits == 12


def test_generated_tokens_are_found_by_the_next_turn_of_a_conversation() -> None:
    run = Run(FakeDevice())
    run.add("turn 1", range(6), max_tokens=10)
    run.until_idle()
    conversation = (*range(6), *run.tokens["turn 1"], 5)
    run.add("turn 2", conversation, max_tokens=3)
    run.until_idle()
    assert run.scheduler.statistics().num_prefix_hits == 12, "15 tokens had been computed"
    assert run.tokens["turn 2"] == reference_tokens(conversation, 3)


def test_requests_of_different_salts_share_nothing() -> None:
    run = Run(FakeDevice())
    for name in ("a", "b"):
        run.add(name, range(16), max_tokens=2, cache_salt=name)
        run.until_idle()
    assert run.scheduler.statistics().num_prefix_hits == 0


def test_preemption_in_a_tiny_pool_changes_no_token() -> None:
    run = Run(FakeDevice(num_blocks=9))  # 32 tokens for four requests of up to 24
    prompts = [tuple(range(n, n + 6)) for n in range(4)]
    for n, prompt in enumerate(prompts):
        run.add(f"r{n}", prompt, max_tokens=18)
    run.until_idle()
    for n, prompt in enumerate(prompts):
        assert run.tokens[f"r{n}"] == reference_tokens(prompt, 18)
    assert run.scheduler.statistics().num_preemptions > 0
    assert RESUMED in _flags(run.device)
    assert list(run.ends) == ["r0", "r1", "r2", "r3"], "the youngest gives way"


def test_a_request_that_needs_every_block_gets_them() -> None:
    run = Run(FakeDevice(num_blocks=9))
    for n in range(4):
        run.add(f"r{n}", range(8 + n), max_tokens=25 - n)
    run.until_idle()
    for n in range(4):
        assert run.tokens[f"r{n}"] == reference_tokens(tuple(range(8 + n)), 25 - n)


def test_no_step_is_spent_on_a_length_that_was_known() -> None:
    run = Run(FakeDevice())
    run.add("r", range(4), max_tokens=5)
    run.until_idle()
    assert [step.num_rows for step in run.device.log] == [1, 1, 1, 1, 1, 0]
    assert run.device.log[-1].finished == ("r",)


def test_a_stop_token_voids_only_the_row_in_flight() -> None:
    expected = reference_tokens((1, 2, 3), 8)
    stop = expected[4]
    end = expected.index(stop) + 1
    run = Run(FakeDevice())
    run.add("r", (1, 2, 3), max_tokens=20, stop_token_ids=(stop,))
    run.until_idle()
    assert run.tokens["r"] == expected[:end]
    assert run.reason("r") == "stop"
    assert [step.num_rows for step in run.device.log] == [1] * (end + 1) + [0]


def test_generation_ends_at_max_model_len() -> None:
    run = Run(FakeDevice(max_model_len=10))
    run.add("r", range(7), max_tokens=50)
    run.until_idle()
    assert len(run.tokens["r"]) == 3
    assert run.reason("r") == "length"


def test_more_requests_than_slots_take_turns_and_reuse_slots_in_the_step_of_the_end() -> None:
    run = Run(FakeDevice(max_num_seqs=2))
    for n in range(7):
        run.add(f"r{n}", (n, 1), max_tokens=3)
    run.until_idle()
    for n in range(7):
        assert run.tokens[f"r{n}"] == reference_tokens((n, 1), 3)
    assert any(step.finished and step.new_requests for step in run.device.log)


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


def test_logprobs_come_with_the_tokens_that_asked_for_them() -> None:
    run = Run(FakeDevice())
    run.add("plain", (1,), max_tokens=1)
    run.add("two", (2,), max_tokens=1, sampling=SamplingParams(logprobs=2))
    run.add("none", (3,), max_tokens=1, sampling=SamplingParams(logprobs=0))
    run.send()
    step = run.flights.popleft()
    deltas = {d.request_id: d for d in run.scheduler.complete(step, run.device.execute(step))}
    assert deltas["plain"].logprobs == ()
    (two,) = deltas["two"].logprobs
    assert two.token_ids[0] == deltas["two"].token_ids[0]
    assert len(two.token_ids) == len(two.values) == 3
    assert two.values[0] == -float(two.token_ids[0])
    assert len(deltas["none"].logprobs[0].token_ids) == 1


def test_stop_tokens_travel_with_min_tokens() -> None:
    run = Run(FakeDevice())
    run.add("r", (1,), stop_token_ids=(9, 4), sampling=SamplingParams(min_tokens=2))
    run.send()
    assert run.flights[0].new_requests[0].sampling.stop_token_ids == (4, 9)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ((), 4, "no prompt tokens"),
        ((1,), 0, "max_tokens is 0"),
        ((-1,), 4, "outside"),
        (tuple(range(64)), 4, "64 prompt tokens and one to generate exceed max_model_len 64"),
        (tuple(range(20)), 14, "need 9 blocks of 4, the pool has 8"),
    ],
)
def test_what_can_never_be_computed_is_refused_at_once(
    prompt: tuple[int, ...], max_tokens: int, message: str
) -> None:
    run = Run(FakeDevice(num_blocks=9))
    with pytest.raises(InvalidRequest, match=message):
        run.add("r", prompt, max_tokens)
    run.add("fits", range(20), 13)
    with pytest.raises(InvalidRequest, match="still running"):
        run.add("fits", range(20), 13)
    run.until_idle()


def test_limits_that_cannot_work_are_refused() -> None:
    good = {
        "block_size": 4,
        "num_blocks": 9,
        "max_model_len": 64,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 8,
    }
    SchedulerLimits(**good)
    with pytest.raises(InvalidRequest, match="depth is 0"):
        SchedulerLimits(**good, depth=0)
    with pytest.raises(InvalidRequest, match="every request needs a token"):
        SchedulerLimits(**(good | {"max_num_batched_tokens": 7}))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_whatever_happens_the_tokens_are_those_of_a_lone_run(data: st.DataObject) -> None:
    depth = data.draw(st.integers(1, 3), "depth")
    num_seqs = data.draw(st.integers(1, 6), "max_num_seqs")
    device = FakeDevice(
        num_blocks=data.draw(st.integers(9, 24), "num_blocks"),
        block_size=data.draw(st.sampled_from([1, 2, 4, 8]), "block_size"),
        max_model_len=data.draw(st.integers(8, 30), "max_model_len"),
        max_num_seqs=num_seqs,
        max_num_batched_tokens=num_seqs + data.draw(st.integers(0, 12), "spare"),
        depth=depth,
    )
    run = Run(device, depth)
    rng = random.Random(data.draw(st.integers(0, 2**32), "seed"))
    prompts: dict[str, tuple[tuple[int, ...], int]] = {}
    aborted: set[str] = set()
    for step_id in range(0, 60, 7):
        if rng.random() < 0.2:
            device.fail_at[step_id + rng.randrange(7)] = StepFailed("injected")

    def disturb(rounds: int) -> None:
        if rounds < 30 and rng.random() < 0.6:
            name = f"r{len(prompts)}"
            prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12)))
            max_tokens = rng.randrange(1, 12)
            if rng.random() < 0.1:
                device.refuse.add(name)
            try:
                run.add(name, prompt, max_tokens)
            except InvalidRequest:
                return
            prompts[name] = (prompt, max_tokens)
        if prompts and rng.random() < 0.08:
            name = rng.choice(list(prompts))
            aborted.add(name)
            run.take(run.scheduler.abort(name))
        if rng.random() < 0.04:
            device.new_epoch()
        if not run.flights and run.scheduler.kv_epoch != device.epoch:
            run.scheduler.new_epoch(device.epoch)

    run.until_idle(disturb)
    for name, (prompt, max_tokens) in prompts.items():
        count = min(max_tokens, device.serving.max_model_len - len(prompt))
        expected = reference_tokens(prompt, count)
        reason = run.reason(name)
        if reason == "length":
            assert run.tokens[name] == expected
        else:
            assert run.tokens[name] == expected[: len(run.tokens[name])]
            assert reason == "refused" or name in aborted
            error = run.ends[name].error
            assert reason == "abort" or isinstance(error, StepFailed) or name in device.refuse
    assert run.scheduler.block_statistics().num_owned == 0


def test_three_hundred_random_requests_agree_with_lone_runs() -> None:
    rng = random.Random(7)
    run = Run(FakeDevice(num_blocks=40, max_num_batched_tokens=24))
    prefixes = [tuple(rng.randrange(50) for _ in range(12)) for _ in range(3)]
    prompts: dict[str, tuple[int, ...]] = {}
    for n in range(300):
        tail = tuple(rng.randrange(50) for _ in range(rng.randrange(1, 10)))
        prompts[f"r{n}"] = rng.choice(prefixes) + tail
        run.add(f"r{n}", prompts[f"r{n}"], max_tokens=rng.randrange(1, 30))
    run.until_idle()
    for name, prompt in prompts.items():
        assert run.tokens[name] == reference_tokens(prompt, len(run.tokens[name]))
        assert run.reason(name) == "length"
    statistics = run.scheduler.statistics()
    assert statistics.num_prefix_hits > 300 * 8
    assert statistics.num_preemptions > 0
    assert run.device.slots == {}
