"""A worker process that takes its time, writes down what it does, and knows whose requests live.

Usage: python chaos_worker.py LOG TIMES [arguments of gpuworker serve]

TIMES is a JSON object of seconds: step, load_model, profile_memory, warm_up, keep_weights,
release, resume, reload_weights; each call takes up to that long, at random. A negative number is
for ever. "large" is no time: it makes every step answer with so many bytes and their checksum.

LOG gets a line for what begins: "step ID" or the name of a call. Step ids of a session with epoch
E begin at E * STEPS_PER_EPOCH, its requests are named "E-...". A line "leak ..." says that a
request of another session lived when a step began.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from gpuworker import messages as m
from gpuworker.cli import serve
from gpuworker.config import WorkerConfig
from gpuworker.device.thread import DeviceThread
from gpuworker.step import NewRequest, StepRow, pack_step
from gpuworker.testing import FakeRuntime

__all__ = ["STEPS_PER_EPOCH", "Log", "chaos_step", "chaos_worker", "is_whole"]

T = TypeVar("T")
STEPS_PER_EPOCH = 1_000_000


def chaos_worker(log: Path, **times: float) -> tuple[str, ...]:
    """Return the command of such a worker."""
    return (sys.executable, __file__, str(log), json.dumps(times))


def chaos_step(epoch: int, number: int, kv_epoch: int) -> m.ExecuteModel:
    """A step of one row; every third adds a request and every ninth ends those."""
    new: tuple[NewRequest, ...] = ()
    finished: tuple[str, ...] = ()
    if number % 3 == 0:
        new = (NewRequest(request_id=f"{epoch}-{number}", slot=number % 9, num_prompt_tokens=1),)
    if number % 9 == 0 and number > 9:
        finished = tuple(f"{epoch}-{number - 9 + three}" for three in (0, 3, 6))
    return m.ExecuteModel(
        step_id=epoch * STEPS_PER_EPOCH + number,
        kv_epoch=kv_epoch,
        num_rows=1,
        num_token_ids=len(new),
        new_requests=new,
        finished=finished,
        buffer=pack_step([StepRow(number % 9, 1, 0)], [1] * len(new)),
    )


def is_whole(output: m.StepOutput) -> bool:
    """Say whether a large answer is what was sent: its last four bytes are a checksum."""
    data = memoryview(output.buffer)
    return zlib.crc32(data[:-4]) == int.from_bytes(data[-4:], "little")


class Log:
    """What a worker has written down, read from outside."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []

    def steps(self) -> list[int]:
        """Ids of the steps that began, in order."""
        return [int(line.split()[1]) for line in self.lines() if line.startswith("step ")]

    def leaks(self) -> list[str]:
        return [line for line in self.lines() if line.startswith("leak")]


class Rank(FakeRuntime):
    """FakeRuntime that takes its time and writes a log."""

    def __init__(
        self, log: Path, times: dict[str, float], config: WorkerConfig, device: DeviceThread
    ) -> None:
        super().__init__(config, device)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._times = times
        self._rng = random.Random(os.getpid())
        self._requests: set[str] = set()
        self.before_step = self._begin_step

    def _write(self, line: str) -> None:
        os.write(self._log, f"{line}\n".encode())

    def _take_time(self, what: str) -> None:
        limit_s = self._times.get(what, 0.0)
        if limit_s < 0:
            threading.Event().wait()
        elif limit_s:
            threading.Event().wait(self._rng.random() * limit_s)

    def _slowly(self, what: str, call: Callable[[], T]) -> T:
        self._write(what)
        self._take_time(what)
        return call()

    def load_model(self) -> m.ModelLoaded:
        return self._slowly("load_model", super().load_model)

    def profile_memory(self) -> m.MemoryProfiled:
        return self._slowly("profile_memory", super().profile_memory)

    def warm_up(self) -> m.WarmedUp:
        return self._slowly("warm_up", super().warm_up)

    def keep_weights(self) -> int:
        return self._slowly("keep_weights", super().keep_weights)

    def release(self, tags: tuple[m.Tag, ...], keep: bool) -> None:
        release = super().release
        self._slowly("release", lambda: release(tags, keep))
        self._requests.clear()

    def resume(self, tag: m.Tag) -> bool:
        resume = super().resume
        return self._slowly("resume", lambda: resume(tag))

    def reload_weights(self) -> m.WeightsReloaded:
        return self._slowly("reload_weights", super().reload_weights)

    def drop_requests(self) -> int:
        num_dropped = len(self._requests)
        self._requests.clear()
        self._write(f"drop {num_dropped}")
        return num_dropped

    def num_requests(self) -> int:
        return len(self._requests)

    def _begin_step(self, step: m.ExecuteModel) -> None:
        epoch = step.step_id // STEPS_PER_EPOCH
        for request_id in self._requests:
            if not request_id.startswith(f"{epoch}-"):
                self._write(f"leak {request_id} in step {step.step_id}")
        self._write(f"step {step.step_id}")
        self._take_time("step")

    def execute_model(self, step: m.ExecuteModel) -> m.StepOutput:
        output = super().execute_model(step)
        self._requests.difference_update(step.finished)
        self._requests.update(request.request_id for request in step.new_requests)
        if "large" in self._times:
            output = msgspec.structs.replace(output, buffer=self._large(step.step_id))
        return output

    def _large(self, step_id: int) -> memoryview:
        rng = np.random.default_rng(step_id)
        size = int(rng.integers(70 << 10, int(self._times["large"])))
        data = rng.bytes(size - 4)
        return memoryview(data + zlib.crc32(data).to_bytes(4, "little"))


def main(log: str, times: str, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.run(
        parser.parse_args(["serve", *arguments]),
        runtime=lambda config, device: Rank(Path(log), json.loads(times), config, device),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
