"""Whole rows through the sampler; the model is a matrix of logits."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.runner.requests import RequestTable
from gpuworker.runner.sampler import Sampled, Sampler
from gpuworker.step import NewRequest, SamplingParams

CPU = torch.device("cpu")
PROMPT = (3, 3, 5)
INF = float("inf")


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    outputs: list[tuple[int, ...]] | None = None,
) -> Sampled:
    """Sample row i of logits for a request with params[i] that has generated outputs[i]."""
    outputs = outputs or [()] * len(params)
    vocab_size = logits.shape[1]
    table = RequestTable(
        max_num_seqs=len(params), max_model_len=64, max_blocks=1, vocab_size=vocab_size, seed=0
    )
    for slot, (sampling, output) in enumerate(zip(params, outputs, strict=True)):
        new = NewRequest(
            request_id=str(slot),
            slot=slot,
            num_prompt_tokens=len(PROMPT),
            num_output_tokens=len(output),
            sampling=sampling,
        )
        table.admit(new, np.asarray([*PROMPT, *output], np.int32))
    slots = np.arange(len(params), dtype=np.int32)
    return Sampler(vocab_size, CPU).sample(logits.clone(), table, slots)


def tokens(
    logits: torch.Tensor,
    params: list[SamplingParams],
    outputs: list[tuple[int, ...]] | None = None,
) -> list[int]:
    return sample(logits, params, outputs).tokens.tolist()


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, vocab_size, generator=draw) * 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3])
def test_b26_tiny_temperatures_give_the_greedy_token(
    dtype: torch.dtype, temperature: float
) -> None:
    logits = (random_logits(16, 128) * 100.0).to(dtype).float()
    params = [SamplingParams(temperature=temperature, seed=seed) for seed in range(16)]
    assert tokens(logits, params) == logits.argmax(dim=-1).tolist()


def test_b27_top_k_edges_in_one_batch_equal_their_single_runs() -> None:
    edges = [-1, 0, 1, 128, 129, 10**7]
    params = [SamplingParams(top_k=k, seed=11) for k in edges]
    params.append(SamplingParams(temperature=0.0, seed=11))
    for seed in range(20):
        logits = random_logits(1, 128, seed).repeat(len(params), 1)
        batch = tokens(logits, params)
        assert batch == [tokens(logits[:1], [one])[0] for one in params]
        off = [batch[index] for index in (0, 1, 3, 4, 5)]
        assert len(set(off)) == 1
        assert batch[2] == batch[6] == int(logits[0].argmax())


def test_b27_top_k_one_is_greedy_with_ties() -> None:
    logits = torch.zeros(1, 128)
    logits[0, [40, 9, 77]] = 5.0
    for seed in range(10):
        assert tokens(logits, [SamplingParams(top_k=1, seed=seed)]) == [9]


@given(
    k=st.integers(2, 40),
    others=st.lists(st.integers(2, 127), max_size=3),
    seed=st.integers(0, 2**32),
    step=st.sampled_from([0.0, 0.5, 1.0]),
)
@settings(deadline=None)
def test_b27_top_k_row_does_not_depend_on_the_k_of_others_even_with_ties(
    k: int, others: list[int], seed: int, step: float
) -> None:
    logits = random_logits(1 + len(others), 128, seed % 1000)
    if step:
        logits = (logits / step).round() * step
    params = [SamplingParams(top_k=each, seed=seed, temperature=2.0) for each in (k, *others)]
    assert tokens(logits, params)[0] == tokens(logits[:1], params[:1])[0]


def test_b28_bias_of_minus_100_everywhere_still_yields_a_valid_token() -> None:
    logits = random_logits(2, 128)
    bias = dict.fromkeys(range(128), -100.0)
    params = [SamplingParams(logit_bias=bias, seed=1), SamplingParams(seed=1)]
    biased, plain = tokens(logits[:1].repeat(2, 1), params)
    # -100 rounds away low bits of the logits, nothing more.
    assert 0 <= biased < 128
    assert biased == plain


def test_bias_chooses_the_token_and_leaves_neighbours_alone() -> None:
    logits = random_logits(3, 128)
    greedy = SamplingParams(temperature=0.0)
    best = logits.argmax(dim=-1).tolist()
    biased = SamplingParams(temperature=0.0, logit_bias={17: 100.0, 18: 99.0})
    assert tokens(logits, [greedy, biased, greedy]) == [best[0], 17, best[2]]


def test_allowed_ids_limit_greedy_and_random_rows() -> None:
    logits = random_logits(40, 128)
    allowed = (100, 5, 77, 5)
    params = [
        SamplingParams(temperature=float(row % 2), allowed_token_ids=allowed, seed=row)
        for row in range(40)
    ]
    chosen = tokens(logits, params)
    assert set(chosen) <= set(allowed)
    best = [max(set(allowed), key=lambda token: float(logits[row, token])) for row in range(40)]
    assert chosen[::2] == best[::2]


def test_bad_sequence_bans_its_last_token_only_after_its_beginning() -> None:
    logits = torch.zeros(4, 16)
    logits[:, 7] = 2.0
    logits[:, 8] = 1.0
    params = [SamplingParams(temperature=0.0, bad_token_ids=((1, 2, 7),))] * 4
    outputs: list[tuple[int, ...]] = [(1, 2), (2,), (9, 1, 2), (1, 2, 3)]
    assert tokens(logits, params, outputs) == [8, 7, 8, 7]
    single = SamplingParams(temperature=0.0, bad_token_ids=((7,),))
    assert tokens(logits[:1], [single]) == [8]


def test_bad_sequence_is_not_matched_against_the_prompt() -> None:
    logits = torch.zeros(1, 16)
    logits[:, 7] = 2.0
    params = SamplingParams(temperature=0.0, bad_token_ids=((3, 5, 7), (5, 7)))
    assert tokens(logits, [params], [()]) == [7]


def test_stop_tokens_are_banned_until_min_tokens() -> None:
    logits = torch.zeros(3, 16)
    logits[:, 7] = 2.0
    logits[:, 8] = 1.0
    params = [SamplingParams(temperature=0.0, min_tokens=2, stop_token_ids=(7,))] * 3
    assert tokens(logits, params, [(), (1,), (1, 1)]) == [8, 8, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_contradicting_bans_still_give_an_allowed_token(temperature: float) -> None:
    params = SamplingParams(
        temperature=temperature, allowed_token_ids=(4, 6), bad_token_ids=((4,), (6,)), seed=0
    )
    assert tokens(random_logits(1, 16), [params])[0] in {4, 6}
    nothing = SamplingParams(
        temperature=temperature, bad_token_ids=tuple((i,) for i in range(16)), seed=0
    )
    assert 0 <= tokens(random_logits(1, 16), [nothing])[0] < 16


def test_penalties_count_prompt_for_repetition_and_output_for_the_others() -> None:
    logits = torch.zeros(3, 16)
    logits[:, 3] = 4.0  # twice in the prompt
    logits[:, 9] = 3.0  # twice in the output
    logits[:, 1] = 2.5
    outputs: list[tuple[int, ...]] = [(9, 9)] * 3
    repetition = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    frequency = SamplingParams(temperature=0.0, frequency_penalty=0.3, logit_bias={3: -2.0})
    presence = SamplingParams(temperature=0.0, presence_penalty=0.6, logit_bias={3: -2.0})
    # 4/2, 3/2, 2.5 -> 1; 2, 3-0.6, 2.5 -> 1; 2, 3-0.6, 2.5 -> 1
    assert tokens(logits, [repetition, frequency, presence], outputs) == [1, 1, 1]
    weaker = SamplingParams(temperature=0.0, presence_penalty=0.4, logit_bias={3: -2.0})
    assert tokens(logits[:1], [weaker], [(9, 9)]) == [9]
    assert tokens(logits[:1], [weaker], [()]) == [9]


def frequencies(params: SamplingParams, logits: torch.Tensor, num_draws: int) -> Counter[int]:
    seeded = [
        SamplingParams(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
        )
        for seed in range(num_draws)
    ]
    return Counter(tokens(logits.repeat(num_draws, 1), seeded))


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(), 6),
        (SamplingParams(temperature=0.5), 6),
        (SamplingParams(temperature=2.0), 6),
        (SamplingParams(top_k=3), 3),
        (SamplingParams(top_p=0.7), 3),
        (SamplingParams(min_p=0.3), 3),
        (SamplingParams(top_k=4, top_p=0.85), 3),
        (SamplingParams(top_p=0.9, min_p=0.5), 2),
    ],
)
def test_draws_follow_the_filtered_distribution(params: SamplingParams, kept: int) -> None:
    probs = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.07, 0.03]).double()
    num_draws = 8000
    counts = frequencies(params, probs.log().float()[None], num_draws)
    target = probs ** (1.0 / params.temperature)
    target[kept:] = 0.0
    target /= target.sum()
    assert set(counts) == set(range(kept))
    chi_square = sum(
        (counts[token] - float(target[token]) * num_draws) ** 2 / (float(target[token]) * num_draws)
        for token in range(kept)
    )
    assert chi_square < 20.5  # 99.9 % for 5 degrees of freedom


def test_nucleus_larger_than_the_candidate_list_equals_a_full_sort() -> None:
    vocab_size = 2000
    logits = random_logits(1, vocab_size) * 0.05
    probs = logits[0].double().softmax(dim=-1)
    order = probs.argsort(descending=True)
    cut = int((probs[order].cumsum(0) < 0.5).sum()) + 1
    assert cut > 300
    chosen = frequencies(SamplingParams(top_p=0.5), logits, 3000)
    assert set(chosen) <= set(order[:cut].tolist())
    assert len(chosen) > 256


def test_rows_of_every_feature_equal_their_single_runs() -> None:
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_k=40),
        SamplingParams(seed=3, top_k=7, top_p=0.6),
        SamplingParams(seed=4, top_p=0.8),
        SamplingParams(seed=5, top_p=0.999, temperature=5.0),
        SamplingParams(seed=6, min_p=0.05),
        SamplingParams(seed=7, repetition_penalty=1.3, frequency_penalty=0.4),
        SamplingParams(seed=8, logit_bias={4: 3.0, 9: -3.0}),
        SamplingParams(seed=9, allowed_token_ids=tuple(range(50))),
        SamplingParams(seed=10, bad_token_ids=((4,), (1, 2)), logprobs=3),
        SamplingParams(temperature=0.0, min_tokens=9, stop_token_ids=(1, 2)),
    ]
    outputs: list[tuple[int, ...]] = [(1, 7, 1)] * len(kinds)
    logits = random_logits(len(kinds), 600)
    alone = [
        tokens(logits[row : row + 1], [params], [(1, 7, 1)])[0] for row, params in enumerate(kinds)
    ]
    assert tokens(logits, kinds, outputs) == alone
    shuffled = np.random.default_rng(0).permutation(len(kinds)).tolist()
    assert tokens(logits[shuffled], [kinds[i] for i in shuffled], outputs) == [
        alone[i] for i in shuffled
    ]


def test_sampling_survives_rows_without_finite_logits() -> None:
    logits = torch.full((4, 16), -INF)
    logits[1] = float("nan")
    params = [
        SamplingParams(seed=0),
        SamplingParams(seed=0, top_p=0.5),
        SamplingParams(seed=0, top_k=3),
        SamplingParams(temperature=0.0),
    ]
    assert all(0 <= token < 16 for token in tokens(logits, params))


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = random_logits(4, 32)
    params = [
        SamplingParams(temperature=0.0, logprobs=2, logit_bias={3: 100.0}),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.3, top_k=4, seed=5, logprobs=0),
        SamplingParams(temperature=0.0, logprobs=4),
    ]
    result = sample(logits, params)
    assert result.logprobs is not None
    num_columns = result.logprobs.num_columns
    ids = np.frombuffer(result.logprobs.token_ids, np.int32).reshape(4, num_columns)
    values = np.frombuffer(result.logprobs.values, np.float32).reshape(4, num_columns)
    ranks = np.frombuffer(result.logprobs.ranks, np.int32)
    expected = logits.log_softmax(dim=-1)
    assert num_columns == 5
    for row, num_top in ((0, 2), (2, 0), (3, 4)):
        token = int(result.tokens[row])
        top = expected[row].topk(num_top)
        assert ids[row].tolist() == [token, *top.indices.tolist(), *[-1] * (4 - num_top)]
        np.testing.assert_allclose(
            values[row, : 1 + num_top],
            [float(expected[row, token]), *top.values.tolist()],
            rtol=1e-5,
        )
        assert ranks[row] == 1 + int((logits[row] > logits[row, token]).sum())
    assert ids[0, 0] == 3
    assert ids[1].tolist() == [-1] * 5
    assert ranks[1] == 0


def test_more_logprobs_than_tokens_report_the_vocabulary() -> None:
    result = sample(random_logits(1, 4), [SamplingParams(temperature=0.0, logprobs=9)])
    assert result.logprobs is not None
    ids = np.frombuffer(result.logprobs.token_ids, np.int32)
    assert sorted(ids[1:].tolist()) == [0, 1, 2, 3]
