"""How soon get_health is answered: with nothing to do, and while steps run back to back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.report import Report, benchmark_parser, percentile
from gpuworker import messages as m
from gpuworker.ipc import BlockingClient, default_endpoint
from gpuworker.ipc.blocking import PendingReply
from gpuworker.testing import empty_step

_STEP_S = 0.02
_LIMIT_MS = 5.0


@contextmanager
def _steps(endpoint: str) -> Iterator[None]:
    """Keep two steps in flight inside, from a thread."""
    stop = threading.Event()

    def drive() -> None:
        with BlockingClient(endpoint) as worker:
            in_flight: deque[PendingReply[m.StepOutput]] = deque()
            step_id = 0
            while not stop.is_set():
                while len(in_flight) < 2:
                    step_id += 1
                    in_flight.append(worker.submit(empty_step(step_id)))
                in_flight.popleft().result()

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _ask(endpoint: str, num_calls: int, *, running: bool) -> list[float]:
    samples = []
    with BlockingClient(endpoint, observe=True) as observer:
        while running and observer.ask(m.GetHealth()).running_step_id is None:
            pass
        for number in range(num_calls):
            time.sleep(0.001 * (number % 7))  # at any point of a step
            started = time.perf_counter()
            observer.ask(m.GetHealth())
            samples.append((time.perf_counter() - started) * 1e3)
    return samples


def main() -> None:
    """Run the benchmark."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    report = Report("health", arguments.output)
    num_calls = 20 if arguments.quick else 1000
    command = [sys.executable, "-m", "benchmarks.fake_server", default_endpoint(), str(_STEP_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        endpoint = child.stdout.readline().strip()
        try:
            idle = _ask(endpoint, num_calls, running=False)
            with _steps(endpoint):
                busy = _ask(endpoint, num_calls, running=True)
        finally:
            child.terminate()
    for variant, samples in (("idle", idle), ("20 ms steps back to back", busy)):
        for percent in (50, 99):
            value = percentile(samples, percent)
            report.figure(f"get_health p{percent}", value, "ms", variant=variant)
        share = 100 * sum(sample > _LIMIT_MS for sample in samples) / len(samples)
        report.figure("get_health above 5 ms", share, "%", variant=variant)


if __name__ == "__main__":
    main()
