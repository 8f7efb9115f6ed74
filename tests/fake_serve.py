"""A worker process as `gpuworker serve` makes it, around a fake rank that behaves as told.

Usage: python fake_serve.py BEHAVIOUR [arguments of gpuworker serve]
"""

from __future__ import annotations

import argparse
import sys
import threading
from pathlib import Path
from typing import NoReturn

from gpuworker import messages as m
from gpuworker.cli import serve
from gpuworker.config import WorkerConfig
from gpuworker.device.thread import DeviceThread
from gpuworker.errors import DeviceFault, StepFailed
from gpuworker.testing import FakeRuntime


def fake_serve(behaviour: str) -> tuple[str, ...]:
    """Return the command of a worker process that behaves so."""
    return (sys.executable, __file__, behaviour)


def _hang(what: str) -> NoReturn:
    print(f"hangs: {what}", file=sys.stderr, flush=True)
    while True:
        threading.Event().wait()


class Rank(FakeRuntime):
    """FakeRuntime with one weakness."""

    def __init__(self, behaviour: str, config: WorkerConfig, device: DeviceThread) -> None:
        super().__init__(config, device)
        self.behaviour = behaviour
        self.before_step = self._before_step
        if behaviour == "import":
            _hang("import")

    def open_device(self) -> m.DeviceReady:
        if self.behaviour == "noise":
            for stream in (sys.stdout, sys.stderr):
                print("x" * 1_000_000, file=stream, flush=True)
        return super().open_device()

    def load_model(self) -> m.ModelLoaded:
        if self.behaviour == "load":
            _hang("load")
        return super().load_model()

    def weights_truth(self) -> m.WeightsTruth:
        # The event loop's thread asks this for GetHealth.
        if self.behaviour == "loop" and "serving" in self.books:
            _hang("loop")
        return super().weights_truth()

    def _before_step(self, step: m.ExecuteModel) -> None:
        if self.behaviour == "step":
            _hang("step")
        if self.behaviour == "long step":
            threading.Event().wait(5.0)
        if self.behaviour == "failing step":
            raise StepFailed("the forward pass raised ValueError: a reason")
        if self.behaviour == "faulting step":
            raise DeviceFault("an illegal memory access")
        if self.behaviour.startswith("step until "):
            release = Path(self.behaviour.removeprefix("step until "))
            while not release.exists():
                threading.Event().wait(0.01)


def main(behaviour: str, *arguments: str) -> int:
    parser = argparse.ArgumentParser()
    serve.add_parser(parser.add_subparsers())
    return serve.run(
        parser.parse_args(["serve", *arguments]),
        runtime=lambda config, device: Rank(behaviour, config, device),
    )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
