"""Layer 0. A client's half of the protocol, without sockets: numbers, headers, who waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from gpuworker.errors import ClientError, ConnectionLost, MalformedMessage, WorkerError
from gpuworker.ipc.wire import (
    MAX_BUDGET_US,
    VERSION,
    Kind,
    RequestHeader,
    decode_failure,
    decode_reply,
    decode_reply_header,
    encode_request,
    error_of,
)
from gpuworker.messages import (
    SESSION_REQUESTS,
    ExecuteModel,
    Failure,
    GetHealth,
    GetStatus,
    Hello,
    Reply,
    Request,
    Welcome,
)

__all__ = ["BESIDE_RING", "Conversation", "hello"]

BESIDE_RING: frozenset[type[Request[Any]]] = SESSION_REQUESTS | {GetHealth, GetStatus}
"""What goes over the socket although a ring is open: it waits behind nothing."""

W = TypeVar("W")


class _Sent(NamedTuple, Generic[W]):
    message: type[Request[Any]]
    seq: int
    waiter: W


class Conversation(Generic[W]):
    """Pairs requests and replies; W is whatever a client keeps for someone who waits.

    Replies are matched by corr. Steps are numbered; the number of a step that the worker did
    not accept is used again.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._corr = itertools.count(1)
        self._sent: dict[int, _Sent[W]] = {}
        self._next_seq = 1
        self._epoch = 0
        self._boot_id = ""

    def begin(self, hello: Hello, welcome: Welcome) -> None:
        """Speak in a session from now on; raises ConnectionLost for an answer that is none."""
        if welcome.epoch != hello.epoch or welcome.version != VERSION:
            raise ConnectionLost(
                f"the worker at {self._endpoint} was asked for epoch {hello.epoch} in version "
                f"{VERSION} and answers with epoch {welcome.epoch} in version {welcome.version}"
            )
        self._epoch = welcome.epoch
        self._boot_id = welcome.boot_id
        self._next_seq = 1

    def request(
        self, request: Request[Any], waiter: W, budget_s: float | None = None
    ) -> tuple[int, list[bytes]]:
        """Return a request's corr and frames; raises MalformedMessage when it cannot be said."""
        seq = self._next_seq if isinstance(request, ExecuteModel) else 0
        budget_us = 0 if budget_s is None else min(max(int(budget_s * 1e6), 1), MAX_BUDGET_US)
        corr = next(self._corr)
        frames = encode_request(
            RequestHeader(Kind.REQUEST, corr, self._epoch, seq, budget_us), request
        )
        self._sent[corr] = _Sent(type(request), seq, waiter)
        if seq:
            self._next_seq += 1
        return corr, frames

    def unsent(self, corr: int) -> None:
        """Take a request back whose frames did not go out."""
        sent = self._sent.pop(corr, None)
        if sent is not None:
            self._free(sent)

    def reply(self, frames: Sequence[bytes]) -> tuple[W, Reply | WorkerError | ClientError] | None:
        """Return who waits for a reply and what to tell; None when nobody does.

        Raises MalformedMessage for bytes that are no reply, or another worker's, and
        RepliesLost when the worker says so: nobody can tell then what became of the rest.
        """
        header = decode_reply_header(frames)
        if not header.corr:
            raise error_of(decode_failure(frames[1]))
        if self._boot_id and header.boot_id != self._boot_id:
            raise MalformedMessage(
                f"the worker was {self._boot_id} and answers as {header.boot_id} now"
            )
        sent = self._sent.pop(header.corr, None)
        if sent is None:
            return None
        if not header.seq:
            self._free(sent)
        try:
            answer = decode_reply(sent.message, frames[1])
        except MalformedMessage as error:
            return sent.waiter, ConnectionLost(
                f"the reply to {sent.message.__name__} cannot be read: {error}; its outcome is "
                "unknown"
            )
        return sent.waiter, error_of(answer) if isinstance(answer, Failure) else answer

    def lose(self, reason: str) -> Iterator[tuple[W, ConnectionLost]]:
        """Give up what was not answered: its outcome is unknown."""
        while self._sent:
            _, sent = self._sent.popitem()
            yield (
                sent.waiter,
                ConnectionLost(f"{reason}; the outcome of {sent.message.__name__} is unknown"),
            )

    def _free(self, sent: _Sent[W]) -> None:
        if sent.seq:
            self._next_seq = min(self._next_seq, sent.seq)


def hello(epoch: int, client: str, lease_s: float | None) -> Hello:
    """Build the hello of a client of this package."""
    return Hello(
        min_version=VERSION,
        max_version=VERSION,
        epoch=epoch,
        client=client,
        lease_ms=0 if lease_s is None else max(round(lease_s * 1000), 1),
    )
