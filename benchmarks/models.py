"""The model that the benchmarks run."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpuworker.cli.demo_model import ensure_demo_model
from gpuworker.config import (
    CacheConfig,
    DeviceConfig,
    DType,
    LimitsConfig,
    ModelConfig,
    WorkerConfig,
)

__all__ = ["add_model_options", "model_directory", "worker_config"]


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add which model, and how many threads everybody gets."""
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--num-threads", type=int, default=2, help="default: %(default)s")


def model_directory(arguments: argparse.Namespace) -> Path:
    """Return the model's directory; fetches the default one once."""
    given: Path | None = arguments.model
    return given if given is not None else ensure_demo_model()


def worker_config(
    directory: Path,
    *,
    dtype: DType,
    num_threads: int,
    max_num_seqs: int,
    max_model_len: int,
    kv_cache_memory_bytes: int = 1 << 30,
) -> WorkerConfig:
    """Return a configuration whose limits are those of the benchmark."""
    return WorkerConfig(
        model=ModelConfig(model=str(directory), dtype=dtype, max_model_len=max_model_len),
        device=DeviceConfig(num_threads=num_threads),
        cache=CacheConfig(kv_cache_memory_bytes=kv_cache_memory_bytes),
        limits=LimitsConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=512),
    )
