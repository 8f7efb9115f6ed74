"""A step on the wire: our struct of arrays against lists of structs and pickled dataclasses."""

from __future__ import annotations

import dataclasses
import pickle
import random
from collections.abc import Callable

import msgspec

from benchmarks.report import Report, benchmark_parser, interleave, timed
from gpuworker import messages as m
from gpuworker.ipc.wire import Kind, RequestHeader, decode_request, encode_request
from gpuworker.step import NewRequest, StepRow, pack_step, unpack_step

_PROMPT = 512


class _Row(msgspec.Struct, array_like=True, gc=False):
    slot: int
    num_scheduled: int
    num_computed: int
    new_block_ids: list[int]


class _New(msgspec.Struct, array_like=True, gc=False):
    request_id: str
    slot: int
    token_ids: list[int]


class _Structs(msgspec.Struct, array_like=True, gc=False):
    rows: list[_Row]
    new: list[_New]


@dataclasses.dataclass
class _DataRow:
    slot: int
    num_scheduled: int
    num_computed: int
    new_block_ids: list[int]


@dataclasses.dataclass
class _DataNew:
    request_id: str
    slot: int
    token_ids: list[int]


@dataclasses.dataclass
class _DataStep:
    rows: list[_DataRow]
    new: list[_DataNew]


def _rows(num_requests: int, num_new: int) -> tuple[list[StepRow], list[_New]]:
    """One running request in 16 gets a block; the last num_new are new, with whole prompts."""
    rng = random.Random(num_requests)
    rows = [
        StepRow(slot, 1, rng.randrange(2000), [rng.randrange(9000)] if slot % 16 == 0 else ())
        for slot in range(num_requests - num_new)
    ]
    new = []
    for slot in range(num_requests - num_new, num_requests):
        blocks = [rng.randrange(9000) for _ in range(_PROMPT // 16)]
        rows.append(StepRow(slot, _PROMPT, 0, blocks))
        tokens = [rng.randrange(150_000) for _ in range(_PROMPT)]
        new.append(_New(f"request-{slot}", slot, tokens))
    return rows, new


def _ours(rows: list[StepRow], new: list[_New]) -> m.ExecuteModel:
    return m.ExecuteModel(
        step_id=1,
        kv_epoch=0,
        num_rows=len(rows),
        num_block_ids=sum(len(row.new_block_ids) for row in rows),
        num_token_ids=sum(len(n.token_ids) for n in new),
        new_requests=tuple(
            NewRequest(request_id=n.request_id, slot=n.slot, num_prompt_tokens=len(n.token_ids))
            for n in new
        ),
        buffer=pack_step(rows, [token for n in new for token in n.token_ids]),
    )


def _variants(
    rows: list[StepRow], new: list[_New]
) -> dict[str, tuple[Callable[[], list[bytes]], Callable[[list[bytes]], object]]]:
    step = _ours(rows, new)
    header = RequestHeader(Kind.REQUEST, corr=1, epoch=1, seq=1)
    structs = _Structs([_Row(*row[:3], list(row.new_block_ids)) for row in rows], new)
    data = _DataStep(
        [_DataRow(*row[:3], list(row.new_block_ids)) for row in rows],
        [_DataNew(n.request_id, n.slot, n.token_ids) for n in new],
    )
    decoder = msgspec.msgpack.Decoder(_Structs)

    def decode(frames: list[bytes]) -> object:
        request = decode_request(frames)
        assert isinstance(request, m.ExecuteModel)
        return unpack_step(
            request.buffer, request.num_rows, request.num_block_ids, request.num_token_ids
        )

    return {
        "struct of arrays": (lambda: encode_request(header, step), decode),
        "array of structs": (
            lambda: [msgspec.msgpack.encode(structs)],
            lambda frames: decoder.decode(frames[0]),
        ),
        "pickled dataclasses": (
            lambda: [pickle.dumps(data, protocol=5)],
            lambda frames: pickle.loads(frames[0]),
        ),
    }


def main() -> None:
    """Run the benchmark."""
    arguments = benchmark_parser(__doc__ or "").parse_args()
    report = Report("step_payload", arguments.output)
    num_rounds, num_calls = (2, 5) if arguments.quick else (9, 200)
    for num_requests in (8, 64, 256, 1024):
        for num_new in (0, max(num_requests // 32, 1)):
            variants = _variants(*_rows(num_requests, num_new))
            frames = {name: encode() for name, (encode, _) in variants.items()}

            def cost(name: str) -> Callable[[], float]:
                encode, decode = variants[name]  # noqa: B023  # measured before the next turn
                there = frames[name]  # noqa: B023
                return lambda: (
                    1e6 * (timed(encode, num_calls) + timed(lambda: decode(there), num_calls))
                )

            rounds = interleave({name: cost(name) for name in variants}, num_rounds)
            report.compare(
                "encode + decode",
                rounds,
                "us",
                baseline="struct of arrays",
                num_requests=num_requests,
                num_new=num_new,
            )
            for name, parts in frames.items():
                report.figure(
                    "size",
                    sum(map(len, parts)),
                    "bytes",
                    variant=name,
                    num_requests=num_requests,
                    num_new=num_new,
                )


if __name__ == "__main__":
    main()
