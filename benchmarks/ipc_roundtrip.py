"""A step of 256 requests to a worker that answers at once: there and back, by transport."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

from benchmarks.report import Report, benchmark_parser, median, percentile
from gpuworker import messages as m
from gpuworker.ipc import BlockingClient, connect, default_endpoint
from gpuworker.lifecycle import State
from gpuworker.step import StepRow, pack_step, unpack_sampled
from gpuworker.testing import fake_worker, walk_to

_NUM_REQUESTS = 256


def _step() -> m.ExecuteModel:
    rows = [StepRow(slot, 1, 100 + slot) for slot in range(_NUM_REQUESTS)]
    return m.ExecuteModel(step_id=1, kv_epoch=0, num_rows=len(rows), buffer=pack_step(rows))


@dataclasses.dataclass
class _Row:
    slot: int
    num_scheduled: int
    num_computed: int


@dataclasses.dataclass
class _Output:
    token_ids: list[int]


def _answer_pickles(pipe: Connection) -> None:
    while rows := pickle.loads(pipe.recv_bytes()):
        pipe.send_bytes(pickle.dumps(_Output([row.slot + 100 for row in rows]), protocol=5))


@contextmanager
def _pickled_pipe() -> Iterator[Callable[[], None]]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_answer_pickles, args=(theirs,))
    child.start()
    rows = [_Row(slot, 1, 100 + slot) for slot in range(_NUM_REQUESTS)]

    def ask() -> None:
        ours.send_bytes(pickle.dumps(rows, protocol=5))
        output = pickle.loads(ours.recv_bytes())
        assert len(output.token_ids) == _NUM_REQUESTS

    try:
        ask()
        yield ask
    finally:
        ours.send_bytes(pickle.dumps([]))
        child.join()


@contextmanager
def _server(endpoint: str) -> Iterator[str]:
    command = [sys.executable, "-m", "benchmarks.fake_server", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child.stdout.readline().strip()
        finally:
            child.terminate()


def _take(output: m.StepOutput) -> None:
    assert unpack_sampled(output.buffer, output.num_rows).token_ids.size == _NUM_REQUESTS


def _blocking(call: Callable[[], None], num_calls: int) -> list[float]:
    samples = []
    for _ in range(num_calls):
        started = time.perf_counter()
        call()
        samples.append((time.perf_counter() - started) * 1e6)
    return samples


async def _measure_embedded(num_calls: int) -> list[float]:
    step = _step()
    samples = []
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        for _ in range(num_calls):
            started = time.perf_counter()
            _take(await worker.ask(step))
            samples.append((time.perf_counter() - started) * 1e6)
    return samples


async def _measure_asyncio(endpoint: str, num_calls: int) -> list[float]:
    step = _step()
    samples = []
    async with connect(endpoint) as worker:
        for _ in range(num_calls):
            started = time.perf_counter()
            _take(await worker.ask(step))
            samples.append((time.perf_counter() - started) * 1e6)
    return samples


def _measure_blocking(endpoint: str, num_calls: int) -> list[float]:
    step = _step()
    with BlockingClient(endpoint) as worker:
        return _blocking(lambda: _take(worker.ask(step)), num_calls)


def main() -> None:
    """Run the benchmark."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    report = Report("ipc_roundtrip", arguments.output)
    num_rounds, num_calls = (2, 20) if arguments.quick else (9, 300)
    with (
        _server(default_endpoint()) as ipc,
        _server("tcp://127.0.0.1:*") as tcp,
        _pickled_pipe() as pipe,
    ):
        ways: dict[str, Callable[[], list[float]]] = {
            "ipc, blocking client": lambda: _measure_blocking(ipc, num_calls),
            "ipc, asyncio client": lambda: asyncio.run(_measure_asyncio(ipc, num_calls)),
            "tcp loopback, blocking client": lambda: _measure_blocking(tcp, num_calls),
            "tcp loopback, asyncio client": lambda: asyncio.run(_measure_asyncio(tcp, num_calls)),
            "embedded, no wire": lambda: asyncio.run(_measure_embedded(num_calls)),
            "pipe, pickled dataclasses, no worker": lambda: _blocking(pipe, num_calls),
        }
        rounds: dict[str, list[float]] = {name: [] for name in ways}
        samples: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(num_rounds):
            for name, measure in ways.items():
                these = measure()
                rounds[name].append(median(these))
                samples[name] += these
    report.compare(
        "round trip", rounds, "us", baseline="ipc, blocking client", num_requests=_NUM_REQUESTS
    )
    for name, values in samples.items():
        report.figure(
            "round trip p99", percentile(values, 99), "us", variant=name, num_requests=_NUM_REQUESTS
        )


if __name__ == "__main__":
    main()
