"""The scheduler against a device that checks every step and computes through block tables."""

from __future__ import annotations

import msgspec
import pytest

from engine.driving import Run
from engine.fake_device import FakeDevice, reference_tokens
from gpuworker.engine import SchedulerLimits
from gpuworker.errors import InvalidRequest
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


def test_nobody_is_admitted_to_blocks_that_running_requests_are_about_to_need() -> None:
    run = Run(FakeDevice(num_blocks=10, block_size=1))
    run.add("running", range(3), max_tokens=4)
    run.send()
    run.land()
    run.add("waiting", range(10, 14), max_tokens=2)
    run.until_idle()
    assert run.scheduler.statistics().num_preemptions == 0
    assert run.tokens["waiting"] == reference_tokens((10, 11, 12, 13), 2)


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


def test_the_limits_of_a_worker_need_its_block_pool() -> None:
    limits = FakeDevice(num_blocks=9).current_limits()
    assert SchedulerLimits.from_worker(limits, depth=3) == SchedulerLimits(
        block_size=4,
        num_blocks=9,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        depth=3,
    )
    with pytest.raises(InvalidRequest, match="num_blocks is 0"):
        SchedulerLimits.from_worker(msgspec.structs.replace(limits, num_blocks=0))
