"""A worker on a tiny real model, and a scheduler of a few lines to drive it by hand."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import (
    CacheConfig,
    DeviceConfig,
    LimitsConfig,
    ModelConfig,
    SupervisionConfig,
    WorkerConfig,
)
from gpuworker.device.memory import MemoryReader
from gpuworker.device.thread import DeviceThread
from gpuworker.lifecycle import State
from gpuworker.runtime import Runtime
from gpuworker.step import (
    RESUMED,
    NewRequest,
    SamplingParams,
    StepRow,
    pack_step,
    unpack_sampled,
)
from gpuworker.testing import walk_to
from gpuworker.torch_runtime import TorchRuntime

GREEDY = SamplingParams(temperature=0.0)
BLOCK_SIZE = 4


def tiny_config(model: Path | str, *, trace_dir: Path | None = None) -> WorkerConfig:
    return WorkerConfig(
        model=ModelConfig(model=str(model), max_model_len=64),
        device=DeviceConfig(num_threads=1),
        cache=CacheConfig(block_size=BLOCK_SIZE),
        limits=LimitsConfig(max_num_seqs=4, max_num_batched_tokens=64),
        supervision=SupervisionConfig(trace_dir=str(trace_dir) if trace_dir is not None else None),
    )


@asynccontextmanager
async def real_worker(
    config: WorkerConfig, state: State = State.SERVING, reader: MemoryReader | None = None
) -> AsyncIterator[GPUWorker]:
    """Start a worker on a real runtime and walk it to a state."""

    def runtime(config: WorkerConfig, device: DeviceThread) -> Runtime:
        return TorchRuntime(config, device, reader)

    async with GPUWorker(config, runtime) as worker:
        await walk_to(worker, state)
        yield worker


class Hand:
    """Schedules by hand: one request at a time, or whatever rows a test wants."""

    def __init__(self, worker: GPUWorker) -> None:
        self.worker = worker
        self.step_id = 0

    async def step(
        self,
        rows: Sequence[StepRow] = (),
        *,
        new: Sequence[NewRequest] = (),
        tokens: Sequence[int] = (),
        finished: Sequence[str] = (),
        kv_epoch: int | None = None,
    ) -> m.StepOutput:
        self.step_id += 1
        if kv_epoch is None:
            kv_epoch = (await self.worker.ask(m.GetStatus())).kv_epoch
        return await self.worker.ask(
            m.ExecuteModel(
                step_id=self.step_id,
                kv_epoch=kv_epoch,
                num_rows=len(rows),
                num_block_ids=sum(len(row.new_block_ids) for row in rows),
                num_token_ids=len(tokens),
                new_requests=tuple(new),
                finished=tuple(finished),
                buffer=pack_step(rows, tokens),
            )
        )

    async def resume(self) -> None:
        """Go on after a step that did not run."""
        await self.worker.ask(m.ResumeSteps(step_id=self.step_id))

    async def run(
        self,
        prompt: Sequence[int],
        num_tokens: int,
        *,
        request_id: str = "x",
        slot: int = 0,
        blocks: Sequence[int] = tuple(range(1, 17)),
        sampling: SamplingParams = GREEDY,
        finish: bool = True,
    ) -> list[int]:
        """Generate num_tokens from a prompt, alone in the batch."""
        new = NewRequest(
            request_id=request_id, slot=slot, num_prompt_tokens=len(prompt), sampling=sampling
        )
        output = await self.step([StepRow(slot, len(prompt), 0, blocks)], new=[new], tokens=prompt)
        generated = sampled(output)
        computed = len(prompt)
        while len(generated) < num_tokens:
            generated += sampled(await self.step([StepRow(slot, 1, computed)]))
            computed += 1
        if finish:
            await self.step(finished=[request_id])
        return generated


def sampled(output: m.StepOutput) -> list[int]:
    """Token ids of a step nobody was refused in."""
    assert output.refusals == ()
    return unpack_sampled(output.buffer, output.num_rows).token_ids.tolist()


def resumed(slot: int, num_scheduled: int, blocks: Sequence[int]) -> StepRow:
    """A row that computes a request again from its first token."""
    return StepRow(slot, num_scheduled, 0, blocks, RESUMED)


def with_model(config: WorkerConfig, **changes: object) -> WorkerConfig:
    """Change fields of config.model."""
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **changes))
