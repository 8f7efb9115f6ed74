"""Layer 1. Counter-based random numbers: a draw is a function of (seed, position, token id).

There is no generator to advance, so a request's draws do not depend on its neighbours, on the
order of rows, on how a prompt was cut into chunks, or on a preemption; and noise is computed
for the candidates only. (seed, position) becomes a 64-bit key by SplitMix64 (Steele, Lea and
Flood, 2014); the key and the token id become 32 bits by the two-multiplication mixer with the
constants of C. Wellons's hash prospector, one half of the key before each multiplication.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["derive_seed", "gumbel_noise", "noise_keys", "vocabulary_hash"]

_MASK_64 = 2**64 - 1
_INCREMENT = 0x9E3779B97F4A7C15
_SPLITMIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_FIRST = 0x7FEB352D
_SECOND = 0x846CA68B - 2**32  # the same 32 bits as a signed number
# A 31-bit integer to (0, 1): float32 rounds the largest ones up to 2^31, which must not give 1.
_TO_UNIT = 2.0**-31 * (1.0 - 2.0**-23)


def derive_seed(seed: int, index: int) -> int:
    """Return the index-th 64-bit seed of a stream of seeds."""
    value = (seed + (index + 1) * _INCREMENT) & _MASK_64
    value = ((value ^ (value >> 30)) * _SPLITMIX[0]) & _MASK_64
    value = ((value ^ (value >> 27)) * _SPLITMIX[1]) & _MASK_64
    return value ^ (value >> 31)


def noise_keys(seeds: NDArray[np.uint64], positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return one key int32 [N, 2] per row from seeds [N] and positions [N]."""
    keys = _splitmix(_splitmix(seeds) + positions.astype(np.uint64))
    return keys.view(np.int32).reshape(-1, 2)


def _splitmix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    mixed = values + np.uint64(_INCREMENT)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_SPLITMIX[0])
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_SPLITMIX[1])
    return mixed ^ (mixed >> np.uint64(31))


def vocabulary_hash(vocab_size: int, device: torch.device) -> torch.Tensor:
    """Return int32 [vocab_size]: well-mixed, distinct bits per token id. Computed once."""
    bits = torch.arange(1, vocab_size + 1, dtype=torch.int32, device=device)
    bits = bits.mul_(_INCREMENT & 0x7FFFFFFF)
    return _mix(bits, torch.zeros((), dtype=torch.int32, device=device))


def _mix(bits: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Mix int32 bits in place; torch shifts arithmetically, so the sign bits are masked off."""
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_FIRST)
    bits.bitwise_xor_((bits >> 15).bitwise_and_(0x1FFFF)).add_(key).mul_(_SECOND)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def gumbel_noise(hashes: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise float32 [N, K] for keys int32 [N, 2].

    hashes are values of vocabulary_hash, [K] or [N, K]. argmax(log p + noise) is a draw from p
    (Gumbel-max). The uniform number is used at its small end, where float32 is fine-grained,
    because that is the end the winners come from.
    """
    bits = _mix(hashes ^ keys[:, :1], keys[:, 1:])
    uniform = bits.bitwise_and_(0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(_TO_UNIT)
    return uniform.neg_().log1p_().neg_().log_().neg_()
