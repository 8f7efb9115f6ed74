"""The block pool: nobody owns a block twice, none is lost, prefixes are found again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.engine.blocks import BlockPool, block_hash, root_hash
from gpuworker.engine.free_runs import FreeRuns
from gpuworker.errors import InvalidRequest


def _chain(tokens: list[int], size: int, salt: str = "") -> list[bytes]:
    hashes = [root_hash(salt)]
    for first in range(0, len(tokens) - size + 1, size):
        hashes.append(block_hash(hashes[-1], tokens[first : first + size]))
    return hashes[1:]


def test_a_block_hash_is_the_same_on_every_machine() -> None:
    assert block_hash(root_hash(), [1, 2, 3]).hex() == "ab017e56512736651fcb040b27ee2864"


def test_a_block_hash_depends_on_tokens_parents_and_salt() -> None:
    base = _chain([1, 2, 3, 4], 2)
    assert _chain([1, 2, 3, 5], 2)[0] == base[0]
    assert _chain([1, 2, 3, 5], 2)[1] != base[1]
    assert _chain([9, 2, 3, 4], 2)[1] != base[1]
    assert not set(_chain([1, 2, 3, 4], 2, "tenant")) & set(base)


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="at least 2"):
        BlockPool(1)


def test_fresh_blocks_come_in_runs_and_requests_keep_room_to_grow() -> None:
    pool = BlockPool(64)
    first = pool.allocate(3, room=8)
    second = pool.allocate(3, room=8)
    first += pool.allocate(2, after=first[-1], room=5)
    second += pool.allocate(5, after=second[-1], room=5)
    assert first == list(range(first[0], first[0] + 5))
    assert second == list(range(second[0], second[0] + 8))


def test_released_contents_are_found_again_and_evicted_from_the_end_of_the_oldest() -> None:
    pool = BlockPool(7)
    old, new = _chain([1, 2, 3, 4], 2), _chain([5, 6, 7, 8], 2)
    for hashes in (old, new):
        blocks = pool.allocate(2)
        for block, digest in zip(blocks, hashes, strict=True):
            pool.register(block, digest)
        pool.release(blocks)
    assert pool.statistics().num_cached == 4
    pool.allocate(3)  # two fresh ones and the tail of the older prefix
    assert len(pool.lookup(old)) == 1
    assert len(pool.lookup(new)) == 2
    assert pool.num_evictions == 1


def test_a_shared_block_is_free_only_after_its_last_owner() -> None:
    pool = BlockPool(3)
    digest = _chain([1, 2], 2)
    blocks = pool.allocate(1)
    pool.register(blocks[0], digest[0])
    pool.share(pool.lookup(digest))
    pool.release(blocks)
    assert pool.num_free == 1
    pool.release(blocks)
    assert pool.num_free == 2


def test_reset_forgets_owners_and_contents() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(4)
    pool.register(blocks[0], b"x")
    pool.reset()
    assert pool.num_free == 4
    assert pool.lookup([b"x"]) == []


@given(
    st.integers(2, 20),
    st.lists(
        st.tuples(st.sampled_from(["take", "hold", "free", "seal", "find"]), st.integers(0, 40)),
        max_size=80,
    ),
)
def test_no_block_is_owned_twice_and_counts_are_conserved(
    num_blocks: int, actions: list[tuple[str, int]]
) -> None:
    pool = BlockPool(num_blocks)
    owners: list[list[int]] = []
    sealed: dict[bytes, int] = {}
    for action, number in actions:
        if action == "take" and (count := number % 5) <= pool.num_free:
            taken = pool.allocate(count, after=number, room=number)
            owned = {block for blocks in owners for block in blocks}
            assert len(set(taken)) == count
            assert not owned & set(taken)
            assert 0 not in taken
            owners.append(taken)
        elif action == "free" and owners:
            pool.release(owners.pop(number % len(owners)))
        elif action == "seal" and owners and owners[number % len(owners)]:
            block = owners[number % len(owners)][0]
            digest = b"%d" % number
            pool.register(block, digest)
            if pool.lookup([digest]) == [block]:
                sealed[digest] = block
        elif action in ("find", "hold"):
            hits = pool.lookup([b"%d" % number])
            assert all(sealed[b"%d" % number] == block for block in hits)
            free = pool.num_free
            if action == "hold" and hits:
                missing = pool.num_without_owner(hits)
                pool.share(hits)
                assert pool.num_free == free - missing
                owners.append(hits)
        counts = pool.statistics()
        owned = {block for blocks in owners for block in blocks}
        assert counts.num_owned == len(owned)
        assert counts.num_owned + counts.num_cached + counts.num_fresh == counts.num_usable
    for blocks in owners:
        pool.release(blocks)
    assert pool.num_free == pool.num_usable


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 30), st.integers(0, 12))))
def test_free_runs_are_a_set(actions: list[tuple[int, int, int]]) -> None:
    runs, free = FreeRuns(3, 25), set(range(3, 25))
    for count, after, room in actions:
        if count <= len(free):
            taken = runs.take(count, after=after, room=room)
            assert len(set(taken)) == count
            assert set(taken) <= free
            free -= set(taken)
        elif 3 <= after < 25 and after not in free:
            runs.add(after)
            free.add(after)
        assert len(runs) == len(free)
        assert {block for block in range(30) if block in runs} == free
