"""Seeded random walks of thousands of messages against a model of the lifecycle."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from gpuworker import messages as m
from gpuworker.config import ModelConfig, SupervisionConfig, WorkerConfig
from gpuworker.errors import (
    IllegalMessage,
    InsufficientKVMemory,
    InvalidRequest,
    StaleKVEpoch,
    StepAborted,
    WeightsUndefined,
    WorkerError,
)
from gpuworker.testing import FakeRuntime, empty_step, fake_worker


@dataclass
class Model:
    """What a worker must do, written without looking at the tables."""

    state: str = "uninit"
    loaded: bool = False
    kept: bool = False
    weights: str = "undefined"
    asleep: set[str] = field(default_factory=set)
    epoch: int = 0
    tracing: bool = False
    lost_step: int | None = None

    def expect(self, request: m.Request) -> type[WorkerError] | type[m.Reply]:
        """Advance and say how the request is answered."""
        refused = self._refusal(request)
        if refused is not None:
            if isinstance(request, m.ExecuteModel) and self.lost_step is None:
                self.lost_step = request.step_id
            return refused
        match request:
            case m.InitDevice():
                self.state = "device_ready"
            case m.LoadModel():
                self.loaded, self.weights = True, "defined"
            case m.ProfileMemory():
                self.state = "profiled"
            case m.AllocateKVCache():
                self.state = "kv_allocated"
            case m.WarmUp():
                self.state = "warmed_up"
            case m.StartServing():
                self.state, self.lost_step = "serving", None
            case m.ResumeSteps() | m.DropRequests():
                self.lost_step = None
            case m.ReloadWeights():
                self.epoch, self.weights, self.kept = self.epoch + 1, "defined", False
            case m.Sleep(level=level):
                self.state = "sleeping"
                if level == 1 and self.weights == "defined" and "weights" not in self.asleep:
                    self.kept = True
                if level == 2:
                    self.kept = False
                if not self.kept:
                    self.weights = "undefined"
                if "kv_cache" not in self.asleep:
                    self.epoch += 1
                self.asleep = {"weights", "kv_cache"}
            case m.ResumePools(tags=tags):
                self.asleep -= set(tags)
            case m.WakeUp():
                self.state, self.asleep = "serving", set()
            case m.StartTrace():
                self.tracing = True
            case m.StopTrace():
                self.tracing = False
        return m.REPLY_OF[type(request)]

    def _refusal(self, request: m.Request) -> type[WorkerError] | None:
        accepted = {
            "uninit": (m.InitDevice,),
            "device_ready": (m.LoadModel, m.ProfileMemory),
            "profiled": (m.UpdateMaxModelLen, m.AllocateKVCache),
            "kv_allocated": (m.WarmUp,),
            "warmed_up": (m.StartServing,),
            "serving": (
                m.ExecuteModel,
                m.ResumeSteps,
                m.ExecuteDummyBatch,
                m.StartTrace,
                m.StopTrace,
                m.ReloadWeights,
                m.Sleep,
            ),
            "sleeping": (m.ResumePools, m.ReloadWeights, m.Sleep, m.StopTrace, m.WakeUp),
        }[self.state]
        if self.state != "uninit":
            accepted = (*accepted, m.GetKVCacheSpec, m.GetLimits)
        if not isinstance(request, (*accepted, m.DropRequests, m.GetStatus, m.GetHealth)):
            return IllegalMessage
        match request:
            case m.LoadModel() if self.loaded:
                return InvalidRequest
            case m.GetKVCacheSpec() | m.GetLimits() | m.ProfileMemory() if not self.loaded:
                return InvalidRequest
            case m.UpdateMaxModelLen(max_model_len=length) if length > 1024:
                return InvalidRequest
            case m.AllocateKVCache(num_blocks=blocks) if blocks > 64:
                return InsufficientKVMemory
            case m.ResumeSteps(step_id=step_id) if step_id != self.lost_step:
                return InvalidRequest
            case m.ExecuteModel() if self.lost_step is not None:
                return StepAborted
            case m.ExecuteModel(kv_epoch=epoch) if epoch != self.epoch:
                return StaleKVEpoch
            case m.ReloadWeights() if "weights" in self.asleep:
                return InvalidRequest
            case m.WakeUp() if self.weights != "defined":
                return WeightsUndefined
        return None


def _draw(rng: random.Random, model: Model, step_id: int) -> m.Request:
    left_out = {*m.SESSION_REQUESTS, m.Shutdown}
    message = rng.choice([r for r in m.REQUESTS if r not in left_out])
    if message is m.ResumeSteps:
        lost = model.lost_step if model.lost_step is not None else step_id
        return m.ResumeSteps(step_id=lost + (rng.random() < 0.2))
    if message is m.AllocateKVCache:
        return m.AllocateKVCache(num_blocks=rng.choice([1, 32, 64, 65]))
    if message is m.UpdateMaxModelLen:
        return m.UpdateMaxModelLen(max_model_len=rng.choice([1, 512, 1024, 1025]))
    if message is m.Sleep:
        return m.Sleep(level=rng.choice([1, 2]))
    if message is m.ResumePools:
        tags: list[m.Tag] = ["weights", "kv_cache"]
        return m.ResumePools(tags=tuple(rng.choices(tags, k=rng.randrange(3))))
    if message is m.ExecuteModel:
        return empty_step(step_id, model.epoch - (rng.random() < 0.2 and model.epoch > 0))
    return message()


@pytest.mark.parametrize("seed", range(4))
async def test_ten_thousand_random_messages_agree_with_the_model(seed: int) -> None:
    rng = random.Random(seed)
    config = WorkerConfig(
        model=ModelConfig(model="fake"), supervision=SupervisionConfig(trace_dir="/nowhere")
    )
    num_messages = 0
    while num_messages < 10_000:
        model = Model()
        async with fake_worker(config) as worker:
            for step_id in range(2_500):
                request = _draw(rng, model, step_id)
                expected = model.expect(request)
                try:
                    answer: object = await worker.ask(request)
                except WorkerError as error:
                    answer = error
                assert type(answer) is expected, (num_messages, request, answer)
                status = await worker.ask(m.GetStatus())
                assert status.state == model.state
                assert status.weights == model.weights
                assert set(status.asleep) == model.asleep
                assert status.kv_epoch == model.epoch
                assert (await worker.ask(m.GetHealth())).aborted_after == model.lost_step
                if status.state == "serving":
                    assert (status.weights, status.asleep) == ("defined", ())
                num_messages += 1
            runtime = worker._runtime
            assert isinstance(runtime, FakeRuntime)
            assert ("trace" in runtime.books) == model.tracing
        assert runtime.books == {}
