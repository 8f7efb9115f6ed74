"""Layer 0. One example of each message, for the documents and for people who write clients."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpuworker import events as e
from gpuworker import messages as m
from gpuworker.errors import Busy
from gpuworker.step import (
    Logprobs,
    NewRequest,
    Refusal,
    SamplingParams,
    StepRow,
    pack_sampled,
    pack_step,
)

__all__ = ["EVENT_EXAMPLES", "FAILURE_EXAMPLE", "REPLY_EXAMPLES", "REQUEST_EXAMPLES"]

# Slot 4 is new: a prompt of three tokens into block 9. Slot 1 decodes its 18th token.
_ROWS = [StepRow(4, 3, 0, [9]), StepRow(1, 1, 17)]
_NEW = NewRequest(
    request_id="r-7", slot=4, num_prompt_tokens=3, sampling=SamplingParams(temperature=0.0)
)
_STEP = m.ExecuteModel(
    step_id=12,
    kv_epoch=1,
    num_rows=2,
    num_block_ids=1,
    num_token_ids=3,
    new_requests=(_NEW,),
    finished=("r-3",),
    buffer=pack_step(_ROWS, [504, 3575, 282]),
)


def _ints(*values: int) -> memoryview:
    return np.array(values, "<i4").data.cast("B")


REQUEST_EXAMPLES: tuple[m.Request[Any], ...] = (
    m.Hello(min_version=1, max_version=1, epoch=7, client="scheduler-0", lease_ms=10_000),
    m.EndSession(),
    m.Cancel(corr=41),
    m.OpenRing(),
    m.InitDevice(),
    m.LoadModel(),
    m.GetKVCacheSpec(),
    m.GetLimits(),
    m.ProfileMemory(),
    m.UpdateMaxModelLen(max_model_len=4096),
    m.AllocateKVCache(num_blocks=512),
    m.WarmUp(),
    m.StartServing(),
    _STEP,
    m.ResumeSteps(step_id=12),
    m.DropRequests(),
    m.ExecuteDummyBatch(num_tokens=8),
    m.Sleep(level=2),
    m.ResumePools(tags=("weights",)),
    m.WakeUp(),
    m.ReloadWeights(),
    m.StartTrace(),
    m.StopTrace(),
    m.GetStatus(),
    m.GetHealth(),
    m.Shutdown(),
)

_STATUS = m.Status(
    state="serving",
    health="ok",
    weights="defined",
    asleep=(),
    memory=(
        m.MemoryUse(
            tag="weights", reserved_bytes=1 << 30, mapped_bytes=1 << 30, resident_bytes=1 << 30
        ),
    ),
    process_bytes=1 << 31,
    kv_epoch=1,
    weight_version=1,
    num_requests=2,
    num_queued=1,
    num_steps=11,
    running_step_id=12,
    running_step_s=0.004,
    moving="",
    moving_s=0.0,
    last_step_s=0.004,
    last_error="",
)
_HEALTH = m.HealthReport(
    health="ok",
    ready=True,
    state="serving",
    weights="defined",
    asleep=(),
    num_steps=11,
    running_step_id=None,
    running_step_s=0.0,
    moving="",
    moving_s=0.0,
    limit_s=0.0,
    aborted_after=None,
    last_step_s=0.25,
    last_error="",
    fault="",
    loop_lag_s=0.0,
    uptime_s=60.0,
    boot_id="00d1ce5eed5eed00",
    session=m.SessionHealth(highest_epoch=7, client="scheduler-0", live=True, silent_s=0.25),
    events="ipc:///run/worker/rank0.events",
)

REPLY_EXAMPLES: tuple[m.Reply, ...] = (
    m.Welcome(
        version=1,
        boot_id="00d1ce5eed5eed00",
        epoch=7,
        state="serving",
        window=2,
        num_replays=64,
        lease_ms=10_000,
        features=("replay", "cancel", "deadline"),
        max_body_bytes=16 << 20,
        events="ipc:///run/worker/rank0.events",
    ),
    m.SessionEnded(),
    m.Cancelled(outcome="withdrawn"),
    m.RingOpened(pid=4711, memory_fd=20, request_bell_fd=22, reply_bell_fd=23, ring_bytes=8 << 20),
    m.DeviceReady(device="cpu", device_name="a CPU", total_bytes=1 << 34, available_bytes=1 << 33),
    m.ModelLoaded(
        architecture="LlamaForCausalLM",
        num_parameters=134_515_008,
        weight_bytes=269_030_016,
        dtype="bfloat16",
        max_model_len=8192,
        vocab_size=49152,
        eos_token_ids=(2,),
        load_s=0.5,
    ),
    m.KVCacheSpec(
        block_size=16,
        dtype="bfloat16",
        block_bytes=12_288,
        layers=(
            m.KVLayerSpec(
                layer=0,
                kind="full",
                num_kv_heads=3,
                head_size=64,
                sliding_window=None,
                block_bytes=12_288,
            ),
        ),
    ),
    m.Limits(
        max_model_len=4096,
        vocab_size=49152,
        eos_token_ids=(2,),
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        max_logprobs=20,
        window=2,
        block_size=16,
        max_num_blocks=4096,
        num_blocks=512,
        kv_epoch=1,
        next_step_id=12,
        live_requests=("r-3",),
    ),
    m.MemoryProfiled(
        kv_budget_bytes=1 << 30,
        block_bytes=12_288,
        max_num_blocks=4096,
        requested_bytes=1 << 33,
        weight_bytes=269_030_016,
        peak_activation_bytes=1 << 26,
        other_bytes=1 << 28,
    ),
    m.MaxModelLenUpdated(max_model_len=4096),
    m.KVCacheAllocated(num_blocks=512, block_size=16, kv_cache_bytes=6_291_456, kv_epoch=1),
    m.WarmedUp(num_shapes=3, warm_up_s=0.5),
    m.ServingStarted(kv_epoch=1, max_num_seqs=128, max_num_batched_tokens=2048),
    m.StepOutput(
        step_id=12,
        kv_epoch=1,
        num_rows=2,
        step_s=0.004,
        buffer=pack_sampled(np.array([1, 0], np.int32), np.array([4649], np.int32)),
        logprobs=Logprobs(
            num_columns=1,
            token_ids=_ints(4649),
            values=np.array([-0.25], "<f4").data.cast("B"),
            ranks=_ints(1),
        ),
        refusals=(Refusal(request_id="r-1", code="invalid_request", message="why"),),
    ),
    m.StepsResumed(next_step_id=12),
    m.RequestsDropped(num_dropped=2),
    m.DummyBatchExecuted(num_tokens=8),
    m.Asleep(level=2, freed_bytes=1 << 30, spilled_bytes=0, kv_epoch=2, sleep_s=0.125),
    m.PoolsResumed(resumed=("weights",), asleep=("kv_cache",), weights="undefined", kv_epoch=2),
    m.Awake(resumed=("weights", "kv_cache"), kv_epoch=2, wake_s=0.25),
    m.WeightsReloaded(weight_bytes=269_030_016, weight_version=2, kv_epoch=3, load_s=0.5),
    m.TraceStarted(changed=True),
    m.TraceStopped(changed=True, path="/traces/rank0.json"),
    _STATUS,
    _HEALTH,
    m.Closed(),
)
FAILURE_EXAMPLE = m.Failure(
    code=Busy.code,
    message="2 steps are unanswered, the window is 2; send number 3 again after a reply",
    retryable=True,
)
EVENT_EXAMPLES: tuple[e.Event, ...] = (
    e.StateChanged(state="sleeping", previous="serving"),
    e.KVEpochChanged(kv_epoch=2),
    e.HealthChanged(health="stalled", reason="step 12 runs for 301.0 s, its limit is 300"),
    e.MoveProgress(move="load_model", move_s=0.5, done_bytes=1 << 20, total_bytes=1 << 28),
    e.Metrics(
        num_requests=2,
        num_waiting=0,
        num_in_flight=1,
        num_steps=11,
        running_step_s=0.004,
        last_step_s=0.25,
        process_bytes=1 << 31,
        loop_lag_s=0.0,
    ),
)
