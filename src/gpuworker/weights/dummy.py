"""Layer 1. Weights without a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gpuworker.model.parameters import ParameterSpec

__all__ = ["DUMMY_SEED", "fill_dummy"]

DUMMY_SEED = 1234
_BOUND = 1e-3


def fill_dummy(
    specs: Sequence[ParameterSpec], params: Mapping[str, torch.Tensor], seed: int = DUMMY_SEED
) -> None:
    """Fill parameters with small uniform random numbers in [-1e-3, 1e-3], norms included.

    Every parameter starts from the same seed, so its values depend on its number of elements
    and its dtype only, not on its name or place. Large enough to exercise every kernel, small
    enough that nothing overflows.
    """
    for spec in specs:
        param = params[spec.name]
        generator = torch.Generator(device=param.device).manual_seed(seed)
        param.uniform_(-_BOUND, _BOUND, generator=generator)
