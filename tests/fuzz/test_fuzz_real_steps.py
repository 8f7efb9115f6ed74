"""A real runner under steps whose numbers are wrong: refused or computed, never a fault.

What a well-behaved request generates between them stays what it was.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.errors import ProtocolError, WorkerError
from gpuworker.step import NewRequest, SamplingParams, StepRow, pack_step, unpack_sampled
from real_worker import BLOCK_SIZE, GREEDY, Hand, real_worker, tiny_config

SEED = int(os.environ.get("GPUWORKER_FUZZ_SEED", "22"))
NUM_STEPS = 3_000 * int(os.environ.get("GPUWORKER_FUZZ_SCALE", "1"))
BETWEEN_LOOKS = 300
PROMPT, NUM_TOKENS = [7, 8, 9, 10, 11], 6
ODD = (-(2**31), -1, 0, 1, 2, 3, 4, 5, 31, 32, 63, 64, 65, 1000, 2**31 - 1)
ODD_FLOATS = (-1.0, 0.0, 1e-9, 0.5, 1.0, 2.0, 1e38, float("nan"), float("inf"), float("-inf"))


class WildScheduler:
    """Keeps its books like a scheduler, and says something else every other time, from a seed."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._live: dict[int, tuple[str, int]] = {}  # slot -> request and its computed tokens
        self._before: dict[int, tuple[str, int]] = {}
        self._free = list(range(1, 32))
        self._number = 0

    def step(self, step_id: int, kv_epoch: int) -> m.ExecuteModel:
        rng = self._rng
        self._before = dict(self._live)
        rows: list[StepRow] = []
        new: list[NewRequest] = []
        tokens: list[int] = []
        finished = tuple(self._finish(slot) for slot in [*self._live] if rng.random() < 0.15)
        for slot in rng.sample(range(4), rng.randrange(4)):
            if slot in self._live:
                request_id, computed = self._live[slot]
                blocks = self._blocks(1) if computed % BLOCK_SIZE == 0 else []
                rows.append(StepRow(slot, 1, computed, blocks))
                self._live[slot] = request_id, computed + 1
            else:
                self._number += 1
                prompt = [rng.randrange(256) for _ in range(rng.randrange(1, 9))]
                request = NewRequest(
                    request_id=f"{self._number}",
                    slot=slot,
                    num_prompt_tokens=len(prompt),
                    sampling=self._sampling(),
                )
                new.append(request)
                tokens += prompt
                blocks = self._blocks(-(-len(prompt) // BLOCK_SIZE))
                rows.append(StepRow(slot, len(prompt), 0, blocks))
                self._live[slot] = request.request_id, len(prompt)
        step = m.ExecuteModel(
            step_id=step_id,
            kv_epoch=kv_epoch,
            num_rows=len(rows),
            num_block_ids=sum(len(row.new_block_ids) for row in rows),
            num_token_ids=len(tokens),
            new_requests=tuple(new),
            finished=finished,
            buffer=pack_step(rows, tokens),
        )
        return self._spoilt(step) if rng.random() < 0.5 else step

    def learn(self, live_requests: Sequence[str], refused: Collection[str] | None) -> None:
        """Take in what lives after a step, and which rows did not run; None for all of them."""
        believed = {request_id: slot for slot, (request_id, _) in self._before.items()}
        believed |= {request_id: slot for slot, (request_id, _) in self._live.items()}
        now: dict[int, tuple[str, int]] = {}
        for request_id in live_requests:
            if (slot := believed.get(request_id)) is not None:
                did_run = refused is not None and request_id not in refused
                books = self._live if did_run and slot in self._live else self._before
                now[slot] = books.get(slot, (request_id, 0))
        self._live = now

    def _finish(self, slot: int) -> str:
        return self._live.pop(slot)[0]

    def _blocks(self, number: int) -> list[int]:
        return self._rng.sample(self._free, number)  # somebody else's, at times

    def _sampling(self) -> SamplingParams:
        rng = self._rng
        if rng.random() < 0.6:
            return GREEDY
        sampling = SamplingParams(seed=1, logprobs=rng.choice((None, 0, 2)))
        changes: dict[str, object] = {}
        for _ in range(rng.randrange(1, 4)):
            name = rng.choice(SamplingParams.__struct_fields__)
            match name:
                case "logit_bias":
                    changes[name] = {rng.choice(ODD): rng.choice(ODD_FLOATS)}
                case "allowed_token_ids" | "stop_token_ids":
                    changes[name] = tuple(rng.choices(ODD, k=rng.randrange(4)))
                case "bad_token_ids":
                    changes[name] = (tuple(rng.choices(ODD, k=rng.randrange(3))),)
                case "seed" | "logprobs" | "top_k" | "min_tokens":
                    changes[name] = rng.choice(ODD)
                case _:
                    changes[name] = rng.choice(ODD_FLOATS)
        return msgspec.structs.replace(sampling, **changes)

    def _spoilt(self, step: m.ExecuteModel) -> m.ExecuteModel:
        rng = self._rng
        for _ in range(rng.choice((1, 1, 2))):
            match rng.randrange(5):
                case 0 | 1 if step.buffer.nbytes and step.buffer.nbytes % 4 == 0:
                    numbers = np.frombuffer(step.buffer, "<i4").copy()
                    numbers[rng.randrange(numbers.size)] = rng.choice(ODD)
                    step = msgspec.structs.replace(step, buffer=numbers.data.cast("B"))
                case 2:
                    name = rng.choice(("num_rows", "num_block_ids", "num_token_ids"))
                    number = max(rng.choice(ODD), 0)
                    step = msgspec.structs.replace(step, **{name: number})
                case 3 if step.new_requests:
                    name = rng.choice(("slot", "num_prompt_tokens", "num_output_tokens"))
                    first = msgspec.structs.replace(
                        step.new_requests[0], **{name: max(rng.choice(ODD), 0)}
                    )
                    step = msgspec.structs.replace(
                        step, new_requests=(first, *step.new_requests[1:])
                    )
                case _:
                    cut = rng.randrange(step.buffer.nbytes + 1)
                    step = msgspec.structs.replace(step, buffer=step.buffer[:cut])
        return step


async def _generate(worker: GPUWorker, step_id: int) -> list[int]:
    """Drop whatever lives and generate from a prompt, in blocks that others have used."""
    await worker.ask(m.DropRequests())
    hand = Hand(worker)
    hand.step_id = step_id
    tokens = await hand.run(PROMPT, NUM_TOKENS, blocks=range(1, 17))
    await worker.ask(m.DropRequests())
    return tokens


async def test_a_real_runner_refuses_or_computes_and_stays_right(tiny_model: Path) -> None:
    print(f"seed {SEED}")
    rng = random.Random(SEED)
    codes: Counter[str] = Counter()
    async with real_worker(tiny_config(tiny_model)) as worker:
        expected = await _generate(worker, 0)
        wild = WildScheduler(rng)
        for number in range(1, NUM_STEPS + 1):
            step = wild.step(number, 0)
            refused: set[str] | None = None
            try:
                output = await worker.ask(step)
            except WorkerError as error:
                if not isinstance(error, ProtocolError):
                    raise AssertionError(f"{step} was not refused") from error
                codes[error.code] += 1
                await worker.ask(m.ResumeSteps(step_id=number))
            else:
                refused = {refusal.request_id for refusal in output.refusals}
                codes["step_output"] += 1
                codes.update(refusal.code for refusal in output.refusals)
                codes["tokens"] += unpack_sampled(output.buffer, output.num_rows).token_ids.size
            wild.learn((await worker.ask(m.GetLimits())).live_requests, refused)
            if number % BETWEEN_LOOKS == 0:
                assert (await worker.ask(m.GetHealth())).ready
                assert await _generate(worker, number) == expected
                wild = WildScheduler(rng)
    print(codes)
    assert codes["step_output"] > NUM_STEPS // 5
    assert codes["invalid_request"] > NUM_STEPS // 10
    assert codes["tokens"] > NUM_STEPS // 10
