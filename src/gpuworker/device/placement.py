"""Layer 1. Which device a rank gets: a pure function of the rank, the mask and what is there.

The mask (CUDA_VISIBLE_DEVICES) renumbers devices: torch knows the n-th entry as cuda:n, tools
that see physical devices need the entry itself. Entries are opaque: an index, a UUID
(GPU-..., possibly shortened) or a MIG name (MIG-...).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gpuworker.errors import ConfigError

__all__ = ["MASK_VARIABLE", "Placement", "node_local_rank", "parse_mask", "place"]

MASK_VARIABLE = "CUDA_VISIBLE_DEVICES"
_ENTRY = re.compile(r"\d+|GPU-[0-9a-fA-F][0-9a-fA-F-]*|MIG-[0-9a-zA-Z][0-9a-zA-Z/-]*")


@dataclass(frozen=True, slots=True)
class Placement:
    """The device of a rank, under both its names."""

    index: int
    """Number for torch: cuda:<index>."""
    physical_id: str
    """Entry of the mask or of the assigned list: an index, a UUID or a MIG name."""


def parse_mask(mask: str | None) -> tuple[str, ...] | None:
    """Split a device mask into its entries; None when there is no mask, () when it hides all.

    Raises ConfigError that names the variable and the entry for an empty, unknown or repeated
    one.
    """
    if mask is None:
        return None
    if mask.strip() in ("", "-1"):
        return ()
    entries = tuple(entry.strip() for entry in mask.split(","))
    for position, entry in enumerate(entries):
        if not _ENTRY.fullmatch(entry):
            raise ConfigError(
                f"{MASK_VARIABLE}={mask!r}: entry {position} is {entry!r}; give indices, "
                "GPU- UUIDs or MIG- names, separated by commas"
            )
        if entry in entries[:position]:
            raise ConfigError(f"{MASK_VARIABLE}={mask!r} names {entry!r} twice")
    return entries


def node_local_rank(local_rank: int, dp_local_rank: int, pp_size: int, tp_size: int) -> int:
    """Place several data-parallel replicas of one node side by side.

    Pure: the configured local rank is never changed, so asking twice gives the same device.
    """
    return local_rank + dp_local_rank * pp_size * tp_size


def place(
    local_rank: int, mask: str | None, num_devices: int, assigned: Sequence[str] | None = None
) -> Placement:
    """Choose the device of a rank.

    local_rank counts the ranks of this node, num_devices the devices that torch sees under the
    mask. With an assigned list (physical ids of the node's ranks in order) the rank gets its
    entry, found in the mask by index, by full UUID or by a unique prefix of one. Raises
    ConfigError with both numbers when there are too few devices.
    """
    visible = parse_mask(mask)
    names = visible if visible is not None else tuple(map(str, range(num_devices)))
    if assigned is None:
        if local_rank >= min(num_devices, len(names)):
            raise ConfigError(
                f"local rank {local_rank} needs {local_rank + 1} devices, "
                f"{min(num_devices, len(names))} are visible"
                + (f" under {MASK_VARIABLE}={mask!r}" if mask is not None else "")
            )
        return Placement(local_rank, names[local_rank])
    if local_rank >= len(assigned):
        raise ConfigError(
            f"local rank {local_rank} has no entry in device.assigned_device_ids, which has "
            f"{len(assigned)}; give one per rank of the node"
        )
    wanted = assigned[local_rank]
    matches = [i for i, name in enumerate(names) if _same_device(name, wanted)]
    if len(matches) != 1 or matches[0] >= num_devices:
        found = "is not among" if not matches else "fits several of"
        raise ConfigError(
            f"assigned device {wanted!r} {found} the visible devices {', '.join(names) or 'none'}"
        )
    return Placement(matches[0], names[matches[0]])


def _same_device(name: str, wanted: str) -> bool:
    if name.isdigit() or wanted.isdigit():
        return name == wanted
    return name.startswith(wanted) or wanted.startswith(name)
