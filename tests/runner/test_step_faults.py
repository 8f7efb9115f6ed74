"""Steps that are wrong: the whole step raises, or one request is refused and the others run."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest

from gpuworker.errors import InvalidRequest, StaleKVEpoch
from gpuworker.messages import ExecuteModel, StepOutput
from gpuworker.runner.runner import ModelRunner
from gpuworker.step import RESUMED, SamplingParams, StepRow, pack_step
from runner_state import snapshot
from runner_toys import (
    generate_alone,
    make_runner,
    make_step,
    new_request,
    sampled_per_row,
)

GREEDY = SamplingParams(temperature=0.0)
GOOD_PROMPT = [5, 6, 7]


def good_first_token() -> int:
    return generate_alone(GOOD_PROMPT, GREEDY, 1)[0]


def running(num_blocks: int = 32) -> tuple[ModelRunner, int]:
    """Return a runner with request "good" in slot 0, 4 tokens in block 1, and its last token."""
    runner = make_runner(num_blocks=num_blocks)
    step = make_step(1, [StepRow(0, 3, 0, [1])], [new_request("good", 0, GOOD_PROMPT)])
    return runner, sampled_per_row(runner.execute(step, 0))[0][0]


def good_row() -> StepRow:
    return StepRow(0, 1, 3)


def refused(output: StepOutput) -> dict[str, str]:
    return {refusal.request_id: refusal.message for refusal in output.refusals}


STEP_FAULTS: list[tuple[str, ExecuteModel, type[Exception], str]] = [
    (
        "buffer too short",
        ExecuteModel(step_id=2, kv_epoch=0, num_rows=1, buffer=memoryview(b"1234")),
        InvalidRequest,
        "4 bytes",
    ),
    ("stale epoch", make_step(2, [good_row()], kv_epoch=3), StaleKVEpoch, "epoch 3.*epoch 0"),
    ("step id again", make_step(1, [good_row()]), InvalidRequest, "step id 1"),
    ("slot twice", make_step(2, [good_row(), good_row()]), InvalidRequest, "slot 0"),
    ("slot -1", make_step(2, [good_row(), StepRow(-1, 1, 0)]), InvalidRequest, "slot -1"),
    ("slot 4", make_step(2, [good_row(), StepRow(4, 1, 0)]), InvalidRequest, "slot 4"),
    (
        "slot of new",
        make_step(2, [good_row()], [new_request("n", 4, [1])]),
        InvalidRequest,
        "slot 4 of new request 'n'",
    ),
    (
        "too many tokens",
        make_step(2, [good_row(), StepRow(1, 64, 0)]),
        InvalidRequest,
        "65 tokens; max_num_batched_tokens is 64",
    ),
    (
        "too many rows",
        make_step(2, [StepRow(slot, 1, 0) for slot in range(5)]),
        InvalidRequest,
        "5 rows; max_num_seqs is 4",
    ),
    (
        "known tokens missing",
        make_step(2, [good_row()], [(new_request("n", 1, [1, 2])[0], [1])]),
        InvalidRequest,
        "announce 2 known tokens; the step carries 1",
    ),
    (
        "negative number of blocks",
        ExecuteModel(
            step_id=2,
            kv_epoch=0,
            num_rows=2,
            buffer=np.asarray([0, 1, 1, 1, 3, 0, -1, 1, 0, 0], "<i4").data.cast("B"),
        ),
        InvalidRequest,
        "-1 new blocks",
    ),
    (
        "blocks missing",
        ExecuteModel(
            step_id=2,
            kv_epoch=0,
            num_rows=1,
            num_block_ids=0,
            buffer=pack_step([StepRow(0, 1, 3, [2])])[:-4],
        ),
        InvalidRequest,
        "block ids",
    ),
]


@pytest.mark.parametrize(
    ("step", "error", "text"),
    [fault[1:] for fault in STEP_FAULTS],
    ids=[fault[0] for fault in STEP_FAULTS],
)
def test_fault_of_the_step_raises_and_changes_nothing(
    step: ExecuteModel, error: type[Exception], text: str
) -> None:
    runner, token = running()
    before = snapshot(runner)
    with pytest.raises(error, match=text):
        runner.execute(step, 0)
    assert snapshot(runner) == before
    output = runner.execute(make_step(2, [good_row()]), 0)
    assert sampled_per_row(output) == [generate_alone(GOOD_PROMPT, GREEDY, 2)[1:]]
    assert token == good_first_token()


ROW_FAULTS: list[tuple[str, StepRow, str]] = [
    ("num_computed too low", StepRow(1, 1, 2), "num_computed is 2.*computed 5"),
    ("num_computed too high", StepRow(1, 1, 6), "num_computed is 6.*computed 5"),
    ("resumed beyond the known", StepRow(1, 1, 6, [9, 10], RESUMED), r"must be in \[0, 6\)"),
    ("resumed below zero", StepRow(1, 1, -1, [9, 10], RESUMED), r"must be in \[0, 6\)"),
    ("no tokens", StepRow(1, 0, 5), "0 tokens are scheduled"),
    ("negative tokens", StepRow(1, -3, 5), "-3 tokens are scheduled"),
    ("more than known", StepRow(1, 2, 5), "ends at token 7; only 6 are known"),
    ("beyond max_model_len", StepRow(1, 60, 5), "ends at token 65; max_model_len is 64"),
    ("block 0", StepRow(1, 1, 5, [0]), "block id 0"),
    ("block -1", StepRow(1, 1, 5, [-1]), "block id -1"),
    ("block 32 of 32", StepRow(1, 1, 5, [32]), "block id 32.*num_blocks=32"),
    ("block held already", StepRow(1, 1, 5, [3]), "block id 3 occurs twice"),
    ("block twice", StepRow(1, 1, 5, [9, 9]), "block id 9 occurs twice"),
    ("17 blocks", StepRow(1, 1, 5, list(range(4, 19))), "17 blocks; max_model_len 64"),
    ("block not supplied", StepRow(1, 5, 0, [9], RESUMED), "its 1 blocks of 4 hold 4"),
    ("resumed without blocks", StepRow(1, 5, 0, [], RESUMED), "its 0 blocks"),
    ("unknown flag", StepRow(1, 1, 5, [], 2), "flags 2"),
]


@pytest.mark.parametrize(
    ("row", "text"), [fault[1:] for fault in ROW_FAULTS], ids=[fault[0] for fault in ROW_FAULTS]
)
def test_b16_b25_faulty_row_is_refused_by_name_and_its_neighbour_runs(
    row: StepRow, text: str
) -> None:
    runner, _ = running()
    other = [new_request("other", 1, [1, 2, 3, 4, 5])]
    runner.execute(make_step(2, [StepRow(1, 5, 0, [2, 3])], other), 0)
    before = snapshot(runner)
    output = runner.execute(make_step(3, [row, good_row()]), 0)
    assert list(refused(output)) == ["other"]
    assert re.search(text, refused(output)["other"])
    expected = generate_alone(GOOD_PROMPT, GREEDY, 2)[1]
    assert sampled_per_row(output) == [[], [expected]]
    assert snapshot(runner).slot(1) == before.slot(1)
    following = runner.execute(make_step(4, [StepRow(1, 1, 5)]), 0)
    assert sampled_per_row(following) == [generate_alone([1, 2, 3, 4, 5], GREEDY, 2)[1:]]


def test_b25_table_filled_by_append_is_full_at_16_blocks() -> None:
    runner, _ = running(num_blocks=64)
    prompt = list(range(1, 64))
    runner.execute(
        make_step(2, [StepRow(1, 60, 0, list(range(10, 26)))], [new_request("x", 1, prompt)]), 0
    )
    output = runner.execute(make_step(3, [StepRow(1, 3, 60, [30]), good_row()]), 0)
    assert "17 blocks" in refused(output)["x"]
    assert len(sampled_per_row(output)[1]) == 1
    output = runner.execute(make_step(4, [StepRow(1, 3, 60)]), 0)
    assert sampled_per_row(output) == [generate_alone(prompt, GREEDY, 1)]


def test_sequence_of_max_model_len_tokens_cannot_go_on() -> None:
    runner = make_runner()
    prompt = list(range(1, 64))
    blocks = list(range(1, 17))
    runner.execute(make_step(1, [StepRow(0, 63, 0, blocks)], [new_request("x", 0, prompt)]), 0)
    output = runner.execute(make_step(2, [StepRow(0, 1, 63)]), 0)
    assert "64 tokens and max_model_len is 64" in refused(output)["x"]
    assert sampled_per_row(output) == [[]]
    assert runner.num_requests == 1


NEW_FAULTS = [
    ("live id", new_request("good", 1, [1]), "still live"),
    ("taken slot", new_request("n", 0, [1]), "taken by request 'good'"),
    ("empty prompt", new_request("n", 1, []), "prompt is empty"),
    ("long prompt", new_request("n", 1, [1] * 65), "65 known tokens"),
    ("long with output", new_request("n", 1, [1] * 60, output=[1] * 5), "65 known tokens"),
    ("token 128", new_request("n", 1, [1, 128]), "token id 128"),
    ("token -1", new_request("n", 1, [-1, 1]), "token id -1"),
    ("temperature", new_request("n", 1, [1], SamplingParams(temperature=-1.0)), "temperature"),
    ("NaN", new_request("n", 1, [1], SamplingParams(temperature=math.nan)), "temperature"),
    ("bias 128", new_request("n", 1, [1], SamplingParams(logit_bias={128: 5.0})), "id 128"),
    ("bias -1", new_request("n", 1, [1], SamplingParams(logit_bias={-1: 1.0})), "id -1"),
    ("bias 2^31", new_request("n", 1, [1], SamplingParams(logit_bias={2**31: 1.0})), "2147483648"),
    ("logprobs", new_request("n", 1, [1], SamplingParams(logprobs=6)), "max_logprobs"),
]


@pytest.mark.parametrize(
    ("new", "text"), [fault[1:] for fault in NEW_FAULTS], ids=[fault[0] for fault in NEW_FAULTS]
)
def test_b28_faulty_new_request_is_refused_by_name_and_does_not_exist(
    new: tuple[object, list[int]], text: str
) -> None:
    runner, _ = running()
    request, tokens = new_request("x", 2, [9, 9, 9])
    faulty, known = new
    rows = [StepRow(2, 3, 0, [8])]
    if faulty.slot != 0:  # type: ignore[attr-defined]
        rows = [good_row(), StepRow(faulty.slot, 1, 0, [7]), *rows]  # type: ignore[attr-defined]
    step = make_step(2, rows, [(faulty, known), (request, tokens)])  # type: ignore[list-item]
    before = snapshot(runner)
    output = runner.execute(step, 0)
    assert list(refused(output)) == [faulty.request_id]  # type: ignore[attr-defined]
    assert text in output.refusals[0].message
    assert runner.num_requests == 2
    sampled = sampled_per_row(output)
    assert sampled[-1] == generate_alone([9, 9, 9], GREEDY, 1)
    if len(rows) == 3:
        assert sampled[0] == generate_alone(GOOD_PROMPT, GREEDY, 2)[1:]
        assert sampled[1] == []
        assert snapshot(runner).slot(1) == before.slot(1)


def test_row_for_a_contested_slot_runs_neither_request() -> None:
    runner, _ = running()
    before = snapshot(runner)
    output = runner.execute(make_step(2, [good_row()], [new_request("n", 0, [1])]), 0)
    assert list(refused(output)) == ["n"]
    assert sampled_per_row(output) == [[]]
    assert snapshot(runner).slot(0) == before.slot(0)


def test_slot_given_to_two_new_requests_is_given_to_none() -> None:
    runner, _ = running()
    new = [new_request("a", 1, [1]), new_request("b", 1, [2]), new_request("c", 2, [3])]
    rows = [StepRow(1, 1, 0, [5]), StepRow(2, 1, 0, [6])]
    output = runner.execute(make_step(2, rows, new), 0)
    assert sorted(refused(output)) == ["a", "b"]
    assert [len(tokens) for tokens in sampled_per_row(output)] == [0, 1]
    assert runner.num_requests == 2


def test_same_new_id_twice_admits_the_first() -> None:
    runner, _ = running()
    new = [new_request("a", 1, [1]), new_request("a", 2, [2])]
    output = runner.execute(make_step(2, [], new), 0)
    assert list(refused(output)) == ["a"]
    assert runner.num_requests == 2


def test_row_without_a_request_and_unknown_finished_id_are_refused() -> None:
    runner, _ = running()
    output = runner.execute(make_step(2, [StepRow(3, 1, 0, [5]), good_row()], finished=["?"]), 0)
    assert refused(output) == {
        "?": "finished request '?' is not live",
        "": "slot 3 has no live request",
    }
    assert [len(tokens) for tokens in sampled_per_row(output)] == [0, 1]


def test_finishing_twice_in_a_step_refuses_the_second() -> None:
    runner, _ = running()
    output = runner.execute(make_step(2, finished=["good", "good"]), 0)
    assert list(refused(output)) == ["good"]
    assert runner.num_requests == 0


def test_step_without_a_bound_cache_is_refused() -> None:
    runner, _ = running()
    runner.unbind_kv_cache()
    with pytest.raises(InvalidRequest, match="no KV cache"):
        runner.execute(make_step(2, [good_row()]), 0)


def test_max_model_len_can_only_shrink_and_not_below_a_live_request() -> None:
    runner, _ = running()
    with pytest.raises(InvalidRequest, match="65"):
        runner.set_max_model_len(65)
    with pytest.raises(InvalidRequest, match="4 tokens"):
        runner.set_max_model_len(3)
    assert runner.set_max_model_len(8) == 64
    output = runner.execute(make_step(2, [], [new_request("n", 1, [1] * 9)]), 0)
    assert "max_model_len 8" in refused(output)["n"]
    assert runner.set_max_model_len(64) == 8
