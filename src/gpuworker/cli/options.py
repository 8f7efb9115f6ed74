"""Layer 5. Options that several verbs share: the worker's configuration, sizes, help texts."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import msgspec

from gpuworker.config import (
    AttentionBackend,
    DType,
    LoadFormat,
    ModelConfig,
    WorkerConfig,
    load_config,
)
from gpuworker.errors import ConfigError

__all__ = ["Subparsers", "add_verb", "add_worker_options", "size_bytes", "worker_config"]

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]
else:
    Subparsers = argparse._SubParsersAction  # generic for the type checker only
_ConfigT = TypeVar("_ConfigT", bound=msgspec.Struct)

_STDIN = Path("-")
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", re.IGNORECASE)

# option -> (section of WorkerConfig, field)
_FIELDS = {
    "model": ("model", "model"),
    "revision": ("model", "revision"),
    "dtype": ("model", "dtype"),
    "load_format": ("model", "load_format"),
    "max_model_len": ("model", "max_model_len"),
    "num_threads": ("device", "num_threads"),
    "gpu_memory_utilization": ("device", "memory_utilization"),
    "seed": ("device", "seed"),
    "attention_backend": ("device", "attention_backend"),
    "block_size": ("cache", "block_size"),
    "kv_cache_memory_bytes": ("cache", "kv_cache_memory_bytes"),
    "max_num_seqs": ("limits", "max_num_seqs"),
    "max_num_batched_tokens": ("limits", "max_num_batched_tokens"),
    "spill_dir": ("sleep", "spill_dir"),
    "trace_dir": ("supervision", "trace_dir"),
    "step_limit_s": ("supervision", "step_limit_s"),
}


def add_verb(
    subparsers: Subparsers, name: str, *, help: str, description: str, examples: str = ""
) -> argparse.ArgumentParser:
    """Add a verb whose -h shows a description and examples as they are written."""
    return subparsers.add_parser(
        name,
        help=help,
        description=description,
        epilog=f"examples:\n{examples}" if examples else None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def size_bytes(text: str) -> int:
    """Read a size such as 512M, 2GiB or 1000; raises ArgumentTypeError."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 1000, 512M or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def add_worker_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make up a WorkerConfig; what is not given keeps its default."""
    group = parser.add_argument_group("worker (flags go before a configuration file)")
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML or JSON; - reads JSON from stdin"
    )
    group.add_argument("--revision", help="revision of a repo id")
    group.add_argument("--dtype", choices=get_args(DType), help="default: auto, the checkpoint's")
    group.add_argument(
        "--load-format",
        choices=get_args(LoadFormat),
        help="default: auto; dummy needs only config.json",
    )
    group.add_argument(
        "--max-model-len", type=int, metavar="N", help="longest sequence; default: the model's"
    )
    group.add_argument("--max-num-seqs", type=int, metavar="N", help="default: 128")
    group.add_argument(
        "--max-num-batched-tokens", type=int, metavar="N", help="tokens of a step; default: 2048"
    )
    group.add_argument("--block-size", type=int, metavar="N", help="tokens per block; default: 16")
    group.add_argument(
        "--kv-cache-memory-bytes",
        type=size_bytes,
        metavar="SIZE",
        help="for example 512MiB; default: what the profile leaves",
    )
    group.add_argument(
        "--gpu-memory-utilization",
        "--memory-utilization",
        type=float,
        metavar="SHARE",
        help="share of the device's memory in (0, 1]; default: 0.5 on a CPU",
    )
    group.add_argument("--num-threads", type=int, metavar="N", help="compute threads on a CPU")
    group.add_argument("--seed", type=int, metavar="N", help="of requests without one; default: 0")
    group.add_argument(
        "--attention-backend", choices=get_args(AttentionBackend), help="default: auto"
    )
    group.add_argument("--spill-dir", metavar="DIR", help="keeps CPU weights during sleep level 1")
    group.add_argument("--trace-dir", metavar="DIR", help="allows start_trace and stop_trace")
    group.add_argument(
        "--step-limit-s", type=float, metavar="S", help="older steps are stalled; default: 300"
    )


def worker_config(arguments: argparse.Namespace) -> WorkerConfig:
    """Build the configuration of the file, changed by the flags; raises ConfigError."""
    given: dict[str, dict[str, Any]] = {}
    for option, (section, field) in _FIELDS.items():
        value = vars(arguments).get(option)
        if value is not None:
            given.setdefault(section, {})[field] = value
    if arguments.config == _STDIN:
        config = _config_from_stdin()
    elif arguments.config is not None:
        config = load_config(arguments.config)
    elif "model" in given.get("model", {}):
        config = WorkerConfig(model=ModelConfig(model=given["model"]["model"]))
    else:
        raise ConfigError("no model is named; give --model DIR_OR_REPO or --config FILE")
    sections = {
        section: _changed(getattr(config, section), fields) for section, fields in given.items()
    }
    return _changed(config, sections)


def _config_from_stdin() -> WorkerConfig:
    try:
        return msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerConfig)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"the configuration on stdin: {error}") from error


def _changed(struct: _ConfigT, fields: dict[str, Any]) -> _ConfigT:
    return msgspec.structs.replace(struct, **fields)
