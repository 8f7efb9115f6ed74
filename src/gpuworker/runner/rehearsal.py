"""Layer 1. Forward passes without requests: to measure memory, to warm up, to keep step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpuworker.config import LimitsConfig
from gpuworker.errors import InvalidRequest
from gpuworker.kernels.attention import kv_cache_shape
from gpuworker.kernels.batch import LayerKV
from gpuworker.runner.batch import ForwardInputs, dummy_inputs
from gpuworker.runner.decoder import DecoderLike
from gpuworker.runner.kv_cache import NULL_BLOCK, KVLayer
from gpuworker.runner.requests import RequestTable
from gpuworker.runner.sampler import Sampler
from gpuworker.step import Int32Array, NewRequest, SamplingParams

__all__ = ["Rehearsal", "sampler_shapes"]

# Known tokens of a made-up request; enough for every sampler feature to have something to do.
_TOKENS = 4


class Rehearsal:
    """Runs made-up batches; owns no state that a step could see."""

    def __init__(
        self,
        decoder: DecoderLike,
        sampler: Sampler,
        *,
        vocab_size: int,
        kv_layers: Sequence[KVLayer],
        limits: LimitsConfig,
        block_size: int,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._kv_layers = tuple(kv_layers)
        self._limits = limits
        self._block_size = block_size
        self._device = device

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, kv: Sequence[LayerKV], max_model_len: int) -> None:
        """Run num_tokens tokens, evenly over up to max_num_seqs requests, in the null block."""
        num_rows = min(num_tokens, self._limits.max_num_seqs)
        most = min(self._limits.max_num_batched_tokens, self._limits.max_num_seqs * max_model_len)
        if not 1 <= num_tokens <= most:
            raise InvalidRequest(
                f"a dummy batch of {num_tokens} tokens is outside [1, {most}], the largest step"
            )
        query_lens = np.full(num_rows, num_tokens // num_rows, np.int32)
        query_lens[: num_tokens % num_rows] += 1
        self._forward(self._null_block_inputs(query_lens), kv)

    @torch.inference_mode()
    def profile_run(self, max_model_len: int) -> int:
        """Run the largest batch, its logits and the sampler; return the temporary cache's bytes.

        One request computes the last chunk of the longest sequence, the others share the rest
        of max_num_batched_tokens. All layers of a kind share one temporary cache, and all
        requests the same blocks: the contents do not matter, only the sizes do.
        """
        query_lens = self._largest_batch(max_model_len)
        seq_lens = query_lens.copy()
        seq_lens[0] = max_model_len
        max_blocks = -(-max_model_len // self._block_size)
        shared = {
            layer: LayerKV(*(self._zero_cache(layer, 1 + max_blocks) for _ in range(2)))
            for layer in set(self._kv_layers)
        }
        kv = [shared[layer] for layer in self._kv_layers]
        blocks = np.arange(1, max_blocks + 1, dtype=np.int32)
        inputs = dummy_inputs(
            query_lens,
            seq_lens,
            np.tile(blocks, (query_lens.size, 1)),
            block_size=self._block_size,
            device=self._device,
        )
        hidden = self._forward(inputs, kv)
        num_rows = self._limits.max_num_seqs
        repeats = -(-num_rows // hidden.shape[0])
        for params in sampler_shapes(self._limits):
            self._sample(hidden.repeat(repeats, 1)[:num_rows], [params])
        return sum(cache.k.nbytes + cache.v.nbytes for cache in shared.values())

    @torch.inference_mode()
    def warm_up(self, kv: Sequence[LayerKV], max_model_len: int) -> int:
        """Run prefill, decode and the sampler at the sizes of serving; return their number."""
        largest = self._largest_batch(max_model_len)
        batches = [largest]
        num_rows = 1
        while num_rows < self._limits.max_num_seqs:
            batches.append(np.ones(num_rows, np.int32))
            num_rows *= 2
        batches.append(np.ones(self._limits.max_num_seqs, np.int32))
        features = sampler_shapes(self._limits)
        num_sampler_runs = 0
        for query_lens in batches:
            inputs = self._null_block_inputs(query_lens)
            hidden = self._forward(inputs, kv)
            last = torch.from_numpy(inputs.last_tokens).to(self._device)
            hidden = hidden.index_select(0, last)
            self._sample(hidden, features)
            if query_lens.size in (1, self._limits.max_num_seqs):
                for params in features:
                    self._sample(hidden, [params])
                num_sampler_runs += len(features)
        return len(batches) + num_sampler_runs

    def _largest_batch(self, max_model_len: int) -> Int32Array:
        """Return query lengths that add up to the largest step, the longest chunk first."""
        num_rows = self._limits.max_num_seqs
        total = min(self._limits.max_num_batched_tokens, num_rows * max_model_len)
        longest = min(max_model_len, total - (num_rows - 1))
        rest = np.full(num_rows - 1, 0, np.int32)
        if rest.size:
            rest += (total - longest) // rest.size
            rest[: (total - longest) % rest.size] += 1
        return np.concatenate([np.asarray([longest], np.int32), rest])

    def _null_block_inputs(self, query_lens: Int32Array) -> ForwardInputs:
        width = -(-int(query_lens.max()) // self._block_size)
        return dummy_inputs(
            query_lens,
            query_lens,
            np.full((query_lens.size, width), NULL_BLOCK, np.int32),
            block_size=self._block_size,
            device=self._device,
        )

    def _zero_cache(self, layer: KVLayer, num_blocks: int) -> torch.Tensor:
        shape = kv_cache_shape(num_blocks, self._block_size, layer.num_kv_heads, layer.head_size)
        return torch.zeros(shape, dtype=layer.dtype, device=self._device)

    def _forward(self, inputs: ForwardInputs, kv: Sequence[LayerKV]) -> torch.Tensor:
        return self._decoder.forward(inputs.input_ids, inputs.positions, kv, inputs.attention)

    def _sample(self, hidden: torch.Tensor, features: Sequence[SamplingParams]) -> None:
        """Sample a token of made-up requests from hidden [N, H], features taken in turns."""
        num_rows = hidden.shape[0]
        table = RequestTable(
            max_num_seqs=num_rows,
            max_model_len=_TOKENS,
            max_blocks=1,
            vocab_size=self._vocab_size,
            seed=0,
        )
        tokens = np.zeros(_TOKENS, np.int32)
        for slot in range(num_rows):
            new = NewRequest(
                request_id=str(slot),
                slot=slot,
                num_prompt_tokens=_TOKENS // 2,
                num_output_tokens=_TOKENS // 2,
                sampling=features[slot % len(features)],
            )
            table.admit(new, tokens)
        logits = self._decoder.logits(hidden)
        self._sampler.sample(logits, table, np.arange(num_rows, dtype=np.int32))


def sampler_shapes(limits: LimitsConfig) -> tuple[SamplingParams, ...]:
    """Return sampling parameters that together use every path of the sampler."""
    return (
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_k=50, top_p=0.9, min_p=0.01),
        # So flat that the nucleus is larger than any list of candidates.
        SamplingParams(temperature=1e6, top_p=0.999, logprobs=limits.max_logprobs),
        SamplingParams(
            temperature=0.9,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=0.5,
            logit_bias={0: 1.0},
            allowed_token_ids=(0, 1),
            bad_token_ids=((0, 1),),
            min_tokens=_TOKENS,
            stop_token_ids=(0,),
            logprobs=limits.max_logprobs,
        ),
    )
