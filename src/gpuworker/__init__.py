"""The GPU half of an LLM inference engine, as an actor that can be trusted.

Importing this package loads no torch: a scheduler needs only the messages and a client.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuworker import errors, messages
from gpuworker.config import WorkerConfig, load_config

if TYPE_CHECKING:
    from gpuworker.actor import GPUWorker
    from gpuworker.engine import Engine
    from gpuworker.ipc import BlockingClient, connect

__version__ = "0.1.0"

__all__ = [
    "BlockingClient",
    "Engine",
    "GPUWorker",
    "WorkerConfig",
    "connect",
    "errors",
    "load_config",
    "messages",
]

_LAZY = {
    "BlockingClient": "gpuworker.ipc",
    "Engine": "gpuworker.engine",
    "GPUWorker": "gpuworker.actor",
    "connect": "gpuworker.ipc",
}


def __getattr__(name: str) -> object:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(module), name)
