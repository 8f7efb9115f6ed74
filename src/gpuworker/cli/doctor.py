"""Layer 5. `gpuworker doctor`: what this machine has, checked without a model."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec
from rich.table import Table

from gpuworker.cli.options import Subparsers, add_verb
from gpuworker.cli.output import format_bytes, print_json, stdout, working
from gpuworker.device.proc_memory import ProcMemoryReader
from gpuworker.ipc.endpoint import MAX_IPC_PATH_BYTES, default_endpoint, ipc_path

__all__ = ["add_parser"]

_GIB = 1 << 30
_MIN_PYTHON = (3, 11)
_PACKAGES: dict[str, Literal["needed", "worker", "text", "hub", "demo"]] = {
    "anyio": "needed",
    "msgspec": "needed",
    "numpy": "needed",
    "pyzmq": "needed",
    "transitions": "needed",
    "torch": "worker",
    "safetensors": "worker",
    "tokenizers": "text",
    "jinja2": "text",
    "huggingface-hub": "hub",
    "gguf": "demo",
}


class Finding(msgspec.Struct, frozen=True):
    """One fact and whether it is good enough."""

    what: str
    value: str
    verdict: Literal["ok", "warn", "fail"] = "ok"
    advice: str = ""


def add_parser(subparsers: Subparsers) -> None:
    """Add the verb."""
    parser = add_verb(
        subparsers,
        "doctor",
        help="what this machine has",
        description="Look at Python, packages, memory, disk, sockets and devices; no model needed.",
        examples="  gpuworker doctor\n  gpuworker doctor --json",
    )
    parser.add_argument("--json", action="store_true", help="a list of findings")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    with working("looking around", quiet=arguments.json):
        findings = [*_python(), *_packages(), *_machine(), *_disk(), *_sockets(), *_torch()]
    if arguments.json:
        print_json(msgspec.to_builtins(findings))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red"}
        table = Table("", "what", "found", "advice", box=None)
        for finding in findings:
            verdict = f"[{colours[finding.verdict]}]{finding.verdict}[/]"
            table.add_row(verdict, finding.what, finding.value, finding.advice)
        stdout.print(table)
    return 1 if any(finding.verdict == "fail" for finding in findings) else 0


def _python() -> Iterator[Finding]:
    good = sys.version_info >= _MIN_PYTHON
    yield Finding(
        "python",
        f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        "ok" if good else "fail",
        "" if good else "3.11 or newer is needed",
    )
    if platform.system() != "Linux":
        yield Finding("system", platform.system(), "warn", "a worker computes on Linux only")


def _packages() -> Iterator[Finding]:
    for name, extra in _PACKAGES.items():
        try:
            yield Finding(name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            if extra == "needed":
                yield Finding(name, "missing", "fail", f"pip install {name}")
            else:
                yield Finding(name, "missing", "warn", f"pip install 'gpuworker[{extra}]'")


def _machine() -> Iterator[Finding]:
    num_cores = len(os.sched_getaffinity(0))
    yield Finding("cores", f"{num_cores} of {os.cpu_count()}")
    reader = ProcMemoryReader()
    available = reader.available_bytes()
    yield Finding("memory", format_bytes(reader.total_bytes()))
    yield Finding(
        "memory available",
        format_bytes(available),
        "ok" if available >= 2 * _GIB else "warn",
        "" if available >= 2 * _GIB else "the demo's model takes about 1.2 GiB",
    )


def _disk() -> Iterator[Finding]:
    cache = os.environ.get("GPUWORKER_CACHE", str(Path.home() / ".cache"))
    for what, directory in (("temp dir", tempfile.gettempdir()), ("cache dir", cache)):
        existing = Path(directory)
        while not existing.is_dir():
            existing = existing.parent
        free = shutil.disk_usage(existing).free
        yield Finding(
            what,
            f"{directory}, {format_bytes(free)} free",
            "ok" if free >= _GIB else "warn",
            "" if free >= _GIB else "sleep level 1 keeps the weights in a file",
        )


def _sockets() -> Iterator[Finding]:
    endpoint = default_endpoint()
    path = ipc_path(endpoint)
    length = len(os.fsencode(path)) if path is not None else 0
    yield Finding("ipc", f"{endpoint} ({length} of {MAX_IPC_PATH_BYTES} bytes)")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except ImportError as error:
        yield Finding(
            "compute", f"torch cannot be imported: {error}", "fail", "install torch>=2.11"
        )
        return
    yield Finding("compute threads", str(torch.get_num_threads()))
    yield Finding("vector units", torch.backends.cpu.get_cpu_capability())
    num_devices = torch.cuda.device_count()
    for index in range(num_devices):
        yield Finding(f"cuda:{index}", torch.cuda.get_device_name(index))
    if not num_devices:
        yield Finding("cuda", "no device; this release computes on the CPU")
