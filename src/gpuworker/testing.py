"""Layer 5. What tests of a scheduler or of the worker itself need: a fake, a walk, a failure.

FakeRuntime behaves like a rank without computing: it keeps books of what is held, so a test can
compare the books before and after. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import ModelConfig, WorkerConfig
from gpuworker.device.thread import DeviceThread
from gpuworker.errors import (
    InsufficientKVMemory,
    InvalidRequest,
    OutOfDeviceMemory,
    StaleKVEpoch,
    WeightsUndefined,
    WorkerError,
)
from gpuworker.lifecycle import State
from gpuworker.runtime import Runtime
from gpuworker.step import StepRow, pack_sampled, pack_step, unpack_step

__all__ = ["FakeRuntime", "empty_step", "fail_at", "fake_worker", "walk_to"]

_WEIGHT_BYTES = 1 << 20
_BLOCK_BYTES = 1 << 10
_MAX_BLOCKS = 64

_WALK: tuple[m.Request[Any], ...] = (
    m.InitDevice(),
    m.LoadModel(),
    m.ProfileMemory(),
    m.AllocateKVCache(num_blocks=32),
    m.WarmUp(),
    m.StartServing(),
    m.Sleep(),
)


class FakeRuntime(Runtime):
    """A rank that keeps books instead of computing.

    books names what is held and how many bytes it takes. before_step is called on the device
    thread at the start of every step; let it block or raise to imitate a slow or broken device.
    """

    def __init__(self, config: WorkerConfig, device: DeviceThread) -> None:
        super().__init__(config, device)
        self.books: dict[str, int] = {}
        self.num_drops = 0
        self.before_step: Callable[[m.ExecuteModel], None] | None = None
        self._max_model_len = config.model.max_model_len or 1024
        self._truth: m.WeightsTruth = "undefined"
        self._kept = False
        self._asleep: tuple[m.Tag, ...] = ()
        self._epoch = 0
        self._version = 0
        self._num_blocks = 0

    def open_device(self) -> m.DeviceReady:
        self.books["device"] = 0
        return m.DeviceReady(
            device="cpu", device_name="fake", total_bytes=1 << 30, available_bytes=1 << 30
        )

    def close_device(self) -> None:
        self.books.pop("device", None)

    def load_model(self) -> m.ModelLoaded:
        self.books["weights"] = _WEIGHT_BYTES
        self._truth = "defined"
        self._version += 1
        return m.ModelLoaded(
            architecture="Fake",
            num_parameters=_WEIGHT_BYTES // 4,
            weight_bytes=_WEIGHT_BYTES,
            dtype="float32",
            max_model_len=self._max_model_len,
            vocab_size=256,
            eos_token_ids=(0,),
            load_s=0.0,
        )

    def unload_model(self) -> None:
        self.forget_kept_weights()
        self.books.pop("weights", None)
        self._truth = "undefined"
        self._asleep = ()

    def has_model(self) -> bool:
        return "weights" in self.books

    def reload_weights(self) -> m.WeightsReloaded:
        self._truth = "defined"
        self._version += 1
        self._epoch += 1
        self.forget_kept_weights()
        return m.WeightsReloaded(
            weight_bytes=_WEIGHT_BYTES,
            weight_version=self._version,
            kv_epoch=self._epoch,
            load_s=0.0,
        )

    def weights_truth(self) -> m.WeightsTruth:
        return self._truth

    def kv_cache_spec(self) -> m.KVCacheSpec:
        return m.KVCacheSpec(
            block_size=self.config.cache.block_size,
            dtype="float32",
            block_bytes=_BLOCK_BYTES,
            layers=(),
        )

    def limits(self) -> m.Limits:
        return m.Limits(
            max_model_len=self._max_model_len,
            vocab_size=256,
            eos_token_ids=(0,),
            max_num_seqs=self.config.limits.max_num_seqs,
            max_num_batched_tokens=self.config.limits.max_num_batched_tokens,
            max_logprobs=self.config.limits.max_logprobs,
            window=self.config.limits.window,
            block_size=self.config.cache.block_size,
            max_num_blocks=_MAX_BLOCKS if "budget" in self.books else 0,
            num_blocks=self._num_blocks,
            kv_epoch=self._epoch,
            next_step_id=0,
            live_requests=(),
        )

    def profile_memory(self) -> m.MemoryProfiled:
        self.books["budget"] = 0
        return m.MemoryProfiled(
            kv_budget_bytes=_MAX_BLOCKS * _BLOCK_BYTES,
            block_bytes=_BLOCK_BYTES,
            max_num_blocks=_MAX_BLOCKS,
            requested_bytes=1 << 30,
            weight_bytes=_WEIGHT_BYTES,
            peak_activation_bytes=0,
            other_bytes=0,
        )

    def forget_profile(self) -> None:
        self.books.pop("budget", None)

    def set_max_model_len(self, max_model_len: int) -> int:
        if max_model_len > 1024:
            raise InvalidRequest(f"max_model_len {max_model_len} exceeds the model's 1024")
        before, self._max_model_len = self._max_model_len, max_model_len
        return before

    def allocate_kv_cache(self, num_blocks: int) -> m.KVCacheAllocated:
        if num_blocks > _MAX_BLOCKS:
            raise InsufficientKVMemory(
                f"{num_blocks} blocks asked for, the profile left room for {_MAX_BLOCKS}"
            )
        self.books["kv_cache"] = num_blocks * _BLOCK_BYTES
        self._num_blocks = num_blocks
        return m.KVCacheAllocated(
            num_blocks=num_blocks,
            block_size=self.config.cache.block_size,
            kv_cache_bytes=num_blocks * _BLOCK_BYTES,
            kv_epoch=self._epoch,
        )

    def free_kv_cache(self) -> None:
        self.books.pop("kv_cache", None)

    def warm_up(self) -> m.WarmedUp:
        self.books["warm"] = 0
        return m.WarmedUp(num_shapes=1, warm_up_s=0.0)

    def cool_down(self) -> None:
        self.books.pop("warm", None)

    def start_serving(self) -> m.ServingStarted:
        self.books["serving"] = 0
        return m.ServingStarted(
            kv_epoch=self._epoch,
            max_num_seqs=self.config.limits.max_num_seqs,
            max_num_batched_tokens=self.config.limits.max_num_batched_tokens,
        )

    def stop_serving(self) -> None:
        self.books.pop("serving", None)

    def execute_model(self, step: m.ExecuteModel) -> m.StepOutput:
        if self._truth != "defined":
            raise WeightsUndefined(f"the weights are {self._truth}")
        if step.kv_epoch != self._epoch:
            raise StaleKVEpoch(f"the step names KV epoch {step.kv_epoch}, it is {self._epoch}")
        tables = unpack_step(step.buffer, step.num_rows, step.num_block_ids, step.num_token_ids)
        if self.before_step is not None:
            self.before_step(step)
        return m.StepOutput(
            step_id=step.step_id,
            kv_epoch=self._epoch,
            num_rows=step.num_rows,
            step_s=0.0,
            buffer=pack_sampled(np.ones_like(tables.slots), tables.slots + 100),
        )

    def execute_dummy_batch(self, num_tokens: int) -> m.DummyBatchExecuted:
        return m.DummyBatchExecuted(num_tokens=num_tokens)

    def drop_requests(self) -> int:
        self.num_drops += 1
        return 0

    def keep_weights(self) -> int:
        if self._kept or "weights" in self._asleep or self._truth != "defined":
            return 0
        self._kept = True
        self.books["kept"] = _WEIGHT_BYTES
        return _WEIGHT_BYTES

    def forget_kept_weights(self) -> None:
        self._kept = False
        self.books.pop("kept", None)

    def release(self, tags: tuple[m.Tag, ...], keep: bool) -> None:
        if "weights" in tags:
            if not keep:
                self.forget_kept_weights()
            if not self._kept:
                self._truth = "undefined"
            self.books["weights"] = 0
        if "kv_cache" in tags and "kv_cache" not in self._asleep:
            self.books["kv_cache"] = 0
            self._epoch += 1
        self._asleep = tuple(
            tag for tag in ("weights", "kv_cache") if tag in self._asleep or tag in tags
        )

    def resume(self, tag: m.Tag) -> bool:
        if tag not in self._asleep:
            return False
        if tag == "weights":
            self.books["weights"] = _WEIGHT_BYTES
        else:
            self.books["kv_cache"] = self._num_blocks * _BLOCK_BYTES
        self._asleep = tuple(other for other in self._asleep if other != tag)
        return True

    def asleep(self) -> tuple[m.Tag, ...]:
        return self._asleep

    def kv_epoch(self) -> int:
        return self._epoch

    def memory(self) -> tuple[m.MemoryUse, ...]:
        uses: list[m.MemoryUse] = []
        for tag in ("weights", "kv_cache"):
            size = self.books.get(tag, 0)
            uses.append(
                m.MemoryUse(tag=tag, reserved_bytes=size, mapped_bytes=size, resident_bytes=size)
            )
        return tuple(uses)

    def process_bytes(self) -> int:
        return sum(self.books.values())

    def start_trace(self) -> bool:
        if self.config.supervision.trace_dir is None:
            raise InvalidRequest("traces are not configured; set supervision.trace_dir")
        if "trace" in self.books:
            return False
        self.books["trace"] = 0
        return True

    def stop_trace(self) -> str:
        if self.config.supervision.trace_dir is None:
            raise InvalidRequest("traces are not configured; set supervision.trace_dir")
        return "" if self.books.pop("trace", None) is None else "trace.json"

    def close_trace(self) -> None:
        self.books.pop("trace", None)

    def num_requests(self) -> int:
        return 0

    def weight_version(self) -> int:
        return self._version


def fake_worker(config: WorkerConfig | None = None) -> GPUWorker:
    """Build a worker around a FakeRuntime; enter it as any other."""
    return GPUWorker(config or WorkerConfig(model=ModelConfig(model="fake")), FakeRuntime)


async def walk_to(worker: GPUWorker, state: State) -> None:
    """Send what leads from UNINIT to a state up to SLEEPING; DEVICE_READY is without a model."""
    for request in _WALK:
        if worker.state is state:
            return
        await worker.ask(request)


def empty_step(step_id: int, kv_epoch: int = 0) -> m.ExecuteModel:
    """Build a step of one row that a FakeRuntime accepts."""
    return m.ExecuteModel(
        step_id=step_id, kv_epoch=kv_epoch, num_rows=1, buffer=pack_step([StepRow(0, 1, 0)])
    )


class _Counter:
    """Counts the device calls that a move waits for."""

    def __init__(self) -> None:
        self.num_calls = 0


@contextmanager
def fail_at(
    device: DeviceThread, call: int | None, error: Callable[[], WorkerError] | None = None
) -> Iterator[_Counter]:
    """Make the given device call (from 0) of the moves inside raise instead of running.

    Yields a counter of the calls, so a first pass with call=None tells how many there are.
    Draining does not count.
    """
    counter = _Counter()
    original = device.run

    async def run(function: Callable[..., Any], *args: Any) -> Any:
        if function is not int:
            number = counter.num_calls
            counter.num_calls += 1
            if number == call:
                raise error() if error is not None else OutOfDeviceMemory("injected failure")
        return await original(function, *args)

    setattr(device, "run", run)  # noqa: B010
    try:
        yield counter
    finally:
        delattr(device, "run")
