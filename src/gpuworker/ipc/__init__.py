"""Layer 0. The wire: frames, endpoints, a server for any worker, two clients. No torch."""

from __future__ import annotations

from gpuworker.ipc.blocking import BlockingClient, PendingReply
from gpuworker.ipc.client import RemoteWorker, connect
from gpuworker.ipc.endpoint import default_endpoint
from gpuworker.ipc.server import Server, ServerStatistics, serve

__all__ = [
    "BlockingClient",
    "PendingReply",
    "RemoteWorker",
    "Server",
    "ServerStatistics",
    "connect",
    "default_endpoint",
    "serve",
]
