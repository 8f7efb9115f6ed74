"""A step of 256 requests to a worker that answers at once: there and back, by transport."""

from __future__ import annotations

import asyncio
import dataclasses
import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import zmq

from benchmarks.payload import DataStep, make_dataclasses, make_rows, make_step
from benchmarks.report import Report, benchmark_parser, median, percentile
from gpuworker import messages as m
from gpuworker.engine.worker import WorkerLike
from gpuworker.ipc import BlockingClient, connect, default_endpoint
from gpuworker.lifecycle import State
from gpuworker.step import unpack_sampled
from gpuworker.testing import fake_worker, walk_to

_NUM_REQUESTS = 256
_NUM_NEW = (0, 8)


@dataclasses.dataclass
class _Output:
    token_ids: list[int]


@dataclasses.dataclass
class _Load:
    """One kind of step, as we send it and as peers do."""

    step: m.ExecuteModel
    data: DataStep


def _load(num_new: int) -> _Load:
    rows, new = make_rows(_NUM_REQUESTS, num_new)
    return _Load(make_step(rows, new), make_dataclasses(rows, new))


def _answer(request: bytes) -> bytes:
    step: DataStep = pickle.loads(request)
    return pickle.dumps(_Output([row.slot + 100 for row in step.rows]), protocol=5)


def _answer_over_pipe(pipe: Connection) -> None:
    while request := pipe.recv_bytes():
        pipe.send_bytes(_answer(request))


def _answer_over_zmq(endpoint: str) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        while (frames := router.recv_multipart())[1]:
            router.send_multipart([frames[0], _answer(frames[1])])


def _check(reply: bytes) -> None:
    assert len(pickle.loads(reply).token_ids) == _NUM_REQUESTS


Ask = Callable[[_Load], None]


@contextmanager
def _pickled_pipe() -> Iterator[Ask]:
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_answer_over_pipe, args=(theirs,))
    child.start()

    def ask(load: _Load) -> None:
        ours.send_bytes(pickle.dumps(load.data, protocol=5))
        _check(ours.recv_bytes())

    try:
        yield ask
    finally:
        ours.send_bytes(b"")
        child.join()


@contextmanager
def _pickled_zmq() -> Iterator[Ask]:
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"ipc://{directory}/peer"
        context = multiprocessing.get_context("spawn")
        child = context.Process(target=_answer_over_zmq, args=(endpoint,))
        child.start()
        with zmq.Context() as zmq_context, zmq_context.socket(zmq.DEALER) as dealer:
            dealer.connect(endpoint)

            def ask(load: _Load) -> None:
                dealer.send(pickle.dumps(load.data, protocol=5))
                _check(dealer.recv())

            try:
                yield ask
            finally:
                dealer.send(b"")
                child.join()


@contextmanager
def _server(endpoint: str) -> Iterator[str]:
    with _child(endpoint) as (_, bound):
        yield bound


@contextmanager
def _child(endpoint: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "benchmarks.fake_server", endpoint]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            yield child, child.stdout.readline().strip()
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


async def _asking(worker: WorkerLike, step: m.ExecuteModel, num_calls: int) -> list[float]:
    samples = []
    for _ in range(num_calls):
        started = time.perf_counter()
        _take(await worker.ask(step))
        samples.append((time.perf_counter() - started) * 1e6)
    return samples


async def _measure_embedded(load: _Load, num_calls: int) -> list[float]:
    async with fake_worker() as worker:
        await walk_to(worker, State.SERVING)
        return await _asking(worker, load.step, num_calls)


async def _measure_asyncio(
    endpoint: str, load: _Load, num_calls: int, *, ring: bool = False
) -> list[float]:
    async with connect(endpoint, ring=ring) as worker:
        return await _asking(worker, load.step, num_calls)


def _measure_blocking(
    endpoint: str, load: _Load, num_calls: int, *, ring: bool = False
) -> list[float]:
    with BlockingClient(endpoint, ring=ring) as worker:
        return _blocking(lambda: _take(worker.ask(load.step)), num_calls)


def main() -> None:
    """Run the benchmark."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    report = Report("ipc_roundtrip", arguments.output)
    num_rounds, num_calls = (2, 20) if arguments.quick else (9, 300)
    _report_idle(report, 0.2 if arguments.quick else 5.0)
    with (
        _server(default_endpoint()) as ipc,
        _server("tcp://127.0.0.1:*") as tcp,
        _pickled_pipe() as pipe,
        _pickled_zmq() as peer,
    ):
        ways: dict[str, Callable[[_Load], list[float]]] = {
            "ipc, blocking client": lambda load: _measure_blocking(ipc, load, num_calls),
            "ipc, asyncio client": lambda load: asyncio.run(_measure_asyncio(ipc, load, num_calls)),
            "tcp loopback, blocking client": lambda load: _measure_blocking(tcp, load, num_calls),
            "ring, blocking client": lambda load: _measure_blocking(
                ipc, load, num_calls, ring=True
            ),
            "ring, asyncio client": lambda load: asyncio.run(
                _measure_asyncio(ipc, load, num_calls, ring=True)
            ),
            "embedded, no wire": lambda load: asyncio.run(_measure_embedded(load, num_calls)),
            "pipe, pickled dataclasses, no worker": lambda load: _blocking(
                lambda: pipe(load), num_calls
            ),
            "ZeroMQ, pickled dataclasses, no worker": lambda load: _blocking(
                lambda: peer(load), num_calls
            ),
        }
        for num_new in _NUM_NEW:
            load = _load(num_new)
            rounds: dict[str, list[float]] = {name: [] for name in ways}
            samples: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(num_rounds):
                for name, measure in ways.items():
                    these = measure(load)
                    rounds[name].append(median(these))
                    samples[name] += these
            report.compare(
                "round trip",
                rounds,
                "us",
                baseline="ipc, blocking client",
                num_requests=_NUM_REQUESTS,
                num_new=num_new,
            )
            for name, values in samples.items():
                report.figure(
                    "round trip p99",
                    percentile(values, 99),
                    "us",
                    variant=name,
                    num_requests=_NUM_REQUESTS,
                    num_new=num_new,
                )


def _report_idle(report: Report, seconds: float) -> None:
    """Report what a worker's process uses while its ring lies idle."""
    with (
        _child(default_endpoint()) as (child, endpoint),
        BlockingClient(endpoint, ring=True) as one,
    ):
        one.ask(_load(0).step)
        time.sleep(0.1)
        before, started = _cpu_s(child.pid), time.perf_counter()
        time.sleep(seconds)
        used = (_cpu_s(child.pid) - before) / (time.perf_counter() - started)
    report.figure("idle CPU", 100 * used, "%", variant="ring, blocking client")


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
