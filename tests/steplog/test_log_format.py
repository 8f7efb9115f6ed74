"""The bytes of a step log: what was written comes back, and no damage goes unnoticed."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.config import LimitsConfig, ModelConfig, WorkerConfig
from gpuworker.errors import ConfigError
from gpuworker.steplog import LogReader, LogWriter, header_of
from gpuworker.steplog.records import (
    FILE_HEAD,
    FORMAT_VERSION,
    HEAD,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    End,
    EpochChange,
    Header,
    LoggedReply,
    LoggedRequest,
    ModelFingerprint,
    Record,
    Stopped,
    checksum,
    encode_record,
)

NUMBERS = st.integers(0, 2**63 - 1)
TIMES = st.floats(0, 1e9)
BODIES = st.binary(max_size=60)
TEXTS = st.text(max_size=20)
HEADERS = st.builds(
    Header,
    gpuworker=TEXTS,
    python=TEXTS,
    torch=TEXTS,
    numpy=TEXTS,
    machine=TEXTS,
    num_cpus=NUMBERS,
    boot_id=TEXTS,
    started_unix_s=TIMES,
    config=st.builds(
        lambda name, window: WorkerConfig(
            model=ModelConfig(model=name), limits=LimitsConfig(window=window)
        ),
        st.text(min_size=1, max_size=20),
        st.integers(1, 4),
    ),
    model=st.none()
    | st.builds(
        ModelFingerprint,
        config_sha256=TEXTS,
        weight_files=st.lists(st.tuples(TEXTS, NUMBERS), max_size=3).map(tuple),
    ),
)
RECORDS = st.one_of(
    st.builds(
        LoggedRequest, index=NUMBERS, body=BODIES, epoch=NUMBERS, seq=NUMBERS, offset_s=TIMES
    ),
    st.builds(LoggedReply, index=NUMBERS, body=BODIES, duration_s=TIMES),
    st.builds(EpochChange, epoch=NUMBERS, offset_s=TIMES),
    st.builds(Stopped, reason=TEXTS),
    st.builds(End, num_requests=NUMBERS, num_replies=NUMBERS, offset_s=TIMES),
)
FEW = [
    header_of(WorkerConfig(model=ModelConfig(model="m"))),
    LoggedRequest(index=0, body=b"\x91\xa5hello", epoch=1, seq=1, offset_s=0.5),
    LoggedReply(index=0, body=b"\x91\xa2hi", duration_s=0.25),
    EpochChange(epoch=2, offset_s=1.0),
    LoggedRequest(index=1, body=b"x" * 40, epoch=2, seq=1, offset_s=1.5),
]


def encoded(records: list[Record]) -> tuple[bytes, list[int]]:
    """Return the bytes of a file and where each record begins, and the last one ends."""
    frames = [FILE_HEAD.pack(MAGIC, FORMAT_VERSION), *map(encode_record, records)]
    return b"".join(frames), list(itertools.accumulate(map(len, frames)))


DATA, STARTS = encoded(FEW)


@contextmanager
def file_of(data: bytes) -> Iterator[Path]:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        yield Path(file.name)


@settings(max_examples=60, deadline=None)
@given(header=HEADERS, records=st.lists(RECORDS, max_size=12))
def test_any_records_come_back_as_they_were_written(header: Header, records: list[Record]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log"
        log = LogWriter(path, fsync="close")
        log.begin(header)
        for record in records:
            log.append(record)
        log.close()
        reader = LogReader(path)
        assert list(reader.records()) == [header, *records]
        assert reader.torn_bytes == reader.num_skipped_bytes == 0
        ends = [record for record in records if isinstance(record, End | Stopped)]
        assert reader.end == (ends[-1] if ends else None)
        assert log.statistics().num_bytes == path.stat().st_size
        assert log.statistics().num_records == len(records) + 1
        assert reader.read_header() == header


def test_a_log_that_is_cut_off_anywhere_gives_the_records_before() -> None:
    for size in range(len(DATA)):
        with file_of(DATA[:size]) as path:
            reader = LogReader(path)
            complete = sum(start <= size for start in STARTS[1:])
            assert list(reader.records()) == FEW[:complete], size
            intact = max((start for start in STARTS if start <= size), default=0)
            assert reader.torn_bytes == size - intact, size


@settings(max_examples=100, deadline=None)
@given(garbage=st.binary(min_size=1, max_size=100))
def test_garbage_behind_the_last_record_is_counted_and_hides_nothing(garbage: bytes) -> None:
    with file_of(DATA + garbage) as path:
        reader = LogReader(path)
        assert list(reader.records()) == FEW
        assert reader.torn_bytes == len(garbage)


@pytest.mark.parametrize("bit", [0, 3, 7])
def test_a_flipped_bit_anywhere_is_detected(bit: int) -> None:
    for position in range(len(DATA)):
        data = bytearray(DATA)
        data[position] ^= 1 << bit
        with file_of(bytes(data)) as path:
            reader = LogReader(path)
            if position >= STARTS[-2]:  # nothing intact follows the last record
                assert list(reader.records()) == FEW[:-1], position
                assert reader.torn_bytes == len(DATA) - STARTS[-2]
                continue
            with pytest.raises(ConfigError) as refusal:
                list(reader.records())
            if position < len(MAGIC):
                assert "no step log" in str(refusal.value)
            elif position < FILE_HEAD.size:
                assert "format version" in str(refusal.value)
            else:
                damaged = max(start for start in STARTS if start <= position)
                assert f"damaged at offset {damaged}," in str(refusal.value), position


def test_salvage_leaves_the_damaged_record_out_and_says_how_much_it_was() -> None:
    for position in range(STARTS[1], STARTS[-2]):
        data = bytearray(DATA)
        data[position] ^= 0x10
        damaged = max(index for index, start in enumerate(STARTS) if start <= position)
        with file_of(bytes(data)) as path:
            reader = LogReader(path, salvage=True)
            assert list(reader.records()) == FEW[:damaged] + FEW[damaged + 1 :], position
            assert reader.num_skipped_bytes == STARTS[damaged + 1] - STARTS[damaged]
            assert reader.torn_bytes == 0


def test_a_record_of_a_later_version_is_passed_over() -> None:
    payload = b"\x91\xc0"
    unknown = HEAD.pack(len(payload), checksum(99, payload), 99) + payload
    with file_of(DATA[: STARTS[2]] + unknown + DATA[STARTS[2] :]) as path:
        assert list(LogReader(path).records()) == FEW


def test_an_intact_record_that_is_not_understood_is_an_error_with_its_offset() -> None:
    payload = b"\x91\xc0"
    strange = HEAD.pack(len(payload), checksum(2, payload), 2) + payload
    with file_of(DATA + strange) as path:
        with pytest.raises(ConfigError, match=f"offset {len(DATA)} is intact and not understood"):
            list(LogReader(path).records())
        assert list(LogReader(path, salvage=True).records()) == FEW


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "before the header is complete"),
        (DATA[: STARTS[1] - 1], "before the header is complete"),
        (b"GGUF" + bytes(100), "is no step log"),
        (DATA[: STARTS[0]] + DATA[STARTS[1] :], "does not begin with a header"),
    ],
)
def test_a_file_without_a_header_is_unusable(data: bytes, words: str) -> None:
    with file_of(data) as path, pytest.raises(ConfigError, match=words):
        LogReader(path).read_header()


@pytest.mark.parametrize(
    ("order", "words"),
    [([0, 4], "request 1 follows request -1"), ([0, 2], "answer to request 0, which is not")],
)
def test_records_that_do_not_belong_together_are_an_error(order: list[int], words: str) -> None:
    with file_of(encoded([FEW[index] for index in order])[0]) as path:
        with pytest.raises(ConfigError, match=words):
            list(LogReader(path).exchanges())
        list(LogReader(path, salvage=True).exchanges())


def test_a_record_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match="the limit is"):
        encode_record(LoggedReply(index=0, body=bytes(MAX_PAYLOAD_BYTES), duration_s=0.0))


def test_requests_come_in_their_order_with_answers_that_came_in_another() -> None:
    requests = [
        LoggedRequest(index=index, body=b"", epoch=0, seq=0, offset_s=0.0) for index in range(4)
    ]
    replies = [LoggedReply(index=index, body=b"", duration_s=0.0) for index in range(4)]
    records = [FEW[0], requests[0], requests[1], replies[1], requests[2], replies[0], requests[3]]
    with file_of(encoded([*records, replies[3]])[0]) as path:
        assert list(LogReader(path).exchanges()) == [
            (requests[0], replies[0]),
            (requests[1], replies[1]),
            (requests[2], None),
            (requests[3], replies[3]),
        ]
