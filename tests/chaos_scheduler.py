"""A scheduler process for tests to kill: it brings a worker up from wherever it is, and drives it.

Usage: python chaos_scheduler.py ENDPOINT EPOCH [real]

With "real" the worker is one on a tiny real model, and its steps generate from prompts.

It prints what it does, a word a line: "welcome", the tag of every message before it is sent,
"serving", "sent ID" and "got ID" for its steps (two at a time), "error CLASS ID" for those that
fail. It sleeps and wakes the worker now and then. After the first error of a step it takes in
what is left; an error of anything else is "refused CLASS". Then it says "end", and ends.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import deque
from contextlib import suppress

from chaos_worker import STEPS_PER_EPOCH, chaos_step
from gpuworker import messages as m
from gpuworker.errors import ClientError, IllegalMessage, WorkerError
from gpuworker.ipc import RemoteWorker, connect
from gpuworker.step import NewRequest, SamplingParams, StepRow, pack_step

__all__ = ["bring_up"]

_NEXT: dict[str, m.Request[m.Reply]] = {
    "uninit": m.InitDevice(),
    "profiled": m.AllocateKVCache(num_blocks=32),
    "kv_allocated": m.WarmUp(),
    "warmed_up": m.StartServing(),
}
_STEPS_BETWEEN_SLEEPS = 40
_PROMPT = (3, 4, 5, 6, 7)
_STEPS_PER_REQUEST = 10
"""Of a real worker: a prompt, then one token each."""


def _say(*words: object) -> None:
    print(*words, flush=True)


async def bring_up(worker: RemoteWorker) -> int:
    """Lead a worker to serving from any state; returns the KV epoch."""
    while True:
        status = await worker.ask(m.GetStatus())
        match status.state:
            case "serving":
                return status.kv_epoch
            case "device_ready":
                request = m.LoadModel() if status.weights == "undefined" else m.ProfileMemory()
            case "sleeping" if status.weights == "defined":
                request = m.WakeUp()
            case "sleeping" if "weights" in status.asleep:
                request = m.ResumePools(tags=("weights",))
            case "sleeping":
                request = m.ReloadWeights()
            case state:
                request = _NEXT[state]
        _say(m.message_tag(type(request).__name__))
        with suppress(IllegalMessage):  # a move of our predecessor ended in between
            await worker.ask(request)


def _real_step(epoch: int, number: int, kv_epoch: int) -> m.ExecuteModel:
    """A step of one request after the other; sleeping comes between two of them."""
    count, at = divmod(number - 1, _STEPS_PER_REQUEST)
    sampling = SamplingParams(temperature=0.0)
    new = NewRequest(
        request_id=f"{epoch}-{count}", slot=0, num_prompt_tokens=len(_PROMPT), sampling=sampling
    )
    is_first = at == 0
    return m.ExecuteModel(
        step_id=epoch * STEPS_PER_EPOCH + number,
        kv_epoch=kv_epoch,
        num_rows=1,
        num_block_ids=4 if is_first else 0,
        num_token_ids=len(_PROMPT) if is_first else 0,
        new_requests=(new,) if is_first else (),
        finished=(f"{epoch}-{count - 1}",) if is_first and count else (),
        buffer=pack_step(
            [
                StepRow(0, len(_PROMPT), 0, (1, 2, 3, 4))
                if is_first
                else StepRow(0, 1, len(_PROMPT) + at - 1)
            ],
            _PROMPT if is_first else (),
        ),
    )


async def _drive(worker: RemoteWorker, epoch: int, is_real: bool) -> None:
    rng = random.Random(epoch)
    kv_epoch = await bring_up(worker)
    _say("serving")
    pending: deque[tuple[int, asyncio.Future[m.StepOutput]]] = deque()
    number = 0
    is_fine = True
    while is_fine or pending:
        while is_fine and len(pending) < 2:
            number += 1
            _say("sent", epoch * STEPS_PER_EPOCH + number)
            step = (_real_step if is_real else chaos_step)(epoch, number, kv_epoch)
            pending.append((step.step_id, worker.submit(step)))
        step_id, reply = pending.popleft()
        try:
            output = await reply
            assert (output.step_id, output.refusals) == (step_id, ())
            _say("got", step_id)
        except (WorkerError, ClientError) as error:
            is_fine = False
            _say("error", type(error).__name__, step_id)
        if is_fine and number % _STEPS_BETWEEN_SLEEPS == 0:
            await asyncio.wait([reply for _, reply in pending])
            _say("sleep")
            await worker.ask(m.Sleep(level=rng.choice((1, 2))))
            kv_epoch = await bring_up(worker)
            _say("awake")


async def main(endpoint: str, epoch: int, is_real: bool) -> None:
    try:
        async with connect(endpoint, epoch=epoch, client=f"scheduler {epoch}") as worker:
            _say("welcome")
            await _drive(worker, epoch, is_real)
    except (WorkerError, ClientError) as error:
        _say("refused", type(error).__name__)
    _say("end")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3:] == ["real"]))
