"""Layer 5. A step log sent again, message by message, to a worker that is alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Union

import msgspec

from gpuworker import messages as m
from gpuworker.actor import GPUWorker
from gpuworker.config import WorkerConfig
from gpuworker.device.thread import DeviceThread
from gpuworker.errors import ConfigError, WorkerError, error_class
from gpuworker.messages import Failure, Reply, Request
from gpuworker.permit import Permit
from gpuworker.runtime import Runtime, create_runtime
from gpuworker.step import unpack_sampled
from gpuworker.steplog.compare import LOGPROB_TOLERANCE, Mismatch, compare_replies, decode_reply
from gpuworker.steplog.origin import header_of, origin_changes
from gpuworker.steplog.reader import Exchange, LogReader
from gpuworker.steplog.recording import failure_of
from gpuworker.steplog.records import End, Stopped

__all__ = ["Difference", "ReplayReport", "decode_request", "replay", "replay_config"]

SKIPPED: tuple[type[Request[Any]], ...] = (m.GetStatus, m.GetHealth, m.StartTrace, m.StopTrace)
"""They change nothing that is compared; their answers are about time and places."""
NEVER_STARTED = frozenset(
    {"cancelled", "deadline_exceeded", "stale_epoch", "fenced", "no_session", "worker_closed"}
)
"""Codes of messages that were accepted and withdrawn before their turn: a matter of timing."""
_request_decoder: msgspec.msgpack.Decoder[Request[Any]] = msgspec.msgpack.Decoder(
    Union[m.REQUESTS]  # noqa: UP007  # a tuple of types cannot be joined with |
)


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """Where a replay first said something else."""

    index: int
    """Of the request in the log."""
    message: str
    """Tag of the request."""
    step: int | None
    """Number of the step in the log, from 1; None for another message."""
    step_id: int | None
    mismatch: Mismatch


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """What was sent again, and whether the answers are the recorded ones."""

    num_requests: int
    """Sent again; skipped ones are not among them."""
    num_skipped: int
    num_steps: int
    num_compared: int
    """Answers of any kind that were compared."""
    num_compared_steps: int
    num_tokens: int
    """Sampled tokens in the steps that were compared."""
    num_different: int
    num_unanswered: int
    """Requests whose recorded answer is missing, or that were withdrawn by their sender."""
    first: Difference | None
    log_end: str
    """How the log ends: "orderly", "unfinished", or why recording was given up."""
    torn_bytes: int
    num_skipped_bytes: int
    origin_changes: tuple[str, ...]
    """What is different from where it was recorded."""


def replay_config(reader: LogReader, *, model: str | None = None) -> WorkerConfig:
    """Return the recorded configuration, fit for another place and time.

    The KV cache gets the recorded size instead of what a new measurement would leave, because
    the numbers of its blocks are in the log. No traces are written, and the spill directory
    falls back to the temp dir where it does not exist. model replaces the directory.
    """
    config = reader.read_header().config
    if model is not None:
        config = _changed(config, "model", model=model)
    kv_cache_bytes = _recorded_kv_cache_bytes(reader)
    if config.cache.kv_cache_memory_bytes is None and kv_cache_bytes is not None:
        config = _changed(config, "cache", kv_cache_memory_bytes=kv_cache_bytes)
    if config.sleep.spill_dir is not None and not Path(config.sleep.spill_dir).is_dir():
        config = _changed(config, "sleep", spill_dir=None)
    return _changed(config, "supervision", trace_dir=None)


async def replay(
    path: Path,
    *,
    model: str | None = None,
    tolerance: float = LOGPROB_TOLERANCE,
    first_step: int = 1,
    last_step: int | None = None,
    salvage: bool = False,
    runtime: Callable[[WorkerConfig, DeviceThread], Runtime] = create_runtime,
) -> ReplayReport:
    """Send the requests of a log, one after the other, to a new worker and compare its answers.

    model: directory or repo id instead of the recorded one.
    first_step, last_step: steps of the log, from 1. Those before the first are carried out, as
        later ones build on them, and not compared; after the last one the replay ends.

    A message that was withdrawn before its turn is sent and withdrawn again. The replay ends
    early when a move does not lead where it led. Raises ConfigError for a log that is not
    usable, or in which there is nothing to compare.
    """
    if first_step < 1 or (last_step is not None and last_step < first_step):
        raise ConfigError(f"steps {first_step} to {last_step} are none; steps count from 1")
    reader = LogReader(path, salvage=salvage)
    config = replay_config(reader, model=model)
    changes = origin_changes(reader.read_header(), header_of(config))
    comparison = _Comparison(tolerance, first_step, last_step)
    async with GPUWorker(config, runtime) as worker:
        for exchange in reader.exchanges():
            if not await comparison.send(worker, exchange):
                break
    report = comparison.report(reader, changes)
    if report.num_compared == 0:
        raise ConfigError(f"{path} holds no answer to compare")
    if first_step > max(report.num_steps, 1):
        raise ConfigError(f"{path} holds {report.num_steps} steps; there is no step {first_step}")
    return report


class _Comparison:
    """Sends recorded requests and keeps the score."""

    def __init__(self, tolerance: float, first_step: int, last_step: int | None) -> None:
        self._tolerance = tolerance
        self._first_step = first_step
        self._last_step = last_step
        self._num_requests = self._num_skipped = self._num_steps = 0
        self._num_compared = self._num_compared_steps = self._num_tokens = 0
        self._num_different = self._num_unanswered = 0
        self._first: Difference | None = None

    async def send(self, worker: GPUWorker, exchange: Exchange) -> bool:
        """Send one request and compare; says whether the next one makes sense."""
        request = _decoded_request(exchange)
        if isinstance(request, SKIPPED):
            self._num_skipped += 1
            return True
        is_step = isinstance(request, m.ExecuteModel)
        if is_step and self._num_steps == self._last_step:
            return False
        self._num_steps += is_step
        self._num_requests += 1
        expected = _decoded_reply(exchange)
        was_withdrawn = exchange.reply is not None and expected is None
        if was_withdrawn and not is_step:  # undone, so it never was
            self._num_unanswered += 1
            return True
        got = await _ask(worker, request, _permit(expected))
        if expected is None:
            self._num_unanswered += 1
            return True
        if is_step and self._num_steps < self._first_step:
            return True
        return self._compare(exchange.request.index, request, expected, got)

    def _compare(self, index: int, request: Request[Any], expected: Reply, got: Reply) -> bool:
        is_step = isinstance(request, m.ExecuteModel)
        self._num_compared += 1
        self._num_compared_steps += is_step
        if isinstance(expected, m.StepOutput):
            tokens = unpack_sampled(expected.buffer, expected.num_rows).token_ids
            self._num_tokens += tokens.size
        mismatch = compare_replies(expected, got, tolerance=self._tolerance)
        if mismatch is None:
            return True
        self._num_different += 1
        if self._first is None:
            self._first = Difference(
                index=index,
                message=m.message_tag(type(request).__name__),
                step=self._num_steps if is_step else None,
                step_id=request.step_id if isinstance(request, m.ExecuteModel) else None,
                mismatch=mismatch,
            )
        return is_step or isinstance(expected, Failure) is isinstance(got, Failure)

    def report(self, reader: LogReader, changes: tuple[str, ...]) -> ReplayReport:
        match reader.end:
            case End():
                log_end = "orderly"
            case Stopped(reason=reason):
                log_end = reason
            case None:
                log_end = "unfinished"
        return ReplayReport(
            num_requests=self._num_requests,
            num_skipped=self._num_skipped,
            num_steps=self._num_steps,
            num_compared=self._num_compared,
            num_compared_steps=self._num_compared_steps,
            num_tokens=self._num_tokens,
            num_different=self._num_different,
            num_unanswered=self._num_unanswered,
            first=self._first,
            log_end=log_end,
            torn_bytes=reader.torn_bytes,
            num_skipped_bytes=reader.num_skipped_bytes,
            origin_changes=changes,
        )


async def _ask(worker: GPUWorker, request: Request[Any], permit: Permit) -> Reply:
    try:
        done = worker.submit(request, permit=permit)
    except WorkerError as error:
        return failure_of(error)
    await asyncio.wait([done])
    failed = done.exception()
    reply: Reply = done.result() if failed is None else failure_of(failed)
    return reply


def _permit(expected: Reply | None) -> Permit:
    permit = Permit()
    if isinstance(expected, Failure) and expected.code in NEVER_STARTED:
        permit.revoke(error_class(expected.code)(expected.message))
    return permit


def decode_request(body: bytes) -> Request[Any]:
    """Decode any request; raises msgspec.DecodeError."""
    return _request_decoder.decode(body)


def _decoded_request(exchange: Exchange) -> Request[Any]:
    try:
        return decode_request(exchange.request.body)
    except msgspec.DecodeError as error:
        raise _not_understood("request", exchange.request.index, error) from error


def _decoded_reply(exchange: Exchange) -> Reply | None:
    if exchange.reply is None or not exchange.reply.body:
        return None
    try:
        return decode_reply(exchange.reply.body)
    except msgspec.DecodeError as error:
        raise _not_understood("the answer to request", exchange.request.index, error) from error


def _not_understood(what: str, index: int, error: Exception) -> ConfigError:
    return ConfigError(
        f"{what} {index} of the log is not understood: {error}; another version recorded it"
    )


def _recorded_kv_cache_bytes(reader: LogReader) -> int | None:
    for exchange in reader.exchanges():
        request = _decoded_request(exchange)
        if isinstance(request, m.AllocateKVCache):
            reply = _decoded_reply(exchange)
            if isinstance(reply, m.KVCacheAllocated):
                return reply.kv_cache_bytes
        if isinstance(request, m.ExecuteModel):
            break
    return None


def _changed(config: WorkerConfig, section: str, **fields: object) -> WorkerConfig:
    changed = msgspec.structs.replace(getattr(config, section), **fields)
    return msgspec.structs.replace(config, **{section: changed})
