"""Random requests and disturbances: the tokens are those of lone runs."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.driving import Run
from engine.fake_device import FakeDevice, reference_tokens
from gpuworker.errors import InvalidRequest, StepFailed


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
        count = min(max_tokens, device.limits.max_model_len - len(prompt))
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
