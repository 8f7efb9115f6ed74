"""Checked by mypy, never run: a request's type decides the type of its reply, on every client."""

from __future__ import annotations

import asyncio
from typing import assert_type

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.ipc import BlockingClient, PendingReply, RemoteWorker


async def embedded(worker: GPUWorker) -> None:
    assert_type(await worker.ask(m.InitDevice()), m.DeviceReady)
    assert_type(await worker.ask(m.Sleep(level=2)), m.Asleep)
    assert_type(worker.submit(m.WakeUp()), asyncio.Future[m.Awake])


async def remote(worker: RemoteWorker) -> None:
    assert_type(await worker.ask(m.GetStatus()), m.Status)
    assert_type(worker.submit(m.WarmUp()), asyncio.Future[m.WarmedUp])


def blocking(worker: BlockingClient) -> None:
    assert_type(worker.ask(m.GetLimits()), m.Limits)
    assert_type(worker.submit(m.LoadModel()), PendingReply[m.ModelLoaded])
    assert_type(worker.submit(m.LoadModel()).result(), m.ModelLoaded)
