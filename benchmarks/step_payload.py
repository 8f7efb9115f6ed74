"""A step on the wire: our struct of arrays against lists of structs and pickled dataclasses."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import msgspec

from benchmarks.payload import New, Row, Structs, make_dataclasses, make_rows, make_step
from benchmarks.report import Report, benchmark_parser, interleave, timed
from gpuworker import messages as m
from gpuworker.ipc.wire import Kind, RequestHeader, decode_request, encode_request
from gpuworker.step import StepRow, unpack_step


def _variants(
    rows: list[StepRow], new: list[New]
) -> dict[str, tuple[Callable[[], list[bytes]], Callable[[list[bytes]], object]]]:
    step = make_step(rows, new)
    header = RequestHeader(Kind.REQUEST, corr=1, epoch=1, seq=1)
    structs = Structs([Row(*row[:3], list(row.new_block_ids)) for row in rows], new)
    data = make_dataclasses(rows, new)
    decoder = msgspec.msgpack.Decoder(Structs)

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
            variants = _variants(*make_rows(num_requests, num_new))
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
