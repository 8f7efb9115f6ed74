"""A step that fails leaves requests, tables and seeds bit by bit as they were."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.errors import (
    DeviceFault,
    OutOfDeviceMemory,
    PeerLost,
    ProtocolError,
    StepFailed,
    WorkerError,
)
from gpuworker.messages import ExecuteModel
from gpuworker.runner.runner import ModelRunner
from gpuworker.step import RESUMED, NewRequest, SamplingParams, StepRow, pack_step
from runner_state import snapshot
from runner_toys import (
    ToyDecoder,
    ToyScheduler,
    generate_alone,
    make_runner,
    make_step,
    new_request,
    sampled_per_row,
)

UNSEEDED = SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.2)
GREEDY = SamplingParams(temperature=0.0)


def busy_runner(decoder: ToyDecoder) -> ModelRunner:
    """Return a runner with three live requests of 8 tokens each, in blocks 1 to 9."""
    runner = make_runner(decoder)
    new = [new_request(name, slot, [slot + 1] * 7, UNSEEDED) for slot, name in enumerate("abc")]
    rows = [StepRow(slot, 7, 0, [3 * slot + 1, 3 * slot + 2]) for slot in range(3)]
    runner.execute(make_step(1, rows, new), 0)
    return runner


def eventful_step(step_id: int) -> ExecuteModel:
    """Finish a; b takes a new block; c is resumed elsewhere; d reuses slot 0; e is refused."""
    new = [new_request("d", 0, [9, 8, 7], UNSEEDED), new_request("e", 3, [])]
    rows = [
        StepRow(0, 3, 0, [1]),
        StepRow(1, 1, 7, [20]),
        StepRow(2, 8, 0, [21, 22, 23], RESUMED),
    ]
    return make_step(step_id, rows, new, finished=["a"])


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), StepFailed),
        (IndexError("index out of range in self"), StepFailed),
        (ZeroDivisionError(), StepFailed),
        (MemoryError(), OutOfDeviceMemory),
        (RuntimeError("DefaultCPUAllocator: not enough memory"), OutOfDeviceMemory),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), OutOfDeviceMemory),
        (torch.OutOfMemoryError("CUDA out of memory."), OutOfDeviceMemory),
        (torch.AcceleratorError("an illegal memory access was encountered"), DeviceFault),
        (PeerLost("rank 1 is silent"), PeerLost),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else value.__name__,
)
def test_failure_in_forward_restores_everything_and_the_step_can_be_sent_again(
    cause: Exception, expected: type[WorkerError]
) -> None:
    undisturbed = busy_runner(ToyDecoder())
    expected_tokens = sampled_per_row(undisturbed.execute(eventful_step(2), 0))

    decoder = ToyDecoder()
    runner = busy_runner(decoder)
    before = snapshot(runner)
    decoder.fail_with = cause
    with pytest.raises(expected) as caught:
        runner.execute(eventful_step(2), 0)
    if not isinstance(cause, WorkerError):
        assert caught.value.__cause__ is cause
        assert "step 2" in str(caught.value)
    assert snapshot(runner) == before
    decoder.fail_with = None
    output = runner.execute(eventful_step(2), 0)
    assert sampled_per_row(output) == expected_tokens
    assert [refusal.request_id for refusal in output.refusals] == ["e"]
    assert snapshot(runner) == snapshot(undisturbed)


def test_interruption_that_is_no_exception_restores_everything_too() -> None:
    decoder = ToyDecoder()
    runner = busy_runner(decoder)
    before = snapshot(runner)
    decoder.fail_with = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        runner.execute(eventful_step(2), 0)
    assert snapshot(runner) == before


def test_failure_in_sampling_restores_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = ToyDecoder()
    runner = busy_runner(decoder)
    before = snapshot(runner)

    def broken(hidden: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no logits")

    with monkeypatch.context() as patch:
        patch.setattr(decoder, "logits", broken)
        with pytest.raises(StepFailed, match="no logits"):
            runner.execute(eventful_step(2), 0)
    assert snapshot(runner) == before
    assert len(runner.execute(eventful_step(2), 0).refusals) == 1


def test_request_survives_failed_steps_with_the_tokens_it_gets_alone() -> None:
    decoder = ToyDecoder()
    scheduler = ToyScheduler(make_runner(decoder))
    sampling = SamplingParams(temperature=1.2, seed=3, presence_penalty=0.5)
    scheduler.add("x", [1, 2, 3], sampling)
    scheduler.generate("x", 3)
    tracked = scheduler.live["x"]
    row = StepRow(tracked.slot, 1, tracked.num_computed, [30])
    decoder.fail_with = RuntimeError("boom")
    with pytest.raises(StepFailed):
        scheduler.runner.execute(make_step(100, [row]), 0)
    decoder.fail_with = None
    assert scheduler.generate("x", 9) == generate_alone([1, 2, 3], sampling, 9)


SMALL = st.integers(-2, 9)
SAMPLINGS = st.sampled_from(
    [
        GREEDY,
        UNSEEDED,
        SamplingParams(temperature=-1.0),
        SamplingParams(logit_bias={999: 1.0}),
        SamplingParams(top_k=-5),
        SamplingParams(logprobs=2),
    ]
)
ROWS = st.one_of(
    st.sampled_from(
        [
            *(StepRow(slot, 1, 7) for slot in range(3)),
            *(StepRow(slot, 1, 7, [20 + slot]) for slot in range(3)),
            *(StepRow(slot, 8, 0, [12 + slot, 16 + slot], RESUMED) for slot in range(3)),
            *(StepRow(slot, 2, 0, [24 + slot]) for slot in range(4)),
        ]
    ),
    st.builds(
        StepRow,
        slot=st.sampled_from([0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, -1, 4]),
        num_scheduled=st.one_of(st.just(1), SMALL),
        num_computed=st.one_of(st.just(7), st.just(0), SMALL),
        new_block_ids=st.lists(st.one_of(st.integers(10, 31), st.integers(-1, 33)), max_size=4),
        flags=st.sampled_from([0, 0, RESUMED, RESUMED, 2]),
    ),
)
NEW = st.tuples(
    st.builds(
        NewRequest,
        request_id=st.sampled_from(["a", "b", "d", "d", "e", "e"]),
        slot=st.sampled_from([0, 1, 3, 3, 3, 3, 3, 4]),
        num_prompt_tokens=st.integers(0, 3),
        num_output_tokens=st.integers(0, 2),
        sampling=SAMPLINGS,
    ),
    st.lists(st.one_of(st.integers(0, 127), st.integers(-1, 130)), min_size=3, max_size=3),
)


@settings(deadline=None, max_examples=300)
@given(
    rows=st.lists(ROWS, max_size=4, unique_by=lambda row: row.slot),
    new=st.lists(NEW, max_size=3),
    finished=st.lists(st.sampled_from(["a", "b", "z"]), max_size=2),
    epoch=st.sampled_from([0] * 9 + [1]),
    step_id=st.sampled_from([2] * 9 + [1]),
    lie=st.sampled_from([0] * 9 + [1]),
    fail=st.booleans(),
)
def test_any_step_is_refused_as_a_whole_or_by_request_or_runs(
    rows: list[StepRow],
    new: list[tuple[NewRequest, list[int]]],
    finished: list[str],
    epoch: int,
    step_id: int,
    lie: int,
    fail: bool,
) -> None:
    decoder = ToyDecoder()
    runner = busy_runner(decoder)
    tokens = [
        token
        for request, values in new
        for token in (values * 2)[: request.num_prompt_tokens + request.num_output_tokens]
    ]
    step = ExecuteModel(
        step_id=step_id,
        kv_epoch=epoch,
        num_rows=len(rows),
        num_block_ids=sum(len(row.new_block_ids) for row in rows),
        num_token_ids=len(tokens) + lie,
        new_requests=tuple(request for request, _ in new),
        finished=tuple(finished),
        buffer=pack_step(rows, tokens),
    )
    before = snapshot(runner)
    decoder.fail_with = RuntimeError("injected") if fail else None
    with contextlib.suppress(ProtocolError, StepFailed):
        output = runner.execute(step, 0)
        sampled = sampled_per_row(output)
        assert len(sampled) == len(rows)
        assert all(0 <= token < 128 for row in sampled for token in row)
        refused = {refusal.request_id for refusal in output.refusals}
        assert all(refusal.message and refusal.code for refusal in output.refusals)
        after = snapshot(runner)
        assert after.last_step_id == step_id
        scheduled = {row.slot for row in rows}
        for name, slot in before.slot_of.items():
            if name in finished:
                continue
            # A new request under a live id is refused; the live one may well have run.
            row_refused = name in refused and name not in {request.request_id for request, _ in new}
            if slot not in scheduled or row_refused:
                assert after.slot(slot) == before.slot(slot)
        table = runner._table
        for slot in table.slot_of.values():
            held = table.blocks[slot, : table.num_blocks[slot]].tolist()
            assert len(set(held)) == len(held)
            assert all(1 <= block < 32 for block in held)
            assert not table.blocks[slot, table.num_blocks[slot] :].any()
            assert table.num_computed[slot] <= table.num_tokens[slot]
            assert table.num_computed[slot] <= 4 * table.num_blocks[slot]
        return
    assert snapshot(runner) == before
