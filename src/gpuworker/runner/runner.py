"""Layer 1. Runs steps: the live requests, the cache they use, and the model between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from gpuworker.config import LimitsConfig
from gpuworker.errors import InvalidRequest, StaleKVEpoch
from gpuworker.kernels.batch import LayerKV
from gpuworker.messages import ExecuteModel, StepOutput
from gpuworker.runner.admission import PlannedRows, StepLimits, StepPlan, plan_step
from gpuworker.runner.batch import prepare_inputs
from gpuworker.runner.decoder import DecoderLike
from gpuworker.runner.faults import typed_failures
from gpuworker.runner.kv_cache import KVLayer
from gpuworker.runner.rehearsal import Rehearsal
from gpuworker.runner.requests import RequestTable
from gpuworker.runner.sampler import Sampled, Sampler
from gpuworker.step import Int32Array, pack_sampled

__all__ = ["ModelRunner"]


class ModelRunner:
    """Executes steps atomically over the cache that is bound to it.

    One thread calls it; num_requests may be read from any. The model's limits at construction
    size the buffers, which are allocated once.
    """

    def __init__(
        self,
        decoder: DecoderLike,
        *,
        vocab_size: int,
        kv_layers: Sequence[KVLayer],
        limits: LimitsConfig,
        max_model_len: int,
        block_size: int,
        seed: int,
        device: torch.device,
    ) -> None:
        self._decoder = decoder
        self._limits = limits
        self._block_size = block_size
        self._device = device
        self._longest = max_model_len
        self._max_model_len = max_model_len
        self._table = RequestTable(
            max_num_seqs=limits.max_num_seqs,
            max_model_len=max_model_len,
            max_blocks=-(-max_model_len // block_size),
            vocab_size=vocab_size,
            seed=seed,
        )
        self._sampler = Sampler(vocab_size, device)
        self._rehearsal = Rehearsal(
            decoder,
            self._sampler,
            vocab_size=vocab_size,
            kv_layers=kv_layers,
            limits=limits,
            block_size=block_size,
            device=device,
        )
        self._kv: tuple[LayerKV, ...] | None = None
        self._num_blocks = 0
        self._last_step_id = -1

    # -- cache

    def bind_kv_cache(self, kv: tuple[LayerKV, ...], num_blocks: int) -> None:
        """Use a cache of num_blocks blocks, block 0 included. Undone by unbind_kv_cache."""
        self._kv = kv
        self._num_blocks = num_blocks

    def unbind_kv_cache(self) -> None:
        """Let go of the cache and preempt every request; the inverse of bind_kv_cache."""
        self._kv = None
        self._num_blocks = 0
        self.forget_kv()

    def forget_kv(self) -> None:
        """Preempt every live request, because the contents of the cache are gone.

        Tokens and sampler state stay; a request goes on once a step computes it again.
        """
        self._table.forget_kv()

    # -- limits and requests

    @property
    def num_requests(self) -> int:
        """Count live requests, scheduled or preempted."""
        return len(self._table.slot_of)

    @property
    def live_requests(self) -> tuple[str, ...]:
        """Name the live requests."""
        return tuple(self._table.slot_of)

    @property
    def next_step_id(self) -> int:
        """Return the smallest step id that execute accepts."""
        return self._last_step_id + 1

    @property
    def max_model_len(self) -> int:
        """Return the longest sequence in tokens."""
        return self._max_model_len

    def set_max_model_len(self, max_model_len: int) -> int:
        """Set the longest sequence and return the old one.

        Raises InvalidRequest above the length that the buffers were made for, and below that
        of a live request.
        """
        if not 1 <= max_model_len <= self._longest:
            raise InvalidRequest(
                f"max_model_len {max_model_len} is outside [1, {self._longest}], the limit that "
                "the worker was built with"
            )
        longest = int(self._table.num_tokens.max(where=self._table.live, initial=0))
        if longest > max_model_len:
            raise InvalidRequest(
                f"a live request has {longest} tokens; finish it before max_model_len becomes "
                f"{max_model_len}"
            )
        old, self._max_model_len = self._max_model_len, max_model_len
        return old

    def clear(self) -> int:
        """Drop every request and say how many there were; step ids start anew."""
        num_requests = self.num_requests
        self._table.clear()
        self._last_step_id = -1
        return num_requests

    # -- steps

    def execute(self, step: ExecuteModel, kv_epoch: int) -> StepOutput:
        """Run one step: finish, admit, compute, sample; all of it or nothing.

        Refused requests are named in the output and the others run. Raises InvalidRequest or
        StaleKVEpoch before anything changes. When the forward pass or sampling raises,
        requests, block tables and seeds are as before the step; then raises OutOfDeviceMemory,
        DeviceFault or StepFailed.
        """
        started = time.perf_counter()
        if step.step_id <= self._last_step_id:
            raise InvalidRequest(
                f"step id {step.step_id} is not above the last one, {self._last_step_id}"
            )
        if step.kv_epoch != kv_epoch:
            raise StaleKVEpoch(
                f"step {step.step_id} names KV epoch {step.kv_epoch}; the cache is in epoch "
                f"{kv_epoch}, so start its requests again as RESUMED"
            )
        kv = self._bound_cache()
        limits = StepLimits(
            limits=self._limits,
            max_model_len=self._max_model_len,
            block_size=self._block_size,
            num_blocks=self._num_blocks,
        )
        plan = plan_step(step, self._table, limits)
        rows = plan.rows
        with typed_failures(f"step {step.step_id}"), self._applied(plan):
            sampled = self._compute(rows, kv) if rows.slots.size else None
            output = self._output(step, plan, sampled, started)
        # Nothing can fail from here on.
        self._table.num_computed[rows.slots] = rows.num_computed + rows.num_scheduled
        if sampled is not None:
            tokens = sampled.tokens.astype(np.int32)
            self._table.append_tokens(rows.slots[rows.samples], tokens)
        self._last_step_id = step.step_id
        return output

    def _bound_cache(self) -> tuple[LayerKV, ...]:
        if self._kv is None:
            raise InvalidRequest("no KV cache is bound; allocate it first")
        return self._kv

    @contextmanager
    def _applied(self, plan: StepPlan) -> Iterator[None]:
        """Finish and admit requests and set block tables; put all of it back on an error."""
        saved = self._table.save(plan.changed_slots)
        try:
            for request_id in plan.finished:
                self._table.drop(request_id)
            for new, tokens in plan.admitted:
                self._table.admit(new, tokens)
            for slot, block_ids, replace in plan.rows.new_blocks:
                self._table.set_blocks(slot, block_ids, replace=replace)
            yield
        except BaseException:
            self._table.restore(saved)
            raise

    @torch.inference_mode()
    def _compute(self, rows: PlannedRows, kv: tuple[LayerKV, ...]) -> Sampled | None:
        inputs = prepare_inputs(
            self._table,
            rows.slots,
            rows.num_scheduled,
            rows.num_computed,
            block_size=self._block_size,
            device=self._device,
        )
        hidden = self._decoder.forward(inputs.input_ids, inputs.positions, kv, inputs.attention)
        if not rows.samples.any():
            return None
        last = inputs.last_tokens[rows.samples]
        if last.size < hidden.shape[0]:
            hidden = hidden.index_select(0, torch.from_numpy(last).to(self._device))
        return self._sampler.sample(
            self._decoder.logits(hidden), self._table, rows.slots[rows.samples]
        )

    def _output(
        self, step: ExecuteModel, plan: StepPlan, sampled: Sampled | None, started: float
    ) -> StepOutput:
        num_sampled: Int32Array = np.zeros(plan.num_rows, np.int32)
        tokens: Int32Array = np.empty(0, np.int32)
        if sampled is not None:
            num_sampled[plan.rows.rows[plan.rows.samples]] = 1
            tokens = sampled.tokens.astype(np.int32)
        return StepOutput(
            step_id=step.step_id,
            kv_epoch=step.kv_epoch,
            num_rows=plan.num_rows,
            step_s=time.perf_counter() - started,
            buffer=pack_sampled(num_sampled, tokens),
            logprobs=None if sampled is None else sampled.logprobs,
            refusals=plan.refusals,
        )

    # -- rehearsals

    def dummy_run(self, num_tokens: int) -> None:
        """Run a forward pass of num_tokens that touches no request and only block 0.

        Raises InvalidRequest when no step may be that large.
        """
        kv = self._bound_cache()
        with typed_failures("dummy batch"):
            self._rehearsal.dummy_run(num_tokens, kv, self._max_model_len)

    def profile_run(self) -> int:
        """Run the largest batch over a temporary cache and return that cache's bytes.

        Needs no bound cache and keeps no memory.
        """
        with typed_failures("profile run"):
            return self._rehearsal.profile_run(self._max_model_len)

    def warm_up(self) -> int:
        """Run every shape that serving needs over block 0 and return how many there were.

        Requests, seeds and the other blocks are untouched.
        """
        kv = self._bound_cache()
        with typed_failures("warm-up"):
            return self._rehearsal.warm_up(kv, self._max_model_len)
