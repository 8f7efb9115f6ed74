"""Public case B08: a device mask is opaque, and every mistake in it is named."""

from __future__ import annotations

import pytest

from gpuworker.device.placement import Placement, node_local_rank, parse_mask, place
from gpuworker.errors import ConfigError

GPU = "GPU-52a3c0de-1234-5678-9abc-def012345678"
MIG = "MIG-377e0d71-aaaa-bbbb-cccc-0123456789ab"


@pytest.mark.parametrize(
    ("mask", "entries"),
    [
        (None, None),
        ("", ()),
        ("-1", ()),
        ("0,1", ("0", "1")),
        (" 3 , 2", ("3", "2")),
        (GPU, (GPU,)),
        ("GPU-52a3", ("GPU-52a3",)),
        (f"{MIG},{GPU}", (MIG, GPU)),
        ("MIG-GPU-52a3/1/0", ("MIG-GPU-52a3/1/0",)),
    ],
)
def test_a_mask_is_split_into_its_entries(mask: str | None, entries: object) -> None:
    assert parse_mask(mask) == entries


@pytest.mark.parametrize("mask", ["2,,3", "0,0", "a", "0;1", "0,-1", "GPU-", "gpu-52a3", ","])
def test_a_wrong_mask_is_refused_and_the_variable_named(mask: str) -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES"):
        parse_mask(mask)


@pytest.mark.parametrize(
    ("local_rank", "mask", "num_devices", "assigned", "placement"),
    [
        (0, None, 1, None, Placement(0, "0")),
        (1, None, 4, None, Placement(1, "1")),
        (1, "6,7", 2, None, Placement(1, "7")),
        (0, GPU, 1, None, Placement(0, GPU)),
        (0, MIG, 1, None, Placement(0, MIG)),
        (0, "6,7", 2, ("7", "6"), Placement(1, "7")),
        (1, f"{MIG},{GPU}", 2, (MIG, "GPU-52a3"), Placement(1, GPU)),
        (0, "GPU-52a3,GPU-77", 2, (GPU,), Placement(0, "GPU-52a3")),
        (2, None, 8, ("5", "3", "1"), Placement(1, "1")),
    ],
)
def test_a_rank_gets_its_device(
    local_rank: int,
    mask: str | None,
    num_devices: int,
    assigned: tuple[str, ...] | None,
    placement: Placement,
) -> None:
    assert place(local_rank, mask, num_devices, assigned) == placement


@pytest.mark.parametrize(
    ("local_rank", "mask", "num_devices", "assigned", "words"),
    [
        (2, "0,1", 2, None, "local rank 2 needs 3 devices, 2 are visible"),
        (0, "", 0, None, "local rank 0 needs 1 devices, 0 are visible"),
        (1, None, 8, ("0",), "local rank 1 has no entry"),
        (0, "0,1", 2, ("7",), "'7' is not among the visible devices 0, 1"),
        (0, "GPU-5a,GPU-5b", 2, ("GPU-5",), "fits several of"),
    ],
)
def test_a_rank_without_a_device_is_refused_with_both_numbers(
    local_rank: int,
    mask: str | None,
    num_devices: int,
    assigned: tuple[str, ...] | None,
    words: str,
) -> None:
    with pytest.raises(ConfigError) as refusal:
        place(local_rank, mask, num_devices, assigned)
    assert words in str(refusal.value)


def test_data_parallel_replicas_stand_side_by_side() -> None:
    assert node_local_rank(1, 2, 2, 2) == 9
    assert node_local_rank(1, 2, 2, 2) == 9  # asking twice shifts nothing
    assert node_local_rank(3, 0, 2, 2) == 3
