"""A small exact model over the paged cache, and a scheduler's bookkeeping for tests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gpuworker.config import LimitsConfig
from gpuworker.kernels.attention import kv_cache_shape
from gpuworker.kernels.batch import AttentionBatch, LayerKV
from gpuworker.messages import ExecuteModel, StepOutput
from gpuworker.runner.kv_cache import KVLayer
from gpuworker.runner.runner import ModelRunner
from gpuworker.step import (
    RESUMED,
    NewRequest,
    SamplingParams,
    StepRow,
    pack_step,
    unpack_sampled,
)

VOCAB = 128
HEAD = 4
LAYERS = (KVLayer(1, HEAD, torch.float64), KVLayer(1, HEAD, torch.float64))
CPU = torch.device("cpu")


class ToyDecoder:
    """Logits that depend on every token of the sequence and on its position, exactly.

    Each layer stores a vector per (token, position) and sums the cached vectors of the whole
    sequence one after the other in float64, so that chunks and neighbours change no bit, and a
    wrong block, slot or position changes everything.
    """

    def __init__(self, *, spread: float = 3.0, dtype: torch.dtype = torch.float32) -> None:
        draw = torch.Generator().manual_seed(7)
        self.embed = torch.randn(VOCAB, HEAD, generator=draw, dtype=torch.float64)
        self.head = torch.randn(len(LAYERS) * HEAD, VOCAB, generator=draw, dtype=torch.float64)
        self.spread = spread
        self.dtype = dtype
        self.fail_with: BaseException | None = None
        self.num_forwards = 0
        self.batches: list[AttentionBatch] = []

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        kv: Sequence[LayerKV],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        assert input_ids.dtype == positions.dtype == batch.slot_mapping.dtype == torch.int64
        assert batch.block_table.dtype == torch.int32
        self.num_forwards += 1
        self.batches.append(batch)
        hidden = []
        for layer, cache in enumerate(kv):
            key = self.embed[input_ids] * (1.0 + 0.01 * layer) + torch.sin(
                positions[:, None].double() * (0.1 + 0.05 * layer)
            )
            k = cache.k.view(-1, HEAD)
            k[batch.slot_mapping] = key
            cache.v.view(-1, HEAD)[batch.slot_mapping] = -key
            hidden.append(self._attend(k, cache.v.view(-1, HEAD), batch))
        if self.fail_with is not None:
            raise self.fail_with
        return torch.cat(hidden, dim=-1)

    def _attend(self, k: torch.Tensor, v: torch.Tensor, batch: AttentionBatch) -> torch.Tensor:
        outputs = []
        for row, (query_len, seq_len) in enumerate(
            zip(batch.query_lens, batch.seq_lens, strict=True)
        ):
            place = torch.arange(seq_len)
            blocks = batch.block_table[row].long()[place // batch.block_size]
            slots = blocks * batch.block_size + place % batch.block_size
            sums = torch.cumsum(k[slots] - 0.5 * v[slots], dim=0)
            outputs.append(torch.sin(sums[seq_len - query_len :] * 2.0))
        return torch.cat(outputs)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = [(row[:, None] * self.head).sum(dim=0) for row in hidden]
        return (torch.stack(rows) * self.spread).to(self.dtype).float()


def make_cache(num_blocks: int, block_size: int) -> tuple[LayerKV, ...]:
    shape = kv_cache_shape(num_blocks, block_size, 1, HEAD)
    return tuple(
        LayerKV(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
        for _ in LAYERS
    )


def make_runner(
    decoder: ToyDecoder | None = None,
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    block_size: int = 4,
    num_blocks: int = 32,
    seed: int = 0,
) -> ModelRunner:
    runner = ModelRunner(
        decoder or ToyDecoder(),
        vocab_size=VOCAB,
        kv_layers=LAYERS,
        limits=LimitsConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_logprobs=5,
        ),
        max_model_len=max_model_len,
        block_size=block_size,
        seed=seed,
        device=CPU,
    )
    runner.bind_kv_cache(make_cache(num_blocks, block_size), num_blocks)
    return runner


def make_step(
    step_id: int,
    rows: Sequence[StepRow] = (),
    new: Sequence[tuple[NewRequest, Sequence[int]]] = (),
    finished: Sequence[str] = (),
    kv_epoch: int = 0,
) -> ExecuteModel:
    tokens = [token for _, known in new for token in known]
    return ExecuteModel(
        step_id=step_id,
        kv_epoch=kv_epoch,
        num_rows=len(rows),
        num_block_ids=sum(len(row.new_block_ids) for row in rows),
        num_token_ids=len(tokens),
        new_requests=tuple(request for request, _ in new),
        finished=tuple(finished),
        buffer=pack_step(rows, tokens),
    )


def new_request(
    request_id: str,
    slot: int,
    prompt: Sequence[int],
    sampling: SamplingParams | None = None,
    output: Sequence[int] = (),
) -> tuple[NewRequest, list[int]]:
    request = NewRequest(
        request_id=request_id,
        slot=slot,
        num_prompt_tokens=len(prompt),
        num_output_tokens=len(output),
        sampling=sampling or SamplingParams(temperature=0.0),
    )
    return request, [*prompt, *output]


def sampled_per_row(output: StepOutput) -> list[list[int]]:
    counts, tokens = unpack_sampled(output.buffer, output.num_rows)
    per_row = np.split(tokens, np.cumsum(counts)[:-1]) if counts.size else []
    return [part.tolist() for part in per_row]


class Tracked:
    """What a scheduler remembers of one request."""

    def __init__(self, slot: int, prompt: Sequence[int]) -> None:
        self.slot = slot
        self.num_known = len(prompt)
        self.num_computed = 0
        self.blocks: list[int] = []
        self.output: list[int] = []


class ToyScheduler:
    """Drives a runner with well-formed steps and gives out blocks."""

    def __init__(self, runner: ModelRunner, *, num_blocks: int = 32, block_size: int = 4) -> None:
        self.runner = runner
        self.block_size = block_size
        self.free = list(range(num_blocks - 1, 0, -1))
        self.live: dict[str, Tracked] = {}
        self.step_id = 0
        self.kv_epoch = 0
        self._new: list[tuple[NewRequest, list[int]]] = []
        self._finished: list[str] = []
        self._resumed: set[str] = set()

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams | None = None,
        slot: int | None = None,
    ) -> None:
        used = {tracked.slot for tracked in self.live.values()}
        if slot is None:
            slot = next(index for index in range(64) if index not in used)
        self._new.append(new_request(request_id, slot, prompt, sampling))
        self.live[request_id] = Tracked(slot, prompt)

    def finish(self, request_id: str) -> list[int]:
        tracked = self.live.pop(request_id)
        self.free.extend(tracked.blocks)
        self._finished.append(request_id)
        return tracked.output

    def preempt(self, request_id: str) -> None:
        tracked = self.live[request_id]
        self.free = [*tracked.blocks, *self.free]
        tracked.blocks = []
        tracked.num_computed = 0
        self._resumed.add(request_id)

    def step(self, scheduled: dict[str, int] | None = None) -> StepOutput:
        """Schedule the given numbers of tokens, or everything that is known of all."""
        if scheduled is None:
            scheduled = {
                name: tracked.num_known - tracked.num_computed
                for name, tracked in self.live.items()
            }
        rows = []
        for name, count in scheduled.items():
            tracked = self.live[name]
            end = tracked.num_computed + count
            needed = -(-end // self.block_size) - len(tracked.blocks)
            fresh = [self.free.pop() for _ in range(max(needed, 0))]
            tracked.blocks.extend(fresh)
            flags = RESUMED if name in self._resumed else 0
            self._resumed.discard(name)
            rows.append(StepRow(tracked.slot, count, tracked.num_computed, fresh, flags))
        self.step_id += 1
        message = make_step(self.step_id, rows, self._new, self._finished, self.kv_epoch)
        self._new, self._finished = [], []
        output = self.runner.execute(message, self.kv_epoch)
        assert output.refusals == ()
        for (name, count), tokens in zip(scheduled.items(), sampled_per_row(output), strict=True):
            tracked = self.live[name]
            tracked.num_computed += count
            tracked.num_known += len(tokens)
            tracked.output.extend(tokens)
        return output

    def generate(self, request_id: str, num_tokens: int) -> list[int]:
        """Step everything until one request has so many output tokens."""
        while len(self.live[request_id].output) < num_tokens:
            self.step()
        return self.live[request_id].output


def generate_alone(
    prompt: Sequence[int],
    sampling: SamplingParams,
    num_tokens: int,
    decoder: ToyDecoder | None = None,
    *,
    seed: int = 0,
) -> list[int]:
    """Return the tokens that a fresh worker gives a single request."""
    scheduler = ToyScheduler(make_runner(decoder, seed=seed))
    scheduler.add("alone", prompt, sampling)
    return scheduler.generate("alone", num_tokens)
