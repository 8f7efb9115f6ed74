"""Layer 1. The live requests: what the worker knows of each, by slot.

All arrays are allocated once. save copies what a step is about to change, restore puts it back.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuworker.kernels.noise import derive_seed
from gpuworker.runner.params import Feature, features_of, normalized_top_k
from gpuworker.runner.shaping import Shaping
from gpuworker.step import Int32Array, NewRequest

__all__ = ["Request", "RequestTable", "SavedRequests"]

_SHAPED = Feature.ALLOWED | Feature.FORBIDDEN | Feature.BIAS | Feature.PENALTIES

_STATE = np.dtype(
    [
        ("live", np.bool_),
        ("num_prompt", np.int32),
        ("num_tokens", np.int32),
        ("num_computed", np.int32),
        ("num_blocks", np.int32),
        ("features", np.int32),
        ("top_k", np.int32),
        ("num_logprobs", np.int32),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("seed", np.uint64),
    ]
)


@dataclass(frozen=True, slots=True)
class Request:
    """What of a request is no number: its name, and its logit edits if it has any."""

    request_id: str
    shaping: Shaping | None


@dataclass(frozen=True, slots=True)
class SavedRequests:
    """The contents of some slots at one moment."""

    slots: Int32Array
    state: NDArray[np.void]
    blocks: Int32Array
    tokens: Int32Array
    requests: tuple[Request | None, ...]
    slot_of: dict[str, int]
    num_seeds: int


class RequestTable:
    """Up to max_num_seqs requests of up to max_model_len tokens in max_blocks blocks each.

    Columns are indexed by slot and mean nothing where live is False. Tokens are those of the
    prompt, then those of the output; the first num_computed have their keys and values in the
    cache. Entries of blocks beyond num_blocks are 0.
    """

    def __init__(
        self, *, max_num_seqs: int, max_model_len: int, max_blocks: int, vocab_size: int, seed: int
    ) -> None:
        self.vocab_size = vocab_size
        self.slot_of: dict[str, int] = {}
        self.requests: list[Request | None] = [None] * max_num_seqs
        self.tokens: Int32Array = np.zeros((max_num_seqs, max_model_len), np.int32)
        self.blocks: Int32Array = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._state: NDArray[np.void] = np.zeros(max_num_seqs, _STATE)
        self.live: NDArray[np.bool_] = self._state["live"]
        self.num_prompt: Int32Array = self._state["num_prompt"]
        self.num_tokens: Int32Array = self._state["num_tokens"]
        self.num_computed: Int32Array = self._state["num_computed"]
        self.num_blocks: Int32Array = self._state["num_blocks"]
        self.features: Int32Array = self._state["features"]
        self.top_k: Int32Array = self._state["top_k"]
        self.num_logprobs: Int32Array = self._state["num_logprobs"]
        self.temperature: NDArray[np.float32] = self._state["temperature"]
        self.top_p: NDArray[np.float32] = self._state["top_p"]
        self.min_p: NDArray[np.float32] = self._state["min_p"]
        self.seed: NDArray[np.uint64] = self._state["seed"]
        self._seed = seed
        self._num_seeds = 0

    def request(self, slot: int) -> Request:
        """Return the live request of a slot."""
        request = self.requests[slot]
        assert request is not None
        return request

    def output(self, slot: int) -> Int32Array:
        """View the output tokens of a slot."""
        return self.tokens[slot, self.num_prompt[slot] : self.num_tokens[slot]]

    def drop(self, request_id: str) -> None:
        """Forget a live request and free its slot."""
        slot = self.slot_of.pop(request_id)
        self.requests[slot] = None
        self.blocks[slot] = 0
        self._state[slot] = np.zeros((), _STATE)

    def admit(self, new: NewRequest, tokens: Int32Array) -> None:
        """Add a request with its known tokens [num_prompt + num_output] to a free slot.

        Without a seed of its own it gets the next one of the worker's stream.
        """
        slot, params = new.slot, new.sampling
        features = features_of(params, self.vocab_size)
        prompt, output = np.split(tokens, [new.num_prompt_tokens])
        shaping = Shaping(params, features, prompt, output) if features & _SHAPED else None
        self.requests[slot] = Request(new.request_id, shaping)
        self.slot_of[new.request_id] = slot
        self.tokens[slot, : tokens.size] = tokens
        self.live[slot] = True
        self.num_prompt[slot] = new.num_prompt_tokens
        self.num_tokens[slot] = tokens.size
        self.num_computed[slot] = 0
        self.features[slot] = features
        self.top_k[slot] = normalized_top_k(params, self.vocab_size)
        self.num_logprobs[slot] = -1 if params.logprobs is None else params.logprobs
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        if params.seed is not None:
            self.seed[slot] = params.seed
        else:
            self.seed[slot] = derive_seed(self._seed, self._num_seeds)
            self._num_seeds += 1

    def set_blocks(self, slot: int, block_ids: Int32Array, *, replace: bool) -> None:
        """Append block ids to a request's table, or let them be the table."""
        start = 0 if replace else int(self.num_blocks[slot])
        end = start + block_ids.size
        self.blocks[slot, start:end] = block_ids
        self.blocks[slot, end:] = 0
        self.num_blocks[slot] = end

    def append_tokens(self, slots: Int32Array, tokens: Int32Array) -> None:
        """Append one output token [N] to each request of slots [N]."""
        self.tokens[slots, self.num_tokens[slots]] = tokens
        self.num_tokens[slots] += 1
        penalized = (self.features[slots] & Feature.PENALTIES) != 0
        for slot, token in zip(slots[penalized].tolist(), tokens[penalized].tolist(), strict=True):
            shaping = self.request(slot).shaping
            assert shaping is not None
            assert shaping.seen is not None
            shaping.seen.append(token)

    def forget_kv(self) -> None:
        """Preempt every request: nothing is computed, no block is held."""
        self.num_computed[:] = 0
        self.num_blocks[:] = 0
        self.blocks[:] = 0

    def clear(self) -> None:
        """Drop every request."""
        for request_id in tuple(self.slot_of):
            self.drop(request_id)

    def save(self, slots: Int32Array) -> SavedRequests:
        """Copy what drop, admit and set_blocks change in these slots, and the seed stream."""
        return SavedRequests(
            slots=slots,
            state=self._state[slots],
            blocks=self.blocks[slots],
            tokens=self.tokens[slots],
            requests=tuple(self.requests[slot] for slot in slots.tolist()),
            slot_of=self.slot_of.copy(),
            num_seeds=self._num_seeds,
        )

    def restore(self, saved: SavedRequests) -> None:
        """Put back what save copied; append_tokens and forget_kv are not undone by this."""
        self._state[saved.slots] = saved.state
        self.blocks[saved.slots] = saved.blocks
        self.tokens[saved.slots] = saved.tokens
        for slot, request in zip(saved.slots.tolist(), saved.requests, strict=True):
            self.requests[slot] = request
        self.slot_of = saved.slot_of
        self._num_seeds = saved.num_seeds
