"""Layer 1. The one object that the states hold: what a rank can do, in acquire/release pairs.

The methods run on the device thread unless their docstring says otherwise. Each acquiring
method is atomic: it raises a WorkerError and leaves nothing behind, or it succeeds. It is
undone by its pair; undoing what was not acquired does nothing. gpuworker.torch_runtime
implements this, gpuworker.testing fakes it.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from contextlib import ExitStack, suppress

from gpuworker import messages as m
from gpuworker.config import WorkerConfig
from gpuworker.device.thread import DeviceThread, Pending
from gpuworker.errors import InvalidRequest, StepAborted, WorkerError, WorkerFaulted
from gpuworker.permit import Permit

__all__ = ["Progress", "Runtime", "create_runtime"]


class Progress:
    """What the device thread is doing, readable from the event loop at any time.

    Written by the device thread and, for steps that go on without it, by the one that waits for
    them; every field is one reference, so a reader sees each either before or after a change.
    """

    __slots__ = (
        "aborted_after",
        "fault",
        "in_flight",
        "last_error",
        "last_step_at",
        "move_bytes",
        "num_steps",
    )

    def __init__(self) -> None:
        self.fault: WorkerFaulted | None = None
        self.num_steps = 0
        self.in_flight: deque[tuple[int, float]] = deque()
        """The steps that were begun and not finished, oldest first, and when they began."""
        self.last_step_at: float | None = None
        self.last_error = ""
        self.move_bytes = (0, 0)
        """How many bytes the move under way has done, and of how many."""
        self.aborted_after: int | None = None
        """The step that did not run; until it is acknowledged, later ones are aborted."""

    @property
    def running(self) -> int | None:
        """The oldest step in flight."""
        with suppress(IndexError):
            return self.in_flight[0][0]
        return None

    @property
    def running_since(self) -> float | None:
        """When the oldest step in flight began."""
        with suppress(IndexError):
            return self.in_flight[0][1]
        return None

    def begin(self, step_id: int) -> None:
        """Note that a step begins."""
        self.in_flight.append((step_id, time.monotonic()))

    def succeed(self) -> None:
        """Note that the oldest step in flight has run."""
        self.in_flight.popleft()
        self.last_error = ""
        self.num_steps += 1
        self.last_step_at = time.monotonic()

    def fail(self, step_id: int, error: BaseException) -> None:
        """Note that a step in flight has failed; it aborts those behind it."""
        for index, (running, _) in enumerate(self.in_flight):
            if running == step_id:
                del self.in_flight[index]
                break
        if self.aborted_after is None:
            self.aborted_after = step_id
        if isinstance(error, WorkerError):
            self.last_error = f"{error.code}: {error.message}"
        if isinstance(error, WorkerFaulted):
            self.fault = error

    def note_bytes(self, done_bytes: int, total_bytes: int) -> None:
        """Note how far the move under way has come."""
        self.move_bytes = (done_bytes, total_bytes)


class Runtime(ABC):
    """What a rank can do."""

    def __init__(self, config: WorkerConfig, device: DeviceThread) -> None:
        self.config = config
        self.device = device
        self.progress = Progress()

    def run_step(
        self, step: m.ExecuteModel, permit: Permit
    ) -> m.StepOutput | Pending[m.StepOutput]:
        """Run one step on the device thread and keep the progress that GetStatus reports.

        The output may be pending: the step was put on the device, behind those before it, and
        the next one may be. A step that raises, whatever it raises, aborts those behind it
        until resume_steps: they were put together on the assumption that it runs.
        """
        progress = self.progress
        if progress.aborted_after is not None:
            raise StepAborted(
                f"step {progress.aborted_after} did not run, and step {step.step_id} stands "
                f"behind it; send resume_steps with step_id {progress.aborted_after} to go on"
            )
        progress.begin(step.step_id)
        try:
            permit.start()
            output = self.execute_model(step)
        except BaseException as error:
            progress.fail(step.step_id, error)
            raise
        if isinstance(output, Pending):
            return _PendingStep(step.step_id, output, progress)
        progress.succeed()
        return output

    def skip_step(self, step_id: int) -> None:
        """Note that a step in the sequence will not run; it aborts those behind it."""
        if self.progress.aborted_after is None:
            self.progress.aborted_after = step_id

    def resume_steps(self, step_id: int) -> m.StepsResumed:
        """Compute steps again; raises InvalidRequest unless step_id is the one that did not run."""
        failed = self.progress.aborted_after
        if step_id != failed:
            raise InvalidRequest(
                f"resume_steps names step {step_id}; "
                + ("no step is aborted" if failed is None else f"it was {failed} that did not run")
            )
        self.progress.aborted_after = None
        return m.StepsResumed(next_step_id=self.limits().next_step_id)

    def release_all(self) -> None:
        """Release everything in the reverse order of acquisition; safe in any state, twice too."""
        with ExitStack() as stack:  # runs every release even when one of them raises
            stack.callback(self.close_device)
            stack.callback(self.unload_model)
            stack.callback(self.forget_profile)
            stack.callback(self.free_kv_cache)
            stack.callback(self.cool_down)
            stack.callback(self.stop_serving)
            stack.callback(self.close_trace)

    # -- device
    @abstractmethod
    def open_device(self) -> m.DeviceReady:
        """Choose and prepare the device; raises ConfigError. Undone by close_device."""

    @abstractmethod
    def close_device(self) -> None:
        """Release the device; the inverse of open_device."""

    # -- weights
    @abstractmethod
    def load_model(self) -> m.ModelLoaded:
        """Check the checkpoint, map the weight arena and fill it. Undone by unload_model.

        Raises CheckpointError before anything is allocated, OutOfDeviceMemory after undoing.
        """

    @abstractmethod
    def unload_model(self) -> None:
        """Drop the model and unmap its arena; the inverse of load_model."""

    @abstractmethod
    def has_model(self) -> bool:
        """Say whether a model is loaded. Cheap; any thread."""

    @abstractmethod
    def reload_weights(self) -> m.WeightsReloaded:
        """Fill the resident arena from the checkpoint and start a new KV epoch.

        The checkpoint is checked before a byte changes; a failure after that leaves the
        weights poisoned, which the reply's error names.
        """

    @abstractmethod
    def weights_truth(self) -> m.WeightsTruth:
        """Say whether the weights hold a model. Cheap; any thread."""

    # -- profile and KV cache
    @abstractmethod
    def kv_cache_spec(self) -> m.KVCacheSpec:
        """Describe the KV cache of the loaded model."""

    @abstractmethod
    def limits(self) -> m.Limits:
        """Report the limits of the loaded model's steps and the live requests."""

    @abstractmethod
    def profile_memory(self) -> m.MemoryProfiled:
        """Run the largest batch and compute the budget; leaves no memory behind."""

    @abstractmethod
    def forget_profile(self) -> None:
        """Forget the budget; the inverse of profile_memory."""

    @abstractmethod
    def set_max_model_len(self, max_model_len: int) -> int:
        """Set the longest sequence and return the old one; raises InvalidRequest."""

    @abstractmethod
    def allocate_kv_cache(self, num_blocks: int) -> m.KVCacheAllocated:
        """Map the block pool and bind the runner to it. Undone by free_kv_cache.

        Raises InsufficientKVMemory with the limit, before anything is mapped.
        """

    @abstractmethod
    def free_kv_cache(self) -> None:
        """Unbind and unmap the block pool; the inverse of allocate_kv_cache."""

    # -- serving
    @abstractmethod
    def warm_up(self) -> m.WarmedUp:
        """Run every shape once and reset the seed. Undone by cool_down."""

    @abstractmethod
    def cool_down(self) -> None:
        """Drop what warm_up kept; the inverse of warm_up."""

    @abstractmethod
    def start_serving(self) -> m.ServingStarted:
        """Freeze the heap and accept requests. Undone by stop_serving."""

    @abstractmethod
    def stop_serving(self) -> None:
        """Thaw the heap and drop live requests; the inverse of start_serving."""

    @abstractmethod
    def execute_model(self, step: m.ExecuteModel) -> m.StepOutput | Pending[m.StepOutput]:
        """Run one step; a failure leaves requests and counters as before the step.

        On a device that computes beside its host, return as soon as the step is under way.
        """

    @abstractmethod
    def execute_dummy_batch(self, num_tokens: int) -> m.DummyBatchExecuted:
        """Run a forward pass that touches no request and no KV block."""

    @abstractmethod
    def drop_requests(self) -> int:
        """Forget every live request and say how many there were; step ids start anew."""

    # -- sleep
    @abstractmethod
    def keep_weights(self) -> int:
        """Copy the weights out so that release does not lose them. Undone by forget_kept_weights.

        Returns the bytes written: 0 when the kept copy is still current, or when there is
        nothing defined to keep. Raises SpillFailed before anything is released.
        """

    @abstractmethod
    def forget_kept_weights(self) -> None:
        """Drop the kept copy; the inverse of keep_weights."""

    @abstractmethod
    def release(self, tags: tuple[m.Tag, ...], keep: bool) -> None:
        """Give the memory of the tags back; addresses stay. Releasing what sleeps does nothing.

        Weights without a kept copy, or with keep false, are undefined from now on. Releasing
        the KV cache starts a new epoch. There is no way back but resume: a failure halfway is
        a DeviceFault.
        """

    @abstractmethod
    def resume(self, tag: m.Tag) -> bool:
        """Bring the memory of a tag back at the same address, with kept contents.

        Returns whether it was asleep. Weights without a kept copy stay undefined; a KV cache
        comes back zeroed. The kept copy remains, so releasing again is safe. Raises
        OutOfDeviceMemory or SpillFailed with nothing changed.
        """

    @abstractmethod
    def asleep(self) -> tuple[m.Tag, ...]:
        """Name the tags that are not resident. Cheap; any thread."""

    @abstractmethod
    def kv_epoch(self) -> int:
        """Return the KV epoch that steps must name. Cheap; any thread."""

    @abstractmethod
    def memory(self) -> tuple[m.MemoryUse, ...]:
        """Measure the arenas. Any thread."""

    @abstractmethod
    def process_bytes(self) -> int:
        """Measure the resident memory of this process. Any thread."""

    # -- trace
    @abstractmethod
    def start_trace(self) -> bool:
        """Start recording; False when one is running. InvalidRequest when not configured."""

    @abstractmethod
    def stop_trace(self) -> str:
        """Write the trace and return its path; empty when none runs. InvalidRequest as above."""

    @abstractmethod
    def close_trace(self) -> None:
        """Write a trace that is still recording; does nothing otherwise."""

    # -- status
    @abstractmethod
    def num_requests(self) -> int:
        """Count live requests. Cheap; any thread."""

    @abstractmethod
    def weight_version(self) -> int:
        """Return a number that changes whenever the weights do. Cheap; any thread."""


class _PendingStep(Pending[m.StepOutput]):
    """A step under way, which the progress hears of when it ends."""

    def __init__(self, step_id: int, output: Pending[m.StepOutput], progress: Progress) -> None:
        self._step_id = step_id
        self._output = output
        self._progress: Progress | None = progress

    def result(self) -> m.StepOutput:
        progress, self._progress = self._progress, None
        try:
            output = self._output.result()
        except BaseException as error:
            if progress is not None:
                progress.fail(self._step_id, error)
            raise
        if progress is not None:
            progress.succeed()
        return output


def create_runtime(config: WorkerConfig, device: DeviceThread) -> Runtime:
    """Build the runtime for the configured device; imports torch."""
    from gpuworker.torch_runtime import TorchRuntime

    return TorchRuntime(config, device)
