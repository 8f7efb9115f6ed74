"""Layer 3. The way into sleep, shared by the two states that accept Sleep."""

from __future__ import annotations

import time
from typing import Literal

import anyio.lowlevel

from gpuworker.lifecycle import Undo
from gpuworker.messages import Asleep
from gpuworker.runtime import Runtime

__all__ = ["fall_asleep"]


async def fall_asleep(rt: Runtime, level: Literal[1, 2], undo: Undo) -> Asleep:
    """Keep what the level keeps, then release everything in one call that cannot be undone.

    Whatever may fail or be cancelled comes before the release, so a failed sleep has lost
    neither weights nor KV.
    """
    started = time.monotonic()
    spilled_bytes = 0
    if level == 1:
        spilled_bytes = await rt.device.run(rt.keep_weights)
        if spilled_bytes:
            undo.push(rt.device.run, rt.forget_kept_weights)
    await anyio.lowlevel.checkpoint()

    def let_go() -> int:
        before = rt.process_bytes()
        rt.release(("weights", "kv_cache"), level == 1)
        return max(before - rt.process_bytes(), 0)

    freed_bytes = await rt.device.run(let_go)
    undo.commit()
    return Asleep(
        level=level,
        freed_bytes=freed_bytes,
        spilled_bytes=spilled_bytes,
        kv_epoch=rt.kv_epoch(),
        sleep_s=time.monotonic() - started,
    )
