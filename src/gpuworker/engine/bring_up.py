"""Layer 5. From any state to SERVING, one reported step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from gpuworker import messages as m
from gpuworker.config import LimitsConfig
from gpuworker.engine.limits import SchedulerLimits
from gpuworker.engine.worker import WorkerLike
from gpuworker.errors import InsufficientKVMemory, InvalidRequest, WorkerFaulted

__all__ = ["BringUpStep", "ServingInfo", "bring_up"]

ReplyT = TypeVar("ReplyT", bound=m.Reply)


class ServingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a scheduler must know of a worker that serves."""

    block_size: int
    num_blocks: int
    """Including the null block."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    kv_epoch: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]

    def limits(self, *, depth: int = 2) -> SchedulerLimits:
        """Return the limits of a scheduler for this worker."""
        return SchedulerLimits(
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            depth=depth,
        )


class BringUpStep(msgspec.Struct, frozen=True, kw_only=True):
    """One message of the way up."""

    state: str
    """Where the worker was when it was asked."""
    request: m.Request[Any]
    reply: m.Reply
    seconds: float
    status: m.Status
    """Right after the reply."""
    note: str = ""
    """Why the message was sent, where that is not obvious."""


class _Walk:
    """Asks, times and reports, and keeps every reply by its type."""

    def __init__(self, worker: WorkerLike, on_step: Callable[[BringUpStep], None] | None) -> None:
        self._worker = worker
        self._on_step = on_step
        self._replies: dict[type[m.Reply], m.Reply] = {}
        self.status: m.Status

    async def look(self) -> None:
        self.status = await self._worker.ask(m.GetStatus())

    async def ask(self, request: m.Request[ReplyT], note: str = "") -> ReplyT:
        started = time.perf_counter()
        reply = await self._worker.ask(request)
        seconds = time.perf_counter() - started
        before = self.status.state
        await self.look()
        self._replies[type(reply)] = reply
        if self._on_step is not None:
            self._on_step(
                BringUpStep(
                    state=before,
                    request=request,
                    reply=reply,
                    seconds=seconds,
                    status=self.status,
                    note=note,
                )
            )
        return reply

    def reply(self, kind: type[ReplyT]) -> ReplyT | None:
        reply = self._replies.get(kind)
        return reply if isinstance(reply, kind) else None


async def bring_up(
    worker: WorkerLike,
    *,
    num_blocks: int | None = None,
    max_num_blocks_useful: bool = True,
    limits: LimitsConfig | None = None,
    earlier: ServingInfo | None = None,
    on_step: Callable[[BringUpStep], None] | None = None,
) -> ServingInfo:
    """Lead a worker to SERVING from whatever state it is in.

    num_blocks: size of the block pool, null block included; None takes what the profile
        allows, and with max_num_blocks_useful no more than limits.max_num_seqs requests of
        max_model_len can use.
    limits: the worker's own limits (only for that bound); None means the defaults.
    earlier: what a worker that is already past LoadModel told when it was brought up; its
        answers cannot be asked for again. Without it such a worker is refused.
    on_step: called after every message with what was said and how long it took.

    When one request of max_model_len does not fit into the pool, max_model_len is lowered to
    what fits, and the report says so. Raises WorkerFaulted for a worker that cannot go on,
    InvalidRequest when facts are missing, InsufficientKVMemory when not one token fits, and
    whatever the worker answers; the worker then stays in the state it has reached.
    """
    walk = _Walk(worker, on_step)
    await walk.look()
    if walk.status.state == "faulted":
        raise WorkerFaulted(
            f"the worker is faulted ({walk.status.last_error}); shut it down and start another",
            state=walk.status.state,
        )
    if walk.status.state == "uninit":
        await walk.ask(m.InitDevice())
    if walk.status.state == "device_ready" and walk.status.weights == "undefined":
        await walk.ask(m.LoadModel())
    if walk.reply(m.ModelLoaded) is None and earlier is None:
        raise InvalidRequest(
            f"the worker is {walk.status.state} with its model loaded and does not repeat what "
            "it said then; pass the ServingInfo of that bring-up as earlier"
        )
    if walk.status.state == "device_ready":
        await walk.ask(m.GetKVCacheSpec())
        await walk.ask(m.ProfileMemory())
    if walk.status.state == "profiled":
        await _allocate(walk, num_blocks, max_num_blocks_useful, limits or LimitsConfig(), earlier)
    if walk.status.state == "kv_allocated":
        await walk.ask(m.WarmUp())
    if walk.status.state == "warmed_up":
        await walk.ask(m.StartServing())
    if walk.status.state == "sleeping":
        await walk.ask(m.WakeUp())
    return _summary(walk, earlier)


async def _allocate(
    walk: _Walk,
    num_blocks: int | None,
    useful_only: bool,
    limits: LimitsConfig,
    earlier: ServingInfo | None,
) -> None:
    """Choose the size of the block pool, fit max_model_len to it, and create it."""
    spec = walk.reply(m.KVCacheSpec) or await walk.ask(m.GetKVCacheSpec())
    model, profile = walk.reply(m.ModelLoaded), walk.reply(m.MemoryProfiled)
    max_model_len = _max_model_len(model, earlier)
    if num_blocks is None:
        if profile is None:
            raise InvalidRequest(
                "the worker was profiled before and does not repeat the result; give num_blocks"
            )
        num_blocks = profile.max_num_blocks
        if useful_only:
            blocks_per_request = -(-max_model_len // spec.block_size)
            num_blocks = min(num_blocks, limits.max_num_seqs * blocks_per_request + 1)
    num_tokens = (num_blocks - 1) * spec.block_size
    if num_tokens < 2:
        raise InsufficientKVMemory(
            f"{num_blocks} blocks of {spec.block_size} tokens, one of them the null block, hold "
            "no request; leave more memory for the KV cache or choose a smaller block size"
        )
    if num_tokens < max_model_len:
        note = f"{num_blocks - 1} usable blocks hold {num_tokens} tokens, not {max_model_len}"
        await walk.ask(m.UpdateMaxModelLen(max_model_len=num_tokens), note)
    await walk.ask(m.AllocateKVCache(num_blocks=num_blocks))


def _max_model_len(model: m.ModelLoaded | None, earlier: ServingInfo | None) -> int:
    if model is not None:
        return model.max_model_len
    assert earlier is not None, "bring_up refuses to go on without either"
    return earlier.max_model_len


def _summary(walk: _Walk, earlier: ServingInfo | None) -> ServingInfo:
    """Put together what was said on the way; earlier fills in what was said before."""
    model, updated = walk.reply(m.ModelLoaded), walk.reply(m.MaxModelLenUpdated)
    pool, serving = walk.reply(m.KVCacheAllocated), walk.reply(m.ServingStarted)
    if model is not None and pool is not None and serving is not None:
        return ServingInfo(
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            max_model_len=model.max_model_len if updated is None else updated.max_model_len,
            max_num_seqs=serving.max_num_seqs,
            max_num_batched_tokens=serving.max_num_batched_tokens,
            kv_epoch=walk.status.kv_epoch,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
        )
    assert earlier is not None, "bring_up refuses to go on without it"
    changes: dict[str, Any] = {"kv_epoch": walk.status.kv_epoch}
    if updated is not None:
        changes["max_model_len"] = updated.max_model_len
    if pool is not None:
        changes |= {"block_size": pool.block_size, "num_blocks": pool.num_blocks}
    if serving is not None:
        changes["max_num_seqs"] = serving.max_num_seqs
        changes["max_num_batched_tokens"] = serving.max_num_batched_tokens
    return msgspec.structs.replace(earlier, **changes)
