"""Layer 5. Where a log comes from: versions, machine, configuration, and which model it was."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from gpuworker import __version__
from gpuworker.config import WorkerConfig
from gpuworker.steplog.records import Header, ModelFingerprint

__all__ = ["fingerprint", "header_of", "origin_changes"]

_COMPARED = ("gpuworker", "torch", "numpy", "machine", "num_cpus")


def header_of(config: WorkerConfig, *, boot_id: str = "") -> Header:
    """Describe this process and a worker's configuration."""
    return Header(
        gpuworker=__version__,
        python=platform.python_version(),
        torch=_version("torch"),
        numpy=_version("numpy"),
        machine=_machine(),
        num_cpus=len(os.sched_getaffinity(0)),
        boot_id=boot_id,
        started_unix_s=time.time(),
        config=config,
        model=fingerprint(config.model.model),
    )


def fingerprint(model: str) -> ModelFingerprint | None:
    """Describe a model directory cheaply; None when the name is no directory here."""
    directory = Path(model).expanduser()
    if not directory.is_dir():
        return None
    try:
        config = (directory / "config.json").read_bytes()
    except OSError:
        config = b""
    return ModelFingerprint(
        config_sha256=hashlib.sha256(config).hexdigest() if config else "",
        weight_files=tuple(
            sorted((path.name, path.stat().st_size) for path in directory.glob("*.safetensors"))
        ),
    )


def origin_changes(recorded: Header, here: Header) -> tuple[str, ...]:
    """Say what is different here, each in one line: results may differ for these reasons."""
    changes = [
        f"{name}: recorded with {getattr(recorded, name)}, replayed with {getattr(here, name)}"
        for name in _COMPARED
        if getattr(recorded, name) != getattr(here, name)
    ]
    if recorded.model is not None and here.model is not None and recorded.model != here.model:
        changes.append("model: config.json or the sizes of the weight files are not the same")
    return tuple(changes)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _machine() -> str:
    name = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = cpuinfo.read_text().splitlines()
        name = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    return f"{platform.machine()} {name.strip()}".strip()
