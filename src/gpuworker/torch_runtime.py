"""Layer 1. A rank that computes with torch: device, weights, KV pool, runner, trace.

CPU execution. Each part is an object that exists exactly while it is held, so what is held is
what is there.
"""

from __future__ import annotations

import gc
import time
from dataclasses import replace
from pathlib import Path

import torch

from gpuworker import messages as m
from gpuworker.config import WorkerConfig
from gpuworker.device.cpu import ComputeThreads, FrozenHeap, cpu_name
from gpuworker.device.memory import (
    KVBudget,
    MemoryReader,
    MemorySnapshot,
    plan_kv_budget,
    take_snapshot,
)
from gpuworker.device.proc_memory import ProcMemoryReader
from gpuworker.device.thread import DeviceThread
from gpuworker.device.trace import Tracer
from gpuworker.errors import (
    ConfigError,
    DeviceFault,
    InsufficientKVMemory,
    InvalidRequest,
    WeightsUndefined,
)
from gpuworker.model.decoder import Decoder
from gpuworker.runner.kv_cache import KVLayer, block_bytes, num_blocks_in
from gpuworker.runner.kv_pool import KVPool
from gpuworker.runner.kv_spec import kv_cache_spec, kv_layers
from gpuworker.runner.runner import ModelRunner
from gpuworker.runtime import Runtime
from gpuworker.weights.source import ModelSource, open_source
from gpuworker.weights.store import WeightStore

__all__ = ["TorchRuntime"]

_CPU_UTILIZATION = 0.5
"""Share of the memory when none is configured: other programs live on a CPU's machine too."""
_TAGS: tuple[m.Tag, ...] = ("weights", "kv_cache")


class TorchRuntime(Runtime):
    """One rank on a CPU."""

    def __init__(
        self, config: WorkerConfig, device: DeviceThread, reader: MemoryReader | None = None
    ) -> None:
        """Hold nothing yet; reader says what memory there is, None asks the system."""
        super().__init__(config, device)
        self._reader: MemoryReader = reader if reader is not None else ProcMemoryReader()
        self._tracer = Tracer(config.supervision.trace_dir, config.rank.rank)
        self._start: MemorySnapshot | None = None
        self._threads: ComputeThreads | None = None
        self._source: ModelSource | None = None
        self._weights: WeightStore | None = None
        self._runner: ModelRunner | None = None
        self._budget: KVBudget | None = None
        self._pool: KVPool | None = None
        self._epoch = 0
        self._heap: FrozenHeap | None = None

    # -- device

    def open_device(self) -> m.DeviceReady:
        device = self.config.device
        if device.kind != "cpu":
            raise ConfigError(
                f"device.kind is {device.kind}; this release computes on cpu only, set it to cpu"
            )
        if self.config.rank.world_size != 1:
            raise ConfigError(
                f"rank.world_size is {self.config.rank.world_size}; this release computes a model "
                "on one rank, set it to 1"
            )
        self._threads = ComputeThreads(device.num_threads)
        self._start = take_snapshot(self._reader)
        return m.DeviceReady(
            device="cpu",
            device_name=cpu_name(),
            total_bytes=self._start.total_bytes,
            available_bytes=self._start.available_bytes,
        )

    def close_device(self) -> None:
        self._start = None
        if self._threads is not None:
            self._threads.restore()
            self._threads = None

    # -- weights

    def load_model(self) -> m.ModelLoaded:
        started = time.monotonic()
        source = open_source(self.config.model)
        spill_dir = self.config.sleep.spill_dir
        weights = WeightStore(
            source.specs,
            lambda: source.plan(self.progress.note_bytes),
            reader=self._reader,
            spill_dir=Path(spill_dir) if spill_dir is not None else None,
        )
        try:
            decoder = Decoder(
                source.description,
                weights.params,
                max_model_len=source.max_model_len,
                attention_backend=self.config.device.attention_backend,
            )
            runner = ModelRunner(
                decoder,
                vocab_size=source.description.vocab_size,
                kv_layers=kv_layers(source.description, source.dtype),
                limits=self.config.limits,
                max_model_len=source.max_model_len,
                block_size=self.config.cache.block_size,
                seed=self.config.device.seed,
                device=torch.device("cpu"),
            )
        except BaseException:
            weights.close()
            raise
        self._source, self._weights, self._runner = source, weights, runner
        return m.ModelLoaded(
            architecture=source.description.architecture,
            num_parameters=sum(spec.num_elements for spec in source.specs),
            weight_bytes=weights.num_bytes,
            dtype=_name(source.dtype),
            max_model_len=source.max_model_len,
            vocab_size=source.description.vocab_size,
            eos_token_ids=source.eos_token_ids,
            load_s=time.monotonic() - started,
            warnings=weights.warnings,
        )

    def unload_model(self) -> None:
        self._runner = None
        self._source = None
        if self._weights is not None:
            self._weights.close()
            self._weights = None

    def has_model(self) -> bool:
        return self._weights is not None

    def reload_weights(self) -> m.WeightsReloaded:
        started = time.monotonic()
        weights = self._model()[1]
        weights.refill()
        return m.WeightsReloaded(
            weight_bytes=weights.num_bytes,
            weight_version=weights.version,
            kv_epoch=self._new_epoch(),
            load_s=time.monotonic() - started,
        )

    def weights_truth(self) -> m.WeightsTruth:
        weights = self._weights
        return weights.truth if weights is not None else "undefined"

    # -- profile and KV cache

    def kv_cache_spec(self) -> m.KVCacheSpec:
        source = self._model()[0]
        return kv_cache_spec(source.description, source.dtype, self.config.cache.block_size)

    def limits(self) -> m.Limits:
        source, _, runner = self._model()
        return m.Limits(
            max_model_len=runner.max_model_len,
            vocab_size=source.description.vocab_size,
            eos_token_ids=source.eos_token_ids,
            max_num_seqs=self.config.limits.max_num_seqs,
            max_num_batched_tokens=self.config.limits.max_num_batched_tokens,
            window=self.config.limits.window,
            max_logprobs=self.config.limits.max_logprobs,
            block_size=self.config.cache.block_size,
            max_num_blocks=self._max_num_blocks() if self._budget is not None else 0,
            num_blocks=self._pool.num_blocks if self._pool is not None else 0,
            kv_epoch=self._epoch,
            next_step_id=runner.next_step_id,
            live_requests=runner.live_requests,
        )

    def profile_memory(self) -> m.MemoryProfiled:
        started = time.monotonic()
        _, weights, runner = self._model()
        assert self._start is not None
        gc.collect()
        loaded = take_snapshot(self._reader)
        self._reader.reset_peak()
        with torch.inference_mode():
            temporary_kv_bytes = runner.profile_run()
        profiled = take_snapshot(self._reader)
        # The run's own small KV cache is not part of a step's activations.
        peak_bytes = max(profiled.peak_bytes - temporary_kv_bytes, loaded.process_bytes)
        layers, block_size = self._kv_layers(), self.config.cache.block_size
        self._budget = plan_kv_budget(
            start=self._start,
            loaded=loaded,
            profiled=replace(profiled, peak_bytes=peak_bytes),
            utilization=self._utilization(),
            weight_bytes=weights.num_bytes,
            block_bytes=block_bytes(layers, block_size),
            kv_cache_memory_bytes=self.config.cache.kv_cache_memory_bytes,
        )
        return m.MemoryProfiled(
            kv_budget_bytes=self._budget.kv_bytes,
            block_bytes=self._budget.block_bytes,
            max_num_blocks=self._max_num_blocks(),
            requested_bytes=self._budget.requested_bytes,
            weight_bytes=self._budget.weight_bytes,
            peak_activation_bytes=self._budget.peak_activation_bytes,
            other_bytes=self._budget.other_bytes,
            warnings=self._budget.warnings,
            profile_s=time.monotonic() - started,
        )

    def forget_profile(self) -> None:
        self._budget = None

    def set_max_model_len(self, max_model_len: int) -> int:
        return self._model()[2].set_max_model_len(max_model_len)

    def allocate_kv_cache(self, num_blocks: int) -> m.KVCacheAllocated:
        runner = self._model()[2]
        limit = self._max_num_blocks()
        if num_blocks > limit:
            raise InsufficientKVMemory(
                f"{num_blocks} KV blocks were asked for, the profile left room for {limit}; ask "
                "for at most that, or raise device.memory_utilization"
            )
        block_size = self.config.cache.block_size
        pool = KVPool(self._kv_layers(), num_blocks, block_size, self._reader)
        try:
            runner.bind_kv_cache(pool.caches, num_blocks)
        except BaseException:
            pool.close()
            raise
        self._pool = pool
        return m.KVCacheAllocated(
            num_blocks=num_blocks,
            block_size=block_size,
            kv_cache_bytes=pool.num_bytes,
            kv_epoch=self._epoch,
        )

    def free_kv_cache(self) -> None:
        if self._pool is not None:
            self._model()[2].unbind_kv_cache()
            self._pool.close()
            self._pool = None

    # -- serving

    def warm_up(self) -> m.WarmedUp:
        started = time.monotonic()
        with torch.inference_mode():
            num_shapes = self._model()[2].warm_up()
        return m.WarmedUp(num_shapes=num_shapes, warm_up_s=time.monotonic() - started)

    def cool_down(self) -> None:
        """Nothing is kept by warming up a CPU."""

    def start_serving(self) -> m.ServingStarted:
        self._heap = FrozenHeap()
        return m.ServingStarted(
            kv_epoch=self._epoch,
            max_num_seqs=self.config.limits.max_num_seqs,
            max_num_batched_tokens=self.config.limits.max_num_batched_tokens,
        )

    def stop_serving(self) -> None:
        if self._heap is not None:
            self._heap.thaw()
            self._heap = None
        if self._runner is not None:
            self._runner.clear()

    def execute_model(self, step: m.ExecuteModel) -> m.StepOutput:
        _, weights, runner = self._model()
        if weights.truth != "defined":
            raise WeightsUndefined(f"the weights are {weights.truth}; send reload_weights")
        with torch.inference_mode():
            return runner.execute(step, self._epoch)

    def execute_dummy_batch(self, num_tokens: int) -> m.DummyBatchExecuted:
        limit = self.config.limits.max_num_batched_tokens
        if num_tokens > limit:
            raise InvalidRequest(
                f"a dummy batch of {num_tokens} tokens exceeds max_num_batched_tokens {limit}"
            )
        with torch.inference_mode():
            self._model()[2].dummy_run(num_tokens)
        return m.DummyBatchExecuted(num_tokens=num_tokens)

    def drop_requests(self) -> int:
        return self._runner.clear() if self._runner is not None else 0

    # -- sleep

    def keep_weights(self) -> int:
        return self._model()[1].keep()

    def forget_kept_weights(self) -> None:
        self._model()[1].forget_kept()

    def release(self, tags: tuple[m.Tag, ...], keep: bool) -> None:
        weights, pool = self._model()[1], self._pool
        assert pool is not None
        try:
            if "weights" in tags:
                weights.release(keep)
            if "kv_cache" in tags and pool.release():
                self._new_epoch()
        except OSError as error:
            raise DeviceFault(f"releasing {', '.join(tags)} failed: {error}") from error

    def resume(self, tag: m.Tag) -> bool:
        if tag == "weights":
            return self._model()[1].resume()
        assert self._pool is not None
        return self._pool.resume()

    def asleep(self) -> tuple[m.Tag, ...]:
        weights, pool = self._weights, self._pool
        resident = {
            "weights": weights is None or weights.is_resident,
            "kv_cache": pool is None or pool.is_resident,
        }
        return tuple(tag for tag in _TAGS if not resident[tag])

    def kv_epoch(self) -> int:
        return self._epoch

    def memory(self) -> tuple[m.MemoryUse, ...]:
        return tuple(part.memory() for part in (self._weights, self._pool) if part is not None)

    def process_bytes(self) -> int:
        return self._reader.process_bytes()

    # -- trace

    def start_trace(self) -> bool:
        return self._tracer.start()

    def stop_trace(self) -> str:
        return self._tracer.stop()

    def close_trace(self) -> None:
        self._tracer.close()

    # -- status

    def num_requests(self) -> int:
        runner = self._runner
        return runner.num_requests if runner is not None else 0

    def weight_version(self) -> int:
        weights = self._weights
        return weights.version if weights is not None else 0

    def _model(self) -> tuple[ModelSource, WeightStore, ModelRunner]:
        assert self._source is not None
        assert self._weights is not None
        assert self._runner is not None
        return self._source, self._weights, self._runner

    def _new_epoch(self) -> int:
        self._epoch += 1
        if self._runner is not None:
            self._runner.forget_kv()
        return self._epoch

    def _utilization(self) -> float:
        share = self.config.device.memory_utilization
        return share if share is not None else _CPU_UTILIZATION

    def _kv_layers(self) -> tuple[KVLayer, ...]:
        source = self._model()[0]
        return kv_layers(source.description, source.dtype)

    def _max_num_blocks(self) -> int:
        assert self._budget is not None
        return num_blocks_in(self._kv_layers(), self._budget.kv_bytes, self.config.cache.block_size)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
