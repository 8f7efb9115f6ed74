"""The KV budget is arithmetic on snapshots."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuworker.device.memory import (
    KVBudget,
    MemorySnapshot,
    plan_kv_budget,
    take_snapshot,
)
from gpuworker.errors import InsufficientKVMemory

GIB = 1 << 30
MIB = 1 << 20
BLOCK = 2 * MIB


class FakeReader:
    """A machine on which this process and others take and give memory."""

    def __init__(self, total: int, process: int = 0, others: int = 0) -> None:
        self.total, self.process, self.others, self.peak = total, process, others, process

    def total_bytes(self) -> int:
        return self.total

    def available_bytes(self) -> int:
        return self.total - self.process - self.others

    def process_bytes(self) -> int:
        return self.process

    def reset_peak(self) -> None:
        self.peak = self.process

    def peak_bytes(self) -> int:
        return self.peak

    def grow(self, num_bytes: int) -> None:
        self.process += num_bytes
        self.peak = max(self.peak, self.process)


@dataclasses.dataclass
class Run:
    """A start-up: load weights, run the largest batch, with a neighbour in between."""

    total: int = 16 * GIB
    baseline: int = GIB // 2
    weights: int = 2 * GIB
    activation: int = GIB
    retained: int = 0
    others: int = 0
    drift: int = 0
    utilization: float = 0.5
    explicit: int | None = None

    def plan(self) -> KVBudget:
        reader = FakeReader(self.total, self.baseline, self.others)
        start = take_snapshot(reader)
        reader.grow(self.weights)
        loaded = take_snapshot(reader)
        reader.reset_peak()
        reader.others += self.drift
        reader.grow(self.activation)
        reader.grow(self.retained - self.activation)
        return plan_kv_budget(
            start=start,
            loaded=loaded,
            profiled=take_snapshot(reader),
            utilization=self.utilization,
            weight_bytes=self.weights,
            block_bytes=BLOCK,
            kv_cache_memory_bytes=self.explicit,
        )


def test_the_share_is_what_own_memory_leaves() -> None:
    budget = Run().plan()
    assert budget.requested_bytes == 8 * GIB
    assert budget.weight_bytes == 2 * GIB
    assert budget.peak_activation_bytes == GIB
    assert budget.other_bytes == GIB // 2
    assert budget.kv_bytes == 8 * GIB - 2 * GIB - GIB - GIB // 2
    assert budget.max_num_blocks == budget.kv_bytes // BLOCK
    assert budget.warnings == ()


def test_requested_is_rounded_up() -> None:
    budget = Run(total=16 * GIB + 1).plan()
    assert budget.requested_bytes == 8 * GIB + 1


def test_activations_that_stay_allocated_are_counted_once() -> None:
    assert Run(retained=GIB // 2).plan().kv_bytes == Run(retained=0).plan().kv_bytes


def test_b05_memory_given_back_by_a_neighbour_is_a_warning() -> None:
    quiet = Run(others=6 * GIB, utilization=0.4).plan()
    released = Run(others=6 * GIB, drift=-4 * GIB, utilization=0.4).plan()
    assert released.kv_bytes == quiet.kv_bytes > 0
    assert quiet.warnings == ()
    assert len(released.warnings) == 1
    assert "other processes changed by -4 GiB" in released.warnings[0]


def test_b06_a_neighbour_that_starts_is_not_charged_to_us() -> None:
    alone = Run(utilization=0.35).plan()
    crowded = Run(utilization=0.35, drift=5 * GIB).plan()
    assert crowded.kv_bytes == alone.kv_bytes
    assert "other processes changed by +5 GiB" in crowded.warnings[0]


def test_b06_without_room_the_refusal_names_every_component() -> None:
    with pytest.raises(InsufficientKVMemory) as caught:
        Run(utilization=0.35, others=7 * GIB, drift=int(5.4 * GIB)).plan()
    for part in (
        "total 16 GiB",
        "utilization 0.35",
        "requested 5.6 GiB",
        "weights 2 GiB",
        "peak activation 1 GiB",
        "other 512 MiB",
        "available 1.1 GiB",
        "other processes changed by +5.4 GiB",
        "free memory held by other processes",
    ):
        assert part in caught.value.message


def test_too_small_a_share_says_how_to_raise_it() -> None:
    with pytest.raises(InsufficientKVMemory, match=r"raise device\.memory_utilization"):
        Run(utilization=0.2).plan()


def test_the_budget_never_exceeds_what_is_available() -> None:
    budget = Run(utilization=0.9, others=6 * GIB).plan()
    # 16 - 0.5 - 2 - 6 available, 1 of it for activations, 0.25 margin.
    assert budget.kv_bytes == int(6.25 * GIB)
    assert "limited to the 6.25 GiB" in budget.warnings[0]


def test_small_changes_of_others_are_noise() -> None:
    assert Run(drift=100 * MIB).plan().warnings == ()


def test_an_explicit_size_replaces_the_share() -> None:
    assert Run(utilization=0.1, explicit=3 * GIB).plan().kv_bytes == 3 * GIB


def test_an_explicit_size_is_checked_against_what_is_available() -> None:
    with pytest.raises(InsufficientKVMemory, match=r"kv_cache_memory_bytes 13 GiB exceeds the"):
        Run(explicit=13 * GIB).plan()


def test_an_explicit_size_below_a_block_is_refused() -> None:
    with pytest.raises(InsufficientKVMemory, match=r"raise cache\.kv_cache_memory_bytes"):
        Run(explicit=BLOCK - 1).plan()


_sizes = st.integers(0, 8 * GIB)


@given(
    run=st.builds(
        Run,
        total=st.integers(GIB, 64 * GIB),
        baseline=_sizes,
        weights=_sizes,
        activation=_sizes,
        others=_sizes,
        drift=st.integers(-4 * GIB, 4 * GIB),
        utilization=st.floats(0.01, 1.0),
        explicit=st.none() | st.integers(1, 16 * GIB),
    ),
    retained_share=st.floats(0, 1),
)
def test_a_budget_fits_or_is_refused(run: Run, retained_share: float) -> None:
    run = dataclasses.replace(run, retained=int(run.activation * retained_share))
    try:
        budget = run.plan()
    except InsufficientKVMemory:
        return
    own = budget.weight_bytes + budget.peak_activation_bytes + budget.other_bytes
    assert own == run.baseline + run.weights + run.activation
    assert budget.kv_bytes >= BLOCK
    # The whole machine holds the KV cache beside everyone's peak.
    others = run.others + run.drift
    assert own + budget.kv_bytes + others <= run.total
    if run.explicit is None:
        assert own + budget.kv_bytes <= budget.requested_bytes
    else:
        assert budget.kv_bytes == run.explicit


@given(drift=st.integers(-2 * GIB, 6 * GIB), utilization=st.floats(0.3, 0.4))
def test_others_change_the_budget_only_through_what_is_available(
    drift: int, utilization: float
) -> None:
    quiet = Run(others=2 * GIB, utilization=utilization).plan()
    moved = Run(others=2 * GIB, drift=drift, utilization=utilization).plan()
    assert moved.kv_bytes == quiet.kv_bytes
    assert bool(moved.warnings) == (abs(drift) >= 128 * MIB)


def test_a_snapshot_knows_what_others_hold() -> None:
    snapshot = MemorySnapshot(total_bytes=10, available_bytes=5, process_bytes=2, peak_bytes=2)
    assert snapshot.others_bytes == 3
