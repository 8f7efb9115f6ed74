from __future__ import annotations

import math

import numpy as np
import torch

from gpuworker.kernels.noise import derive_seed, gumbel_noise, noise_keys, vocabulary_hash

CPU = torch.device("cpu")


def keys_of(seeds: list[int], positions: list[int]) -> torch.Tensor:
    return torch.from_numpy(
        noise_keys(np.asarray(seeds, np.uint64), np.asarray(positions, np.int32))
    )


def uniform_of(noise: torch.Tensor) -> torch.Tensor:
    """Undo the Gumbel quantile function."""
    return torch.exp(-torch.exp(-noise.double()))


def test_vocabulary_hash_is_distinct_per_token() -> None:
    hashes = vocabulary_hash(200_000, CPU)
    assert hashes.unique().numel() == 200_000


def test_noise_of_all_tokens_is_uniform_after_undoing_gumbel() -> None:
    hashes = vocabulary_hash(50_000, CPU)
    noise = gumbel_noise(hashes, keys_of([0, 1, 42, 2**64 - 1], [0, 0, 7, 100]))
    assert bool(torch.isfinite(noise).all())
    counts = torch.histc(uniform_of(noise).flatten().float(), bins=100, min=0.0, max=1.0)
    expected = noise.numel() / 100
    chi_square = float(((counts - expected) ** 2 / expected).sum())
    assert chi_square < 148.2  # 99.9 % point for 99 degrees of freedom


def test_noise_of_one_token_is_uniform_over_seeds_and_over_positions() -> None:
    hashes = vocabulary_hash(8, CPU)
    many = list(range(20_000))
    for keys in (keys_of(many, [3] * 20_000), keys_of([5] * 20_000, many)):
        uniform = uniform_of(gumbel_noise(hashes, keys))
        for token in range(8):
            counts = torch.histc(uniform[:, token].float(), bins=50, min=0.0, max=1.0)
            chi_square = float(((counts - 400.0) ** 2 / 400.0).sum())
            assert chi_square < 98.0  # 99.997 % point for 49 degrees; eight tokens, two ways


def test_noise_of_neighbouring_keys_and_tokens_is_uncorrelated() -> None:
    hashes = vocabulary_hash(50_000, CPU)
    noise = gumbel_noise(hashes, keys_of([1, 1, 2], [0, 1, 0]))
    pairs = [
        torch.stack([noise[0], noise[1]]),
        torch.stack([noise[0], noise[2]]),
        torch.stack([noise[0, :-1], noise[0, 1:]]),
    ]
    for pair in pairs:
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 4.0 / math.sqrt(50_000)


def test_noise_does_not_depend_on_the_other_rows_or_candidates() -> None:
    hashes = vocabulary_hash(1000, CPU)
    keys = keys_of([9, 8, 7], [1, 2, 3])
    full = gumbel_noise(hashes, keys)
    assert torch.equal(full[1:2], gumbel_noise(hashes, keys[1:2]))
    ids = torch.tensor([[5, 999], [0, 3], [17, 4]])
    assert torch.equal(full.gather(1, ids), gumbel_noise(hashes[ids], keys))


def test_noise_does_not_depend_on_where_a_vector_starts() -> None:
    hashes = vocabulary_hash(1003, CPU)
    keys = keys_of([4], [4])
    full = gumbel_noise(hashes, keys)
    for start in range(1, 9):
        assert torch.equal(full[:, start:], gumbel_noise(hashes[start:].clone(), keys))


def test_derived_seeds_are_distinct_and_fit_64_bits() -> None:
    seeds = {derive_seed(seed, index) for seed in range(50) for index in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**64 for seed in seeds)
