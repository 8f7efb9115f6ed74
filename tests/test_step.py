"""The packed step: what goes in comes out, and wrong sizes are refused."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.errors import InvalidRequest
from gpuworker.step import (
    RESUMED,
    StepRow,
    pack_sampled,
    pack_step,
    unpack_sampled,
    unpack_step,
)

INT = st.integers(0, 2**31 - 1)
ROW = st.builds(
    StepRow,
    slot=INT,
    num_scheduled=INT,
    num_computed=INT,
    new_block_ids=st.lists(INT, max_size=5),
    flags=st.sampled_from([0, RESUMED]),
)


@given(rows=st.lists(ROW, max_size=8), tokens=st.lists(INT, max_size=20))
def test_a_step_survives_packing(rows: list[StepRow], tokens: list[int]) -> None:
    num_blocks = sum(len(row.new_block_ids) for row in rows)
    tables = unpack_step(pack_step(rows, tokens), len(rows), num_blocks, len(tokens))
    blocks = tables.block_ids.tolist()
    unpacked = []
    for columns in zip(
        tables.slots, tables.num_scheduled, tables.num_computed, tables.num_new_blocks,
        tables.flags, strict=True,
    ):  # fmt: skip
        slot, scheduled, computed, count, flags = map(int, columns)
        unpacked.append(StepRow(slot, scheduled, computed, blocks[:count], flags))
        del blocks[:count]
    assert unpacked == [row._replace(new_block_ids=list(row.new_block_ids)) for row in rows]
    assert tables.token_ids.tolist() == tokens


@given(
    buffer=st.binary(max_size=200),
    rows=st.integers(0, 6),
    blocks=st.integers(0, 6),
    tokens=st.integers(0, 20),
)
def test_any_bytes_give_tables_or_a_refusal(
    buffer: bytes, rows: int, blocks: int, tokens: int
) -> None:
    try:
        tables = unpack_step(buffer, rows, blocks, tokens)
    except InvalidRequest:
        return
    assert len(buffer) == 4 * (5 * rows + blocks + tokens)
    assert tables.num_new_blocks.sum(dtype=np.int64) == blocks or rows == 0


@given(counts=st.lists(st.integers(0, 3), max_size=10))
def test_sampled_tokens_survive_packing(counts: list[int]) -> None:
    tokens = np.arange(sum(counts), dtype=np.int32)
    buffer = pack_sampled(np.array(counts, np.int32), tokens)
    sampled = unpack_sampled(buffer, len(counts))
    assert sampled.num_sampled.tolist() == counts
    assert sampled.token_ids.tolist() == tokens.tolist()


def test_the_wire_is_little_endian_int32_in_the_documented_order() -> None:
    buffer = pack_step([StepRow(1, 2, 3, [5, 6], 7), StepRow(10, 20, 30)], [258])
    assert bytes(buffer).hex() == "".join(
        value.to_bytes(4, "little").hex() for value in (1, 10, 2, 20, 3, 30, 2, 0, 7, 0, 5, 6, 258)
    )


def test_wrong_sizes_are_refused_with_both_numbers() -> None:
    buffer = pack_step([StepRow(0, 1, 0, [3])])
    with pytest.raises(InvalidRequest, match=r"has 24 bytes; .* need 20"):
        unpack_step(buffer, 1, 0, 0)
    with pytest.raises(InvalidRequest, match="announce 1 new block ids; the step carries 0"):
        unpack_step(buffer, 1, 0, 1)
    with pytest.raises(InvalidRequest, match="announces 2 tokens and carries 1"):
        unpack_sampled(np.array([2, 5], "<i4").tobytes(), 1)
