"""A launcher for tests to kill: starts workers, says when all are where they should be, waits.

Usage: python launcher.py JSON, a list of [command or null, config, num_moves or null, what]:
num_moves leads the worker through so many states; what is "", "starting" (do not wait for it),
"hangs" (until it says so), "step" (until a step runs) or "fault" (until a step faulted). Prints
{"pid": ..., "endpoint": ...} for each in one JSON line. With "managed" as second argument it is
itself a manager that follows its parent, lets its workers follow the parent, too, and does not
end on SIGTERM.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack

import msgspec

from gpuworker import messages as m
from gpuworker.config import WorkerConfig
from gpuworker.ipc import connect
from gpuworker.launch import WorkerProcess, die_with_parent
from gpuworker.testing import empty_step
from processes import observe, until, walk


async def _bring(
    stack: AsyncExitStack,
    command: list[str] | None,
    config: dict[str, object],
    num_moves: int | None,
    what: str,
) -> dict[str, object]:
    options = {} if command is None else {"command": command}
    process = WorkerProcess(
        msgspec.convert(config, WorkerConfig),
        die_with=[os.getppid()] if "managed" in sys.argv else [],
        **options,
    )
    entering = asyncio.create_task(stack.enter_async_context(process))
    await until(lambda: "_process" in vars(process))
    if num_moves is not None:
        await entering
        worker = await stack.enter_async_context(connect(process.endpoint))
        await walk(worker, num_moves)
        if what in ("step", "fault"):
            worker.submit(empty_step(1))
            async with observe(process.endpoint) as health:

                async def is_there() -> bool:
                    report = await health()
                    return bool(report.fault) if what == "fault" else report.running_step_id == 1

                await until(is_there)
        elif what == "hangs":
            worker.submit(m.LoadModel() if num_moves == 1 else m.GetHealth())
    if what == "hangs":
        await until(lambda: "hangs: " in process.last_words())
    return {"pid": process.pid, "endpoint": process.endpoint}


async def main(tasks: list[tuple[list[str] | None, dict[str, object], int | None, str]]) -> None:
    async with AsyncExitStack() as stack:
        starting = [task for task in tasks if task[3] == "starting"]
        ready = [task for task in tasks if task[3] != "starting"]
        async with asyncio.TaskGroup() as group:
            bringing = [group.create_task(_bring(stack, *task)) for task in ready]
        found = [task.result() for task in bringing]
        found += [await _bring(stack, *task) for task in starting]
        print(json.dumps(found), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    if "managed" in sys.argv:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        die_with_parent(os.getppid(), grace_s=1.0)
    asyncio.run(main(json.loads(sys.argv[1])))
