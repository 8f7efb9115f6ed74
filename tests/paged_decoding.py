"""A decoder with a paged cache, driven step by step: what a runner does, in the small."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from gpuworker.kernels.attention import AttentionBackend, kv_cache_shape
from gpuworker.kernels.batch import AttentionBatch, LayerKV
from gpuworker.model.decoder import Decoder
from gpuworker.model.description import ModelDescription
from gpuworker.model.manifest import is_ignorable, parameter_specs

__all__ = ["PagedDecoding", "load_params"]


def load_params(
    directory: Path, description: ModelDescription, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """Fill the parameters of a checkpoint directory by the manifest, and check it is used up."""
    with safe_open(directory / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    params: dict[str, torch.Tensor] = {}
    used: set[str] = set()
    for spec in parameter_specs(description, dtype):
        variant = next(v for v in spec.variants if all(s.name in tensors for s in v))
        param = torch.full(spec.shape, float("nan"), dtype=dtype)
        for source in variant:
            tensor = tensors[source.name]
            assert tuple(tensor.shape) == source.shape, source.name
            part = tensor[tuple(slice(*interval) for interval in source.source)]
            param[tuple(slice(*interval) for interval in source.target)] = part.to(dtype)
            used.add(source.name)
        assert not param.isnan().any(), spec.name
        params[spec.name] = param
    left = [n for n in tensors if n not in used and not is_ignorable(description, n)]
    assert not left
    return params


class PagedDecoding:
    """Requests of one batch with their blocks; unused cache slots are NaN."""

    def __init__(
        self,
        description: ModelDescription,
        params: Mapping[str, torch.Tensor],
        prompts: Sequence[Sequence[int]],
        *,
        max_len: int,
        scattered: bool,
        backend: AttentionBackend = "auto",
        block_size: int = 16,
    ) -> None:
        self.decoder = Decoder(
            description, params, max_model_len=max_len, attention_backend=backend
        )
        self.sequences = [list(prompt) for prompt in prompts]
        self._num_computed = [0] * len(prompts)
        self._block_size = block_size
        width = -(-max_len // block_size)
        num_blocks = width * len(prompts) + 1
        order = torch.arange(1, num_blocks)
        if scattered:
            order = order[torch.randperm(len(order), generator=torch.Generator().manual_seed(3))]
        self._table = order.view(len(prompts), width).int()
        shape = kv_cache_shape(
            num_blocks, block_size, description.num_kv_heads, description.head_size
        )
        dtype = params["embed.weight"].dtype
        self.kv = [
            LayerKV(*(torch.full(shape, float("nan"), dtype=dtype) for _ in range(2)))
            for _ in range(description.num_layers)
        ]

    def step(self, chunk: int) -> dict[int, torch.Tensor]:
        """Compute up to chunk tokens of each request that has any left.

        Returns the logits after the last token of each request that is computed to its end.
        """
        rows = [i for i, s in enumerate(self.sequences) if self._num_computed[i] < len(s)]
        query_lens, seq_lens, ids, positions, slots = [], [], [], [], []
        for row in rows:
            start = self._num_computed[row]
            end = min(start + chunk, len(self.sequences[row]))
            self._num_computed[row] = end
            query_lens.append(end - start)
            seq_lens.append(end)
            ids += self.sequences[row][start:end]
            positions += range(start, end)
            slots += [
                int(self._table[row, p // self._block_size]) * self._block_size
                + p % self._block_size
                for p in range(start, end)
            ]
        # Entries beyond a request's blocks are 0, as the contract says.
        table = self._table[rows].clone()
        for index, seq_len in enumerate(seq_lens):
            table[index, -(-seq_len // self._block_size) :] = 0
        batch = AttentionBatch(
            query_lens=tuple(query_lens),
            seq_lens=tuple(seq_lens),
            block_table=table,
            slot_mapping=torch.tensor(slots),
            block_size=self._block_size,
        )
        hidden = self.decoder.forward(torch.tensor(ids), torch.tensor(positions), self.kv, batch)
        last = torch.tensor(query_lens).cumsum(0) - 1
        logits = self.decoder.logits(hidden[last])
        return {
            row: logits[index]
            for index, row in enumerate(rows)
            if self._num_computed[row] == len(self.sequences[row])
        }

    def greedy(self, num_tokens: int, chunk: int) -> list[list[torch.Tensor]]:
        """Extend every request by num_tokens; returns the logits of each new token."""
        ends = [len(s) + num_tokens for s in self.sequences]
        steps: list[list[torch.Tensor]] = [[] for _ in self.sequences]
        while any(len(s) < end for s, end in zip(self.sequences, ends, strict=True)):
            for row, logits in self.step(chunk).items():
                if len(self.sequences[row]) < ends[row]:
                    steps[row].append(logits)
                    self.sequences[row].append(int(logits.argmax()))
            for row, end in enumerate(ends):
                if len(self.sequences[row]) == end:
                    self._num_computed[row] = end
        return steps
