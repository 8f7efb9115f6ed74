"""Layer 0. How work ended, as what travels: every ending is an answer."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from gpuworker.errors import MalformedMessage, WorkerClosed, WorkerError
from gpuworker.ipc.wire import encode_body, failure_of
from gpuworker.messages import Failure, Reply

__all__ = ["body_of", "reply_of", "unexpected"]

_log = logging.getLogger(__name__)


def body_of(reply: Reply) -> bytes:
    """Encode a reply, or a failure that says why it cannot be encoded."""
    try:
        return encode_body(reply)
    except MalformedMessage as error:
        return encode_body(failure_of(error))


def reply_of(done: asyncio.Future[Any]) -> Reply:
    """Return what a future that is done has to answer."""
    if done.cancelled():
        return failure_of(WorkerClosed("the request was withdrawn"))
    error = done.exception()
    if error is None:
        reply: Reply = done.result()
        return reply
    if isinstance(error, WorkerError):
        return failure_of(error)
    _log.error("a request failed unexpectedly", exc_info=error)
    return unexpected(error)


def unexpected(error: BaseException) -> Failure:
    """Return the answer to a request that met a fault of ours."""
    return failure_of(WorkerError(f"{type(error).__name__}: {error}"))
