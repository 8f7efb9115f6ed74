"""A client that damages what it says to a worker, and keeps accounts of the answers.

One message with a readable header has one answer; one in another version has one with corr 0;
everything else has none.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import msgspec
import zmq

from gpuworker import messages as m
from gpuworker.ipc.wire import MAX_BUDGET_US, MAX_HEADER_BYTES
from mutation import REQUEST_BODIES, Mutator, header_of

__all__ = ["INTERNAL", "MAX_EPOCH", "Fuzzer", "expected_corr"]

MAX_EPOCH = 2**40
"""A hello beyond it would leave no epochs for those that follow."""
INTERNAL = {"worker_error", "worker_faulted", "device_fault", "peer_lost", "worker_closed"}
"""Codes that no sender may provoke."""
_MAX_NUMBER = 2**53 - 1
_LIMITS = (255, _MAX_NUMBER, _MAX_NUMBER, _MAX_NUMBER, MAX_BUDGET_US)
_DEADLINE_S = 30.0
_WEIGHTS = {b"hello": 0.05, b"end_session": 0.1, b"sleep": 0.2, b"execute_model": 6.0}


def expected_corr(frames: Sequence[bytes]) -> int | None:
    """Tell from the protocol alone with which corr a message is answered; None, not at all."""
    header = frames[0]
    if len(header) > MAX_HEADER_BYTES or len(header) < 4 or header[:2] != b"GW":
        return None
    if header[2] != 1:
        return 0
    try:
        fields = msgspec.msgpack.decode(header[3:])
    except (ValueError, TypeError, RecursionError):
        return None
    if not isinstance(fields, list) or not 2 <= len(fields) <= len(_LIMITS):
        return None
    for field, limit in zip(fields, _LIMITS, strict=False):
        if type(field) is not int or not 0 <= field <= limit:
            return None
    return int(fields[1]) or None if fields[0] == 1 else None


def _weight(body: bytes) -> float:
    tag = msgspec.msgpack.decode(body)[0]
    return _WEIGHTS.get(tag.encode(), 1.0)


class Fuzzer:
    """Holds a session on one connection and nothing on another, and speaks on both."""

    def __init__(self, endpoint: str, seed: int) -> None:
        self.codes: Counter[str] = Counter()
        self.num_messages = 0
        self.num_frames = 0
        self.suspects: list[str] = []
        """Answers that no sender may get."""
        self._rng = random.Random(seed)
        self._mutator = Mutator(self._rng, REQUEST_BODIES)
        self._weights = [_weight(body) for body in REQUEST_BODIES]
        self._context = zmq.Context()
        self._owner, self._stranger = self._connect(endpoint), self._connect(endpoint)
        self._corr = 0
        self._epoch = 0
        self._highest_epoch = 0
        self._kv_epoch = 0
        self._next_seq = 1
        self._is_well = False
        """Whether a step would be computed, as far as the last answers say."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._context.destroy(linger=0)

    def batch(self, size: int) -> None:
        """Send damaged messages on both connections and settle the accounts.

        Raises AssertionError that names what was sent when an answer is missing, or too many.
        """
        if not self._is_well:
            self._recover()
        owner: list[list[bytes]] = []
        stranger: list[list[bytes]] = []
        for body in self._rng.choices(REQUEST_BODIES, self._weights, k=size):
            (owner if self._rng.random() < 0.85 else stranger).append(self._message(body))
        self._exchange(self._owner, owner)
        self._exchange(self._stranger, stranger)
        self.num_messages += size

    def say(self, bodies: Sequence[bytes], seqs: Sequence[int]) -> None:
        """Send bodies under good headers in the session, and settle the accounts."""
        if not self._is_well:
            self._recover()
        messages: list[list[bytes]] = []
        for body, seq in zip(bodies, seqs, strict=True):
            self._corr += 1
            messages.append([header_of(1, self._corr, self._epoch, seq), body])
            self._highest_epoch = max(self._highest_epoch, _epoch_of(messages[-1]))
        self._exchange(self._owner, messages)
        self.num_messages += len(messages)

    def _recover(self) -> None:
        """Say what is valid: take the worker over and wake it up, if it should sleep."""
        health = self._valid(m.GetHealth())
        self._exchange(self._owner, [health])
        self._epoch, self._next_seq = self._highest_epoch + 1, 1
        self._highest_epoch = self._epoch
        self._exchange(
            self._owner, [self._valid(m.Hello(min_version=1, max_version=1, epoch=self._epoch))]
        )
        # While it serves only the second has an effect; what is refused changes nothing.
        moves = (m.ResumePools(tags=("weights",)), m.ReloadWeights(), m.WakeUp())
        self._exchange(self._owner, [self._valid(move) for move in moves])

    def _valid(self, request: m.Request[m.Reply]) -> list[bytes]:
        self._corr += 1
        return [header_of(1, self._corr, self._epoch), msgspec.msgpack.encode(request)]

    def _message(self, body: bytes) -> list[bytes]:
        rng = self._rng
        self._corr += 1
        epoch, seq, budget_us = self._epoch, 0, rng.choice((0, 0, 0, 0, 0, 0, 1, 10**6))
        fields = msgspec.msgpack.decode(body)
        match fields[0]:
            case "hello":
                fields[3] = self._highest_epoch + rng.choice((-1, 0, 1))
            case "execute_model":
                seq = max(self._next_seq + rng.choice((0, 0, 0, 0, 0, 1, -1, -2, -70)), 0)
                fields[1], fields[2] = seq, self._kv_epoch
            case "cancel":
                fields[1] = max(self._corr - rng.randrange(20), 0)
        if rng.random() < 0.1:
            epoch = rng.choice((0, max(epoch - 1, 0), epoch + 1))
        frames = [header_of(1, self._corr, epoch, seq, budget_us), msgspec.msgpack.encode(fields)]
        if rng.random() > 0.1:  # some without damage, so that something happens
            frames = self._mutator.mutate(frames)
        taken = _epoch_of(frames)
        if taken > MAX_EPOCH:
            return [b""]
        self._highest_epoch = max(self._highest_epoch, taken)
        return frames

    def _connect(self, endpoint: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.SNDTIMEO, int(_DEADLINE_S * 1000))
        socket.connect(endpoint)
        return socket

    def _exchange(self, socket: zmq.Socket[bytes], messages: list[list[bytes]]) -> None:
        messages = [*messages, self._valid(m.GetStatus()), self._valid(m.GetHealth())]
        owed = Counter(corr for frames in messages if (corr := expected_corr(frames)) is not None)
        for frames in messages:
            socket.send_multipart(frames)
            self.num_frames += len(frames)
        deadline = time.monotonic() + _DEADLINE_S
        left = owed.total()
        while left:
            if not socket.poll(max(int((deadline - time.monotonic()) * 1000), 0)):
                lost = [frames for frames in messages if owed[expected_corr(frames) or 0] > 0]
                raise AssertionError(f"{left} answers did not come: {lost[:5]}, from {messages}")
            self._take(socket.recv_multipart(), owed)
            left -= 1
        wrong = {corr: count for corr, count in owed.items() if count}
        assert not wrong, f"not answered exactly once: {wrong} of {messages}"

    def _take(self, frames: list[bytes], owed: Counter[int]) -> None:
        assert len(frames) == 2, frames
        header, body = frames
        assert header[:3] == b"GW\x01", header
        kind, corr, epoch, seq, boot_id = msgspec.msgpack.decode(header[3:])
        assert kind == 2, header
        assert len(boot_id) == 16, header
        owed[corr] -= 1
        reply = msgspec.msgpack.decode(body)
        code = reply[1] if reply[0] == "failure" else reply[0]
        self.codes[code] += 1
        if code in INTERNAL:
            self.suspects.append(f"corr {corr}: {reply}")
        match reply[0]:
            case "status":
                status = msgspec.msgpack.decode(body, type=m.Status)
                self._kv_epoch = status.kv_epoch
            case "health_report":
                health = msgspec.msgpack.decode(body, type=m.HealthReport)
                assert health.session is not None
                self._highest_epoch = max(self._highest_epoch, health.session.highest_epoch)
                self._is_well = (
                    health.ready and health.aborted_after is None and epoch == self._epoch
                )
        if epoch == self._epoch and seq:
            self._next_seq = max(self._next_seq, seq + 1)


def _epoch_of(frames: Sequence[bytes]) -> int:
    """Return the epoch that a hello would take; 0 for anything else."""
    if len(frames) != 2 or b"hello" not in frames[1]:
        return 0
    try:
        return msgspec.msgpack.decode(frames[1], type=m.Hello).epoch
    except (msgspec.DecodeError, RecursionError):
        return 0
