from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.kernels import sampling as ops
from gpuworker.kernels.noise import noise_keys, vocabulary_hash

INF = float("inf")


def test_argmax_takes_the_first_of_equal_logits() -> None:
    assert ops.argmax(torch.tensor([[1.0, 3.0, 3.0], [2.0, 2.0, 0.0]])).tolist() == [1, 0]


def test_keep_only_hides_every_other_token() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    ops.keep_only_(logits[1], torch.tensor([0, 2]))
    assert logits.tolist() == [[1.0, 2.0, 3.0], [4.0, -INF, 6.0]]


def test_forbid_and_bias_touch_only_the_named_entries() -> None:
    logits = torch.zeros(2, 3)
    ops.forbid_(logits, torch.tensor([0, 1]), torch.tensor([2, 0]))
    ops.add_bias_(logits, torch.tensor([0, 1]), torch.tensor([1, 0]), torch.tensor([2.5, 9.0]))
    assert logits.tolist() == [[0.0, 2.5, -INF], [-INF, 0.0, 0.0]]


def test_penalties_follow_the_formulas() -> None:
    logits = torch.tensor([[3.0, -3.0, 3.0, 1.0]])
    ops.apply_penalties_(
        logits,
        torch.tensor([0, 0, 0]),
        torch.tensor([0, 1, 2]),
        torch.tensor([0.0, 0.0, 2.0]),
        repetition=torch.full((3,), 1.5),
        frequency=torch.full((3,), 0.25),
        presence=torch.full((3,), 0.125),
    )
    assert logits.tolist() == [[2.0, -4.5, 2.0 - 2 * 0.25 - 0.125, 1.0]]


def test_penalties_never_make_infinity_of_a_finite_logit() -> None:
    logits = torch.tensor([[3.0, 1.0]])
    one = torch.ones(1)
    ops.apply_penalties_(
        logits, torch.tensor([0]), torch.tensor([0]), one, one * 1e-45, one * 0, one * 0
    )
    scaled = ops.scale_(logits, one)
    assert scaled.tolist() == [[0.0, -torch.finfo(torch.float32).max]]


def test_scale_puts_the_maximum_at_zero_for_any_temperature() -> None:
    logits = torch.tensor([[1.0, 3.0], [1e5, -1e5], [-INF, -INF]])
    scaled = ops.scale_(logits, torch.tensor([2.0, 1e-5, 1.0]))
    assert scaled.tolist()[0] == [-1.0, 0.0]
    assert scaled.tolist()[1][0] == 0.0
    assert scaled.tolist()[2] == [-INF, -INF]


def test_min_p_drops_below_the_share_of_the_best_and_zero_drops_nothing() -> None:
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    scaled = (probs / 0.5).log().repeat(2, 1)
    kept = torch.isfinite(ops.keep_probable_(scaled, torch.tensor([0.29, 0.0])))
    assert kept.tolist() == [[True, True, True, False], [True, True, True, True]]


def test_top_k_takes_exactly_k_and_the_lower_ids_among_equals() -> None:
    logits = torch.tensor([[2.0, 5.0, 2.0, 7.0, 2.0, 2.0, 1.0]])
    values, ids = ops.top_candidates(logits, np.asarray([4], np.int32))
    chosen = ids[0][torch.isfinite(values[0])].tolist()
    assert chosen == [3, 1, 0, 2]


@given(
    rows=st.lists(
        st.tuples(st.lists(st.integers(-2, 2), min_size=12, max_size=12), st.integers(1, 12)),
        min_size=1,
        max_size=4,
    )
)
def test_top_k_is_the_head_of_the_full_order_for_every_row(
    rows: list[tuple[list[int], int]],
) -> None:
    logits = torch.tensor([row for row, _ in rows], dtype=torch.float32)
    values, ids = ops.top_candidates(logits, np.asarray([k for _, k in rows], np.int32))
    for index, (row, k) in enumerate(rows):
        order = sorted(range(12), key=lambda token: (-row[token], token))
        assert ids[index, :k].tolist() == order[:k]
        assert values[index, :k].tolist() == [row[token] for token in order[:k]]
        assert bool((values[index, k:] == -INF).all())


@pytest.mark.parametrize(
    ("top_p", "kept"), [(0.01, 1), (0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.94, 3), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_head_of_that_mass(top_p: float, kept: int) -> None:
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
    values = (probs / 0.5).log().float()
    keep = ops.nucleus(values, torch.tensor([top_p]))
    assert keep.tolist() == [[True] * kept + [False] * (4 - kept)]


@given(
    logits=st.lists(st.integers(-3, 3), min_size=1, max_size=12),
    top_p=st.floats(0.0625, 1.0, width=32),
)
def test_nucleus_of_any_size_is_the_head_of_the_full_order(logits: list[int], top_p: float) -> None:
    scaled = ops.scale_(torch.tensor([logits], dtype=torch.float32), torch.ones(1))
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    mass = scaled[0, order].double().exp()
    limit = torch.tensor([top_p])
    kept = int(ops.nucleus(scaled[:, order], limit, mass.sum()[None]).sum())
    ops.keep_nucleus_(scaled, limit, mass.sum()[None])
    assert torch.isfinite(scaled[0]).nonzero()[:, 0].tolist() == sorted(order[:kept])


def test_top_p_measures_against_the_whole_vocabulary_when_told() -> None:
    values = torch.log(torch.tensor([[1.0, 0.6]]))
    total = torch.tensor([3.2], dtype=torch.float64)
    assert ops.nucleus(values, torch.tensor([0.3]), total).tolist() == [[True, False]]
    assert ops.nucleus(values, torch.tensor([0.32]), total).tolist() == [[True, True]]


def test_draws_follow_the_softmax() -> None:
    probs = torch.tensor([0.4, 0.3, 0.2, 0.07, 0.03])
    num_draws = 40_000
    scaled = (probs / 0.4).log().repeat(num_draws, 1)
    seeds = np.full(num_draws, 123, np.uint64)
    keys = torch.from_numpy(noise_keys(seeds, np.arange(num_draws, dtype=np.int32)))
    hashes = vocabulary_hash(5, torch.device("cpu"))
    ids = torch.arange(5).repeat(num_draws, 1)
    plain = ops.draw(scaled, hashes, keys)
    counts = torch.bincount(plain, minlength=5).double()
    expected = probs.double() * num_draws
    assert float(((counts - expected) ** 2 / expected).sum()) < 18.5  # 99.9 %, 4 degrees
    assert torch.equal(plain, ops.draw_from_candidates(scaled, ids, hashes, keys))


def test_rank_counts_strictly_greater_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 3.0]])
    assert ops.rank_of(logits, torch.tensor([2.0])).tolist() == [2]
    assert ops.rank_of(logits, torch.tensor([3.0])).tolist() == [1]
