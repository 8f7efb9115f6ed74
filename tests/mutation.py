"""Messages that are almost right: valid ones, damaged by a seeded mutator in ways of the wire."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import msgspec

from gpuworker import messages as m
from gpuworker.ipc.wire import MAX_BUDGET_US
from gpuworker.step import NewRequest, SamplingParams, StepRow, pack_step

__all__ = ["EXTREMES", "REQUEST_BODIES", "Mutator", "header_of"]

_NUMBERS = (0, 1, 2, 127, 128, 2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**64 - 1)
EXTREMES: tuple[object, ...] = (
    *_NUMBERS,
    *(-1, -32, -(2**31), -(2**63)),
    *(0.0, -0.5, 1e308, float("nan"), float("inf"), None, True, False),
    *("", "x", "x" * 129, "\x00", "\u20ac" * 40, b"", b"\x00" * 20, b"\xff" * 33),
    *([], [1], [[]], [[[[[]]]]], ["weights"], ["weights", "kv_cache"], {}, {"a": 1}, {1: [2]}),
    msgspec.msgpack.Ext(1, b"x"),
    msgspec.msgpack.Ext(-1, b"\x00" * 4),
)
_LENGTHS = tuple(
    prefix + size
    for prefix, width in (
        (b"\xc4", 1), (b"\xc5", 2), (b"\xc6", 4), (b"\xc7", 1), (b"\xc9", 4), (b"\xd9", 1),
        (b"\xda", 2), (b"\xdb", 4), (b"\xdc", 2), (b"\xdd", 4), (b"\xde", 2), (b"\xdf", 4),
    )
    for size in (b"\x00" * width, b"\xff" * width, b"\x7f" + b"\xff" * (width - 1))
)  # fmt: skip
"""Heads of bin, ext, str, array and map that announce nothing, or far too much."""

_STEPS = (
    m.ExecuteModel(step_id=1, kv_epoch=0, num_rows=1, buffer=pack_step([StepRow(0, 1, 0)])),
    m.ExecuteModel(
        step_id=2,
        kv_epoch=0,
        num_rows=2,
        num_block_ids=3,
        num_token_ids=4,
        new_requests=(
            NewRequest(
                request_id="a",
                slot=0,
                num_prompt_tokens=4,
                sampling=SamplingParams(seed=3, logit_bias={1: 2.0}, bad_token_ids=((1, 2),)),
            ),
        ),
        finished=("b", "c"),
        buffer=pack_step([StepRow(0, 4, 0, [1, 2]), StepRow(1, 1, 5, [3], 1)], [5, 6, 7, 8]),
    ),
)
_REQUESTS: tuple[m.Request[m.Reply], ...] = (
    *_STEPS,
    m.Hello(min_version=1, max_version=1, epoch=1, client="fuzz", features=("replay",)),
    m.EndSession(),
    m.Cancel(corr=3),
    m.InitDevice(),
    m.LoadModel(),
    m.GetKVCacheSpec(),
    m.GetLimits(),
    m.ProfileMemory(),
    m.UpdateMaxModelLen(max_model_len=64),
    m.AllocateKVCache(num_blocks=8),
    m.WarmUp(),
    m.StartServing(),
    m.ResumeSteps(step_id=1),
    m.DropRequests(),
    m.ExecuteDummyBatch(num_tokens=3),
    m.Sleep(level=2),
    m.ResumePools(tags=("weights",)),
    m.WakeUp(),
    m.ReloadWeights(),
    m.StartTrace(),
    m.StopTrace(),
    m.GetStatus(),
    m.GetHealth(),
)
# Steps of a session with a ring are refused on the socket; test_ring has what a ring must stand.
assert {type(request) for request in _REQUESTS} == {*m.REQUESTS} - {m.Shutdown, m.OpenRing}
REQUEST_BODIES = tuple(msgspec.msgpack.encode(request) for request in _REQUESTS)
"""One valid body at least of every message; Shutdown would end what is tested."""


def header_of(*fields: object, version: int = 1) -> bytes:
    """A header with any fields."""
    return b"GW" + bytes([version]) + msgspec.msgpack.encode(fields)


class Mutator:
    """Damages messages; equal seeds make equal damage."""

    def __init__(self, rng: random.Random, bodies: Sequence[bytes]) -> None:
        self._rng = rng
        self._bodies = bodies
        self._ways: tuple[Callable[[list[bytes]], list[bytes]], ...] = (
            self._damage_header,
            *[self._damage_body] * 5,
            *[self._change_field] * 5,
            *[self._change_header_field] * 3,
            self._splice,
            self._swap,
            self._repeat_frames,
            self._recount_frames,
            self._other_version,
        )

    def mutate(self, frames: list[bytes]) -> list[bytes]:
        """Return a message with one to three damages; at least one frame, as ZeroMQ needs one."""
        for _ in range(self._rng.choice((1, 1, 1, 2, 3))):
            frames = self._rng.choice(self._ways)(frames)
        return frames or [b""]

    def _damage_header(self, frames: list[bytes]) -> list[bytes]:
        return [self._bytes(frames[0]), *frames[1:]] if frames else frames

    def _damage_body(self, frames: list[bytes]) -> list[bytes]:
        return [*frames[:-1], self._bytes(frames[-1])] if frames else frames

    def _bytes(self, data: bytes) -> bytes:
        rng = self._rng
        at = rng.randrange(len(data) + 1)
        match rng.randrange(8):
            case 0 if data:  # flip a bit
                at %= len(data)
                return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
            case 1:
                return data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at:]
            case 2:
                return data[:at] + data[at + rng.randrange(1, 9) :]
            case 3:
                return data[:at]
            case 4:
                return data[:at] + data[max(at - 7, 0) :]
            case 5:
                return data[:at] + rng.choice(_LENGTHS) + data[at + 1 :]
            case 6:  # the head of the whole
                return rng.choice(_LENGTHS) + data[1:]
            case _:
                end = at + rng.randrange(1, 5)
                return data[:at] + rng.randbytes(end - at) + data[end:]

    def _change_field(self, frames: list[bytes]) -> list[bytes]:
        """Put another value into a field of the body, add fields, or leave some out."""
        if not frames:
            return frames
        try:
            fields = msgspec.msgpack.decode(frames[-1])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return frames
        if not isinstance(fields, list) or not fields:
            return frames
        rng = self._rng
        where = fields
        while True:  # down into what is nested, sometimes
            at = rng.randrange(len(where))
            inner = where[at]
            if not isinstance(inner, list) or not inner or rng.random() < 0.3:
                break
            where = inner
        match rng.randrange(5):
            case 0:
                where.insert(at, rng.choice(EXTREMES))
            case 1:
                del where[at]
            case 2 if isinstance(where[at], int):
                where[at] = max(where[at] + rng.choice((-1, 1, 2, 255)), -(2**63))
            case _:
                where[at] = rng.choice(EXTREMES)
        try:
            return [*frames[:-1], msgspec.msgpack.encode(fields)]
        except (OverflowError, TypeError):
            return frames

    def _change_header_field(self, frames: list[bytes]) -> list[bytes]:
        if not frames or not frames[0].startswith(b"GW\x01"):
            return frames
        try:
            fields = msgspec.msgpack.decode(frames[0][3:])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return frames
        if not isinstance(fields, list) or not fields:
            return frames
        rng = self._rng
        at = rng.randrange(len(fields))
        match rng.randrange(4):
            case 0:
                fields = fields[:at]
            case 1:
                fields.append(rng.choice(EXTREMES))
            case 2 if at == 4:
                fields[at] = rng.choice((1, MAX_BUDGET_US, MAX_BUDGET_US + 1))
            case _:
                fields[at] = rng.choice(_NUMBERS if rng.random() < 0.7 else EXTREMES)
        return [header_of(*fields), *frames[1:]]

    def _splice(self, frames: list[bytes]) -> list[bytes]:
        other = self._rng.choice(self._bodies)
        body = frames[-1] if frames else b""
        return [
            *frames[:-1],
            body[: self._rng.randrange(len(body) + 1)] + other[self._rng.randrange(len(other)) :],
        ]

    def _swap(self, frames: list[bytes]) -> list[bytes]:
        return frames[::-1]

    def _repeat_frames(self, frames: list[bytes]) -> list[bytes]:
        return frames * self._rng.choice((2, 2, 3))

    def _recount_frames(self, frames: list[bytes]) -> list[bytes]:
        count = self._rng.randrange(11)
        more = [self._rng.choice((b"", b"GW\x01", *frames)) for _ in range(count)]
        return [*frames, *more][:count]

    def _other_version(self, frames: list[bytes]) -> list[bytes]:
        if not frames or len(frames[0]) < 3:
            return frames
        return [frames[0][:2] + bytes([self._rng.randrange(256)]) + frames[0][3:], *frames[1:]]
