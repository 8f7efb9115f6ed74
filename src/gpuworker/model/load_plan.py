"""Layer 1. Which checkpoint tensor fills which part of which parameter, checked beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from gpuworker.errors import CheckpointMismatch
from gpuworker.model.checkpoint import Checkpoint
from gpuworker.model.parameters import ParameterSpec, Region, Source
from gpuworker.model.safetensors_header import TensorInfo
from gpuworker.model.tensor_reader import have_equal_values

__all__ = ["LoadPlan", "PlannedCopy", "plan_load"]


@dataclass(frozen=True, slots=True)
class PlannedCopy:
    """One part of a checkpoint tensor, converted into one part of a parameter."""

    parameter: str
    target: Region
    info: TensorInfo
    source: Region


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Copies that together fill every parameter exactly once."""

    copies: tuple[PlannedCopy, ...]
    warnings: tuple[str, ...]
    """What was decided about the tensors; the checkpoint has its own."""


def plan_load(
    checkpoint: Checkpoint,
    specs: Sequence[ParameterSpec],
    is_ignorable: Callable[[str], bool],
    *,
    tied_head: tuple[str, str] | None,
) -> LoadPlan:
    """Choose each parameter's first complete variant and check everything about it.

    tied_head names the head and the embedding of a model whose head is its embedding: a head
    that the checkpoint holds all the same is not loaded, and a warning says when its values
    differ. Raises one CheckpointMismatch that lists every tensor that is missing, unknown, a
    second source of a parameter, wrongly shaped or not convertible, and every parameter that
    its sources do not cover exactly once. Nothing is allocated before.
    """
    problems: list[str] = []
    copies: list[PlannedCopy] = []
    accounted = set() if tied_head is None else {tied_head[0]}
    for spec in specs:
        variant = _first_complete(checkpoint, spec)
        if variant is None:
            problems.append(_missing(checkpoint, spec))
            # What is there of an incomplete variant is explained by what is missing.
            accounted.update(_names(spec))
            continue
        accounted.update(source.name for source in variant)
        found = list(_problems(checkpoint, spec, variant))
        problems += found
        if not found:
            copies += (
                PlannedCopy(
                    spec.name, source.target, checkpoint.tensors[source.name], source.source
                )
                for source in variant
            )
    alternatives = {name for spec in specs for name in _names(spec)}
    for name, info in checkpoint.tensors.items():
        if name not in accounted and not is_ignorable(name):
            kind = "second source" if name in alternatives else "unknown tensor"
            problems.append(f"{kind} {name} {list(info.shape)} in {info.file.name}")
    if problems:
        raise CheckpointMismatch(
            f"{checkpoint.directory} does not fit its config: {'; '.join(problems)}"
        )
    return LoadPlan(tuple(copies), tuple(_head_warnings(checkpoint, tied_head)))


def _first_complete(checkpoint: Checkpoint, spec: ParameterSpec) -> tuple[Source, ...] | None:
    for variant in spec.variants:
        if all(source.name in checkpoint.tensors for source in variant):
            return variant
    return None


def _names(spec: ParameterSpec) -> Iterator[str]:
    return (source.name for variant in spec.variants for source in variant)


def _missing(checkpoint: Checkpoint, spec: ParameterSpec) -> str:
    """Name what the nearest variant lacks."""
    lacks = [
        list(
            dict.fromkeys(
                source.name for source in variant if source.name not in checkpoint.tensors
            )
        )
        for variant in spec.variants
    ]
    nearest = min(lacks, key=len, default=[])
    return f"missing for {spec.name}: {', '.join(nearest)}"


def _problems(
    checkpoint: Checkpoint, spec: ParameterSpec, variant: tuple[Source, ...]
) -> Iterator[str]:
    for source in variant:
        info = checkpoint.tensors[source.name]
        if info.shape != source.shape:
            yield (
                f"tensor {source.name} has shape {list(info.shape)}, the config asks for "
                f"{list(source.shape)}"
            )
        if spec.dtype.is_floating_point and not info.dtype.is_floating_point:
            yield (
                f"tensor {source.name} has integer type {_name(info.dtype)} for the "
                f"{_name(spec.dtype)} parameter {spec.name}; quantised checkpoints are not read"
            )
        if not _fits(source.source, source.shape) or not _fits(source.target, spec.shape):
            yield f"parts of {source.name} lie outside it or outside {spec.name}"
        if _extents(source.source) != _extents(source.target):
            yield f"a part of {source.name} has another shape than its place in {spec.name}"
    if not _covers(tuple(source.target for source in variant), spec.shape):
        yield f"the sources of {spec.name} do not cover {list(spec.shape)} exactly once"


def _extents(region: Region) -> tuple[int, ...]:
    """Return a region's shape without leading ones (an expert's slot in a stack of experts)."""
    shape = [end - start for start, end in region]
    while shape and shape[0] == 1:
        shape.pop(0)
    return tuple(shape)


def _fits(region: Region, shape: tuple[int, ...]) -> bool:
    return len(region) == len(shape) and all(
        0 <= start <= end <= extent for (start, end), extent in zip(region, shape, strict=True)
    )


def _covers(regions: tuple[Region, ...], shape: tuple[int, ...]) -> bool:
    """Say whether regions inside a shape tile it: right volume, and no two overlap."""
    filled = [region for region in regions if _volume(region)]
    if sum(map(_volume, filled)) != math.prod(shape):
        return False
    # Sorted by first axis, a region can only overlap those that start before it ends.
    filled.sort()
    for index, region in enumerate(filled):
        for other in filled[index + 1 :]:
            if region and other[0][0] >= region[0][1]:
                break
            if all(a < d and c < b for (a, b), (c, d) in zip(region, other, strict=True)):
                return False
    return True


def _volume(region: Region) -> int:
    return math.prod(end - start for start, end in region)


def _head_warnings(checkpoint: Checkpoint, tied_head: tuple[str, str] | None) -> Iterator[str]:
    if tied_head is None or any(name not in checkpoint.tensors for name in tied_head):
        return
    head, embedding = tied_head
    if not have_equal_values(checkpoint.tensors[embedding], checkpoint.tensors[head]):
        yield (
            f"{head} differs from {embedding}, but the config ties them; the embedding is used "
            "and the head ignored"
        )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
