"""Layer 5. From any state to SERVING, one reported step at a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from gpuworker import messages as m
from gpuworker.engine.worker import WorkerLike
from gpuworker.errors import InsufficientKVMemory, InvalidRequest, ProtocolError, WorkerFaulted

__all__ = ["BringUpStep", "bring_up"]

_WITHOUT_POOL = ("uninit", "device_ready", "profiled")


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
    """Asks, times and reports, and knows where the worker is."""

    def __init__(self, worker: WorkerLike, on_step: Callable[[BringUpStep], None] | None) -> None:
        self._worker = worker
        self._on_step = on_step
        self.status: m.Status

    async def begin(self) -> None:
        """Look where the worker is once all that was sent to it before has happened."""
        with suppress(ProtocolError):  # too early for it, but its turn has come
            await self.limits()
        await self._look()

    async def limits(self) -> m.Limits:
        return await self._worker.ask(m.GetLimits())

    async def ask(self, request: m.Request[Any], note: str = "") -> None:
        started = time.perf_counter()
        reply: m.Reply = await self._worker.ask(request)
        seconds = time.perf_counter() - started
        before = self.status.state
        await self._look()
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

    async def _look(self) -> None:
        self.status = await self._worker.ask(m.GetStatus())
        if self.status.state == "faulted":
            raise WorkerFaulted(
                f"the worker is faulted ({self.status.last_error}); shut it down and start another",
                state=self.status.state,
            )


async def bring_up(
    worker: WorkerLike,
    *,
    num_blocks: int | None = None,
    on_step: Callable[[BringUpStep], None] | None = None,
) -> m.Limits:
    """Lead a worker to SERVING from whatever state it is in, and return its limits.

    It does not matter who led the worker to that state, or whether the weights were lost on
    the way (they are loaded again). Live requests stay; an engine that is entered ends them.

    num_blocks: size of the block pool, null block included; None takes what the profile
        allows, but no more than max_num_seqs requests of max_model_len can use. A pool that
        exists is never resized.
    on_step: called after every message that led further, with what was said and how long it
        took.

    When one request of max_model_len does not fit into the pool, max_model_len is lowered to
    what fits, and the report says so. Raises WorkerFaulted for a worker that cannot go on,
    InvalidRequest when the pool exists in another size than num_blocks, InsufficientKVMemory
    when not one token fits, and whatever the worker answers; the worker then stays in the
    state it has reached.
    """
    walk = _Walk(worker, on_step)
    await walk.begin()
    if num_blocks is not None and walk.status.state not in _WITHOUT_POOL:
        present = (await walk.limits()).num_blocks
        if present != num_blocks:
            raise InvalidRequest(
                f"num_blocks is {num_blocks}, but the worker has a pool of {present} blocks; "
                "leave num_blocks out to use it, or start another worker"
            )
    if walk.status.state == "uninit":
        await walk.ask(m.InitDevice())
    if walk.status.state == "device_ready":
        if walk.status.weights == "undefined":
            await walk.ask(m.LoadModel())
        await walk.ask(m.ProfileMemory())
    if walk.status.state == "profiled":
        await _allocate(walk, num_blocks)
    if walk.status.state == "kv_allocated":
        await walk.ask(m.WarmUp())
    if walk.status.state == "warmed_up":
        await walk.ask(m.StartServing())
    if walk.status.weights != "defined":
        await _load_again(walk)
    if walk.status.state == "sleeping":
        await walk.ask(m.WakeUp())
    return await walk.limits()


async def _allocate(walk: _Walk, num_blocks: int | None) -> None:
    """Choose the size of the block pool, fit max_model_len to it, and create it."""
    limits = await walk.limits()
    max_model_len, block_size = limits.max_model_len, limits.block_size
    if num_blocks is None:
        blocks_per_request = -(-max_model_len // block_size)
        num_blocks = min(limits.max_num_blocks, limits.max_num_seqs * blocks_per_request + 1)
    num_tokens = (num_blocks - 1) * block_size
    if num_tokens < 2:
        raise InsufficientKVMemory(
            f"{num_blocks} blocks of {block_size} tokens, one of them the null block, hold no "
            "request; leave more memory for the KV cache or choose a smaller block size"
        )
    if num_tokens < max_model_len:
        note = f"{num_blocks - 1} usable blocks hold {num_tokens} tokens, not {max_model_len}"
        await walk.ask(m.UpdateMaxModelLen(max_model_len=num_tokens), note)
    await walk.ask(m.AllocateKVCache(num_blocks=num_blocks))


async def _load_again(walk: _Walk) -> None:
    """Fill weights that lost their contents: a sleep of level 2, or a reload that failed."""
    note = f"the weights are {walk.status.weights}"
    if "weights" in walk.status.asleep:
        await walk.ask(m.ResumePools(tags=("weights",)), note)
    await walk.ask(m.ReloadWeights(), note)
