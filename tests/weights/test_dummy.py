"""Weights without a checkpoint."""

from __future__ import annotations

import pytest
import torch

from gpuworker.model.parameters import ParameterSpec
from gpuworker.weights.dummy import DUMMY_SEED, fill_dummy


def _fill(
    *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = DUMMY_SEED
) -> list[torch.Tensor]:
    specs = [ParameterSpec(f"p{i}", shape, dtype, ()) for i, shape in enumerate(shapes)]
    params = {spec.name: torch.full(spec.shape, torch.nan, dtype=dtype) for spec in specs}
    fill_dummy(specs, params, seed)
    return list(params.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_values_are_small_and_spread(dtype: torch.dtype) -> None:
    (values,) = _fill((100, 100), dtype=dtype)
    as_float = values.float()
    assert as_float.abs().max() <= 1.001e-3
    assert as_float.min() < -0.9e-3
    assert as_float.max() > 0.9e-3
    assert abs(as_float.mean()) < 5e-5


def test_values_depend_on_the_count_only() -> None:
    first, reshaped, again = _fill((6, 4), (24,), (6, 4))
    assert torch.equal(first, again)
    assert torch.equal(first.flatten(), reshaped)


def test_the_seed_changes_the_values() -> None:
    assert not torch.equal(_fill((8,))[0], _fill((8,), seed=1)[0])
