"""Where parameters lie."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuworker.device.arena import Arena
from gpuworker.model.parameters import ParameterSpec
from gpuworker.weights.layout import ALIGNMENT_BYTES, WeightLayout

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def _spec(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ParameterSpec:
    return ParameterSpec(name, shape, dtype, ())


shapes = st.lists(st.integers(1, 40), min_size=0, max_size=3).map(tuple)
many_specs = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=12).map(
    lambda items: [_spec(f"p{i}", shape, dtype) for i, (shape, dtype) in enumerate(items)]
)


@given(many_specs)
def test_parameters_are_aligned_and_do_not_overlap(specs: list[ParameterSpec]) -> None:
    layout = WeightLayout.of(specs)
    end = 0
    for spec, place in zip(specs, layout.placements, strict=True):
        assert (place.name, place.shape, place.dtype) == (spec.name, spec.shape, spec.dtype)
        assert place.offset_bytes % ALIGNMENT_BYTES == 0
        assert 0 <= place.offset_bytes - end < ALIGNMENT_BYTES
        end = place.offset_bytes + spec.num_bytes
    assert end <= layout.total_bytes < end + ALIGNMENT_BYTES


@settings(deadline=None)
@given(many_specs)
def test_bound_parameters_keep_what_is_written_to_each(specs: list[ParameterSpec]) -> None:
    layout = WeightLayout.of(specs)
    arena = Arena("weights", layout.total_bytes)
    arena.map(layout.total_bytes)
    params = layout.bind(arena)
    for number, spec in enumerate(specs):
        params[spec.name].fill_(number)
    for number, spec in enumerate(specs):
        param = params[spec.name]
        assert (param.shape, param.dtype) == (spec.shape, spec.dtype)
        assert (param == number).all()
    arena.close()


def test_the_digest_sees_every_part_of_a_placement() -> None:
    base = [_spec("a", (2, 3)), _spec("b", (4,))]
    digest = WeightLayout.of(base).digest
    assert WeightLayout.of([dataclasses.replace(spec) for spec in base]).digest == digest
    others = (
        [_spec("a", (3, 2)), _spec("b", (4,))],
        [_spec("c", (2, 3)), _spec("b", (4,))],
        [_spec("a", (2, 3), torch.bfloat16), _spec("b", (4,))],
        [_spec("b", (4,)), _spec("a", (2, 3))],
        [_spec("a", (2, 3))],
    )
    assert len({digest, *(WeightLayout.of(specs).digest for specs in others)}) == 6


def test_a_name_given_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="parameter a is specified twice"):
        WeightLayout.of([_spec("a", (1,)), _spec("a", (1,))])
