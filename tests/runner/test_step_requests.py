"""Requests over their life: chunks, neighbours, preemption, reused ids and slots."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.step import RESUMED, SamplingParams, StepRow, unpack_sampled
from runner_toys import (
    ToyDecoder,
    ToyScheduler,
    generate_alone,
    make_runner,
    make_step,
    new_request,
    sampled_per_row,
)

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=0.8, seed=42)
RICH = SamplingParams(
    temperature=1.5,
    seed=7,
    top_k=60,
    top_p=0.95,
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=0.7,
    bad_token_ids=((1,), (2, 3)),
    min_tokens=6,
    stop_token_ids=(4, 5),
)
KINDS = pytest.mark.parametrize(
    "sampling", [GREEDY, SEEDED, RICH], ids=["greedy", "seeded", "rich"]
)
PROMPT = [11, 22, 33, 44, 55, 66, 77]


def test_toy_model_notices_a_wrong_block_and_a_wrong_position() -> None:
    def first(blocks: list[int], overwrite: int) -> int:
        runner = make_runner()
        new = [new_request("a", 0, PROMPT), new_request("b", 1, [9, 9, 9])]
        runner.execute(make_step(1, [StepRow(0, 6, 0, blocks)], new), 0)
        runner.execute(make_step(2, [StepRow(1, 3, 0, [overwrite])]), 0)
        return sampled_per_row(runner.execute(make_step(3, [StepRow(0, 1, 6)]), 0))[0][0]

    assert first([5, 6], 7) == generate_alone(PROMPT, GREEDY, 1)[0]
    assert first([5, 6], 5) != generate_alone(PROMPT, GREEDY, 1)[0]


@KINDS
def test_chunked_prompt_gives_the_same_tokens(sampling: SamplingParams) -> None:
    expected = generate_alone(PROMPT, sampling, 8)
    for chunks in ([1] * 7, [3, 4], [6, 1]):
        scheduler = ToyScheduler(make_runner())
        scheduler.add("x", PROMPT, sampling)
        for chunk in chunks[:-1]:
            output = scheduler.step({"x": chunk})
            assert sampled_per_row(output) == [[]]
        scheduler.step({"x": chunks[-1]})
        assert scheduler.generate("x", 8) == expected


def test_b23_finished_in_a_step_without_rows_frees_id_and_slot() -> None:
    scheduler = ToyScheduler(make_runner())
    scheduler.add("X", PROMPT, RICH)
    scheduler.generate("X", 6)
    scheduler.finish("X")
    output = scheduler.step({})
    assert output.num_rows == 0
    assert scheduler.runner.num_requests == 0
    scheduler.add("X", [1, 2, 3], GREEDY)
    assert scheduler.generate("X", 6) == generate_alone([1, 2, 3], GREEDY, 6)


@pytest.mark.parametrize("slot", [0, 1])
def test_b23_finished_and_new_under_one_id_in_one_step(slot: int) -> None:
    scheduler = ToyScheduler(make_runner())
    scheduler.add("X", PROMPT, RICH)
    scheduler.generate("X", 6)
    scheduler.finish("X")
    scheduler.add("X", [1, 2, 3], RICH, slot=slot)
    assert scheduler.generate("X", 6) == generate_alone([1, 2, 3], RICH, 6)
    assert scheduler.runner.num_requests == 1


def test_b23_new_id_that_is_live_leaves_the_running_request_untouched() -> None:
    scheduler = ToyScheduler(make_runner())
    scheduler.add("X", PROMPT, RICH)
    scheduler.generate("X", 4)
    scheduler.step_id += 1
    message = make_step(
        scheduler.step_id, [StepRow(1, 2, 0, [31])], [new_request("X", 1, [1, 2], GREEDY)]
    )
    output = scheduler.runner.execute(message, 0)
    assert [refusal.request_id for refusal in output.refusals] == ["X"]
    assert scheduler.generate("X", 8) == generate_alone(PROMPT, RICH, 8)


def test_zero_row_step_admits_a_request_for_a_later_step() -> None:
    decoder = ToyDecoder()
    runner = make_runner(decoder)
    output = runner.execute(make_step(1, [], [new_request("x", 2, PROMPT)]), 0)
    assert (output.num_rows, runner.num_requests, decoder.num_forwards) == (0, 1, 0)
    output = runner.execute(make_step(2, [StepRow(2, 7, 0, [4, 2])]), 0)
    assert sampled_per_row(output) == [generate_alone(PROMPT, GREEDY, 1)]


@KINDS
@pytest.mark.parametrize("chunks", [(12,), (5, 7)], ids=["whole", "two chunks"])
@pytest.mark.parametrize("newcomer", [False, True], ids=["alone", "with a new request"])
def test_b24_resumed_request_continues_as_if_never_preempted(
    sampling: SamplingParams, chunks: tuple[int, ...], newcomer: bool
) -> None:
    scheduler = ToyScheduler(make_runner())
    scheduler.add("x", PROMPT, sampling)
    scheduler.generate("x", 5)
    held = list(scheduler.live["x"].blocks)
    scheduler.preempt("x")
    # The freed blocks go to another request, which overwrites them.
    scheduler.add("thief", [99] * 9, GREEDY)
    scheduler.free = [block for block in scheduler.free if block not in held] + held
    scheduler.step({"thief": 9})
    assert set(scheduler.live["thief"].blocks) & set(held)
    if newcomer:
        scheduler.add("new", [1, 2, 3], GREEDY)
    for index, chunk in enumerate(chunks):
        scheduler.step({"x": chunk, "new": 3} if newcomer and index == 0 else {"x": chunk})
    assert scheduler.live["x"].blocks != held
    assert scheduler.generate("x", 12) == generate_alone(PROMPT, sampling, 12)
    if newcomer:
        assert (
            scheduler.generate("new", 3)
            == generate_alone([1, 2, 3], GREEDY, 10)[: len(scheduler.live["new"].output)]
        )


def test_b24_resumed_blocks_replace_the_table() -> None:
    decoder = ToyDecoder()
    runner = make_runner(decoder)
    runner.execute(make_step(1, [StepRow(0, 7, 0, [1, 2, 3])], [new_request("x", 0, PROMPT)]), 0)
    output = runner.execute(make_step(2, [StepRow(0, 8, 0, [20, 10], RESUMED)]), 0)
    assert output.refusals == ()
    assert decoder.batches[-1].block_table.tolist() == [[20, 10]]
    assert decoder.batches[-1].slot_mapping.tolist() == [80, 81, 82, 83, 40, 41, 42, 43]
    table = runner._table
    assert table.blocks[0].tolist() == [20, 10] + [0] * 14


@pytest.mark.parametrize("sampling", [SEEDED, RICH], ids=["seeded", "rich"])
def test_b29_seeded_tokens_do_not_depend_on_neighbours_or_rows(sampling: SamplingParams) -> None:
    unseeded = SamplingParams(temperature=0.8)
    alone = generate_alone(PROMPT, sampling, 16)

    beside_unseeded = ToyScheduler(make_runner())
    beside_unseeded.add("n", [3, 1, 4], unseeded)
    beside_unseeded.add("x", PROMPT, sampling)
    assert beside_unseeded.generate("x", 16)[:16] == alone

    one_finishes = ToyScheduler(make_runner())
    for name in ("a", "b", "c"):
        one_finishes.add(name, [ord(name)], unseeded)
    one_finishes.step()
    one_finishes.add("x", PROMPT, sampling)
    one_finishes.generate("x", 8)
    one_finishes.finish("b")
    assert one_finishes.generate("x", 16) == alone

    for slot in (0, 3):
        placed = ToyScheduler(make_runner())
        placed.add("x", PROMPT, sampling, slot=slot)
        for index in range(3):
            placed.add(str(index), [index + 1], unseeded, slot=(slot + 1 + index) % 4)
        order = ["x", "0", "1", "2"] if slot == 0 else ["2", "1", "0", "x"]
        while len(placed.live["x"].output) < 16:
            placed.step(
                {
                    name: placed.live[name].num_known - placed.live[name].num_computed
                    for name in order
                }
            )
        assert placed.live["x"].output == alone


def test_b29_equal_seeds_under_different_ids_give_equal_tokens() -> None:
    scheduler = ToyScheduler(make_runner())
    scheduler.add("a", PROMPT, SEEDED)
    scheduler.add("b", PROMPT, SEEDED)
    scheduler.generate("a", 10)
    assert scheduler.live["a"].output == scheduler.live["b"].output


def test_unseeded_requests_differ_but_repeat_with_the_worker_seed() -> None:
    unseeded = SamplingParams(temperature=1.0)

    def run(seed: int) -> tuple[list[int], list[int]]:
        scheduler = ToyScheduler(make_runner(seed=seed))
        scheduler.add("a", PROMPT, unseeded)
        scheduler.add("b", PROMPT, unseeded)
        scheduler.generate("a", 10)
        return scheduler.live["a"].output, scheduler.live["b"].output

    first = run(1)
    assert first[0] != first[1]
    assert run(1) == first
    assert run(2) != first


def test_request_migrated_with_its_output_continues_the_same() -> None:
    expected = generate_alone(PROMPT, RICH, 10)
    runner = make_runner()
    new = [new_request("m", 1, PROMPT, RICH, output=expected[:4])]
    output = runner.execute(make_step(1, [StepRow(1, 11, 0, [1, 2, 3, 4, 5])], new), 0)
    tokens = sampled_per_row(output)[0]
    for step_id in range(2, 7):
        row = StepRow(1, 1, 9 + step_id)
        tokens += sampled_per_row(runner.execute(make_step(step_id, [row]), 0))[0]
    assert tokens == expected[4:]


def test_prefix_computed_by_another_request_is_used() -> None:
    decoder = ToyDecoder()
    runner = make_runner(decoder)
    runner.execute(make_step(1, [StepRow(0, 7, 0, [1, 2])], [new_request("a", 0, PROMPT)]), 0)
    shared = [*PROMPT[:4], 100, 101]
    output = runner.execute(
        make_step(2, [StepRow(1, 2, 4, [1, 3])], [new_request("b", 1, shared)]), 0
    )
    assert decoder.batches[-1].query_lens == (2,)
    assert decoder.batches[-1].seq_lens == (6,)
    assert sampled_per_row(output) == [generate_alone(shared, GREEDY, 1)]


@KINDS
def test_forgotten_kv_preempts_and_requests_go_on_from_the_start(sampling: SamplingParams) -> None:
    scheduler = ToyScheduler(make_runner())
    scheduler.add("x", PROMPT, sampling)
    scheduler.generate("x", 5)
    scheduler.runner.forget_kv()
    assert scheduler.runner.num_requests == 1
    scheduler.kv_epoch = 1
    for tracked in scheduler.live.values():
        tracked.blocks, tracked.num_computed = [], 0
    assert scheduler.generate("x", 12) == generate_alone(PROMPT, sampling, 12)


def test_clear_drops_requests_and_restarts_step_ids() -> None:
    scheduler = ToyScheduler(make_runner())
    scheduler.add("x", PROMPT, RICH)
    scheduler.generate("x", 3)
    scheduler.runner.clear()
    assert scheduler.runner.num_requests == 0
    output = scheduler.runner.execute(
        make_step(0, [StepRow(0, 7, 0, [1, 2])], [new_request("x", 0, PROMPT)]), 0
    )
    assert sampled_per_row(output) == [generate_alone(PROMPT, GREEDY, 1)]


def test_output_names_the_step_and_counts_every_row() -> None:
    runner = make_runner()
    new = [new_request("a", 2, [1, 2]), new_request("b", 0, [3, 4])]
    rows = [StepRow(2, 1, 0, [1]), StepRow(0, 2, 0, [2])]
    output = runner.execute(make_step(9, rows, new, kv_epoch=4), 4)
    counts, tokens = unpack_sampled(output.buffer, output.num_rows)
    assert (output.step_id, output.kv_epoch, output.num_rows) == (9, 4, 2)
    assert counts.tolist() == [0, 1]
    assert tokens.size == 1
    assert output.step_s > 0.0
    assert output.logprobs is None


@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_any_schedule_gives_each_request_the_tokens_it_gets_alone(data: st.DataObject) -> None:
    kinds = [GREEDY, SEEDED, RICH]
    scheduler = ToyScheduler(make_runner())
    prompts = {f"r{i}": [1 + i * 7 + j for j in range(1 + 3 * i)] for i in range(4)}
    waiting = list(prompts)
    for _ in range(14):
        if waiting and data.draw(st.booleans()):
            name = waiting.pop(0)
            scheduler.add(name, prompts[name], kinds[len(waiting) % 3])
        victims = [name for name, tracked in scheduler.live.items() if tracked.blocks]
        if victims and data.draw(st.integers(0, 5)) == 0:
            scheduler.preempt(data.draw(st.sampled_from(victims)))
        scheduled: dict[str, int] = {}
        for name in data.draw(st.permutations(list(scheduler.live))):
            tracked = scheduler.live[name]
            rest = tracked.num_known - tracked.num_computed
            count = data.draw(st.integers(0, min(rest, 12)))
            if count:
                scheduled[name] = count
        scheduler.step(scheduled)
    for index, name in enumerate(prompts):
        if name in scheduler.live:
            output = scheduler.live[name].output
            sampling = kinds[(3 - index) % 3]
            assert (
                output
                == generate_alone(prompts[name], sampling, max(len(output), 1))[: len(output)]
            )
