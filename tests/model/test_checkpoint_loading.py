"""Checkpoint tensors into parameters: everything is checked first, then every byte arrives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from gpuworker.device.arena import Arena
from gpuworker.errors import CheckpointMismatch, CheckpointNotFound
from gpuworker.model import loader as loader_module
from gpuworker.model.checkpoint import Checkpoint, open_checkpoint
from gpuworker.model.loader import LoadPlan, load, plan_load
from gpuworker.model.parameters import ParameterSpec, Region, Source
from gpuworker.model.safetensors_header import read_header
from gpuworker.model.tensor_reader import have_equal_values
from gpuworker.weights.layout import WeightLayout

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def _checkpoint(directory: Path, tensors: Mapping[str, torch.Tensor]) -> Checkpoint:
    (directory / "config.json").write_text("{}")
    save_file(dict(tensors), directory / "model.safetensors")
    return open_checkpoint(directory)


def _whole(shape: tuple[int, ...]) -> Region:
    return tuple((0, extent) for extent in shape)


def _plain(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> ParameterSpec:
    """A parameter that is one checkpoint tensor of the same name."""
    return ParameterSpec(
        name, shape, dtype, ((Source(name, shape, _whole(shape), _whole(shape)),),)
    )


def _stacked(name: str, parts: Mapping[str, int], columns: int) -> ParameterSpec:
    """A parameter whose rows are those of several tensors, or one tensor of its own name."""
    sources = []
    start = 0
    for part, rows in parts.items():
        region = ((start, start + rows), (0, columns))
        sources.append(Source(part, (rows, columns), _whole((rows, columns)), region))
        start += rows
    shape = (start, columns)
    merged = Source(name, shape, _whole(shape), _whole(shape))
    return ParameterSpec(name, shape, torch.float32, (tuple(sources), (merged,)))


def _plan(
    checkpoint: Checkpoint,
    *specs: ParameterSpec,
    ignorable: Callable[[str], bool] = lambda _name: False,
    tied_head: tuple[str, str] | None = None,
) -> LoadPlan:
    return plan_load(checkpoint, specs, ignorable, tied_head=tied_head)


def _params(*specs: ParameterSpec) -> dict[str, torch.Tensor]:
    return {spec.name: torch.full(spec.shape, torch.nan, dtype=spec.dtype) for spec in specs}


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


# Choosing and checking


def test_parts_are_merged_and_a_merged_tensor_is_taken_as_it_is(tmp_path: Path) -> None:
    spec = _stacked("qkv", {"q": 4, "k": 2, "v": 2}, columns=3)
    q, k, v = _random(4, 3), _random(2, 3, seed=1), _random(2, 3, seed=2)
    expected = torch.cat([q, k, v])
    for name, tensors in {"apart": {"q": q, "k": k, "v": v}, "merged": {"qkv": expected}}.items():
        (tmp_path / name).mkdir()
        params = _params(spec)
        load(_plan(_checkpoint(tmp_path / name, tensors), spec), params)
        assert torch.equal(params["qkv"], expected)


def test_every_problem_is_in_one_error(tmp_path: Path) -> None:
    checkpoint = _checkpoint(
        tmp_path,
        {
            "wrong_shape": torch.zeros(3, 2),
            "quantised": torch.zeros(4, dtype=torch.int8),
            "k": torch.zeros(2, 3),
            "surplus": torch.zeros(7),
            "rotary.inv_freq": torch.zeros(4),
        },
    )
    with pytest.raises(CheckpointMismatch) as caught:
        _plan(
            checkpoint,
            _plain("wrong_shape", (2, 3)),
            _plain("quantised", (4,)),
            _plain("gone", (1,)),
            _stacked("kv", {"k": 2, "v": 2}, columns=3),
            ignorable=lambda name: name.endswith("inv_freq"),
        )
    message = caught.value.message
    for part in (
        "wrong_shape has shape [3, 2], the config asks for [2, 3]",
        "quantised has integer type int8 for the float32 parameter quantised",
        "missing for gone: gone",
        "missing for kv: v",
        "unknown tensor surplus [7]",
    ):
        assert part in message
    assert "inv_freq" not in message
    assert "tensor k" not in message


def test_two_sources_of_one_parameter_are_refused(tmp_path: Path) -> None:
    checkpoint = _checkpoint(
        tmp_path, {"k": torch.zeros(2, 3), "v": torch.zeros(2, 3), "kv": torch.zeros(4, 3)}
    )
    with pytest.raises(CheckpointMismatch, match="second source kv"):
        _plan(checkpoint, _stacked("kv", {"k": 2, "v": 2}, columns=3))


@pytest.mark.parametrize(
    "targets",
    [
        (((0, 2), (0, 3)), ((2, 3), (0, 3))),
        (((0, 2), (0, 3)), ((1, 3), (0, 3))),
        (((0, 2), (0, 3)), ((3, 5), (0, 3))),
        (((0, 2), (0, 3)),),
    ],
    ids=["short", "overlap", "outside", "half"],
)
def test_a_parameter_that_is_not_covered_once_is_refused(
    tmp_path: Path, targets: tuple[Region, ...]
) -> None:
    names = "ab"[: len(targets)]
    checkpoint = _checkpoint(tmp_path, {name: torch.zeros(2, 3) for name in names})
    sources = tuple(
        Source(name, (2, 3), _whole((2, 3)), target)
        for name, target in zip(names, targets, strict=True)
    )
    with pytest.raises(CheckpointMismatch, match=r"exactly once|lie outside it"):
        _plan(checkpoint, ParameterSpec("p", (4, 3), torch.float32, (sources,)))


@st.composite
def _tilings(draw: st.DrawFn, shape: tuple[int, ...] = (6, 5, 4)) -> list[Region]:
    """Cut a box in two, again and again."""
    regions = [_whole(shape)]
    for _ in range(draw(st.integers(0, 8))):
        region = regions.pop(draw(st.integers(0, len(regions) - 1)))
        axis = draw(st.integers(0, len(shape) - 1))
        start, end = region[axis]
        cut = draw(st.integers(start, end))
        for interval in ((start, cut), (cut, end)):
            regions.append((*region[:axis], interval, *region[axis + 1 :]))
    return draw(st.permutations(regions))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(regions=_tilings(), data=st.data())
def test_any_tiling_loads_exactly_and_any_change_of_it_is_refused(
    tmp_path: Path, regions: list[Region], data: st.DataObject
) -> None:
    expected = _random(6, 5, 4)
    checkpoint = _checkpoint(tmp_path, {"whole": expected})

    def spec(parts: list[Region]) -> ParameterSpec:
        sources = tuple(Source("whole", (6, 5, 4), part, part) for part in parts)
        return ParameterSpec("p", (6, 5, 4), torch.float32, (sources,))

    params = _params(spec(regions))
    load(_plan(checkpoint, spec(regions)), params)
    assert torch.equal(params["p"], expected)

    solid = [region for region in regions if all(a < b for a, b in region)]
    victim = data.draw(st.sampled_from(solid))
    kept = list(regions)
    kept.remove(victim)
    with pytest.raises(CheckpointMismatch, match="exactly once"):
        _plan(checkpoint, spec(kept))
    with pytest.raises(CheckpointMismatch, match="exactly once"):
        _plan(checkpoint, spec([*regions, victim]))


# B35


EMBED, HEAD = "embed.weight", "lm_head.weight"


def _head_case(
    directory: Path, *, tied: bool, head: torch.Tensor | None
) -> tuple[LoadPlan, dict[str, torch.Tensor]]:
    embed = _random(6, 4)
    tensors = {EMBED: embed} if head is None else {EMBED: embed, HEAD: head}
    specs = [_plain(EMBED, (6, 4))] if tied else [_plain(EMBED, (6, 4)), _plain(HEAD, (6, 4))]
    plan = _plan(_checkpoint(directory, tensors), *specs, tied_head=(HEAD, EMBED) if tied else None)
    params = _params(*specs)
    load(plan, params)
    assert torch.equal(params[EMBED], embed)
    return plan, params


def test_b35_tied_without_a_head_loads(tmp_path: Path) -> None:
    assert _head_case(tmp_path, tied=True, head=None)[0].warnings == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b35_tied_with_an_equal_head_loads(tmp_path: Path, dtype: torch.dtype) -> None:
    assert _head_case(tmp_path, tied=True, head=_random(6, 4).to(dtype))[0].warnings == ()


@pytest.mark.parametrize(
    "head", [_random(6, 4, seed=1), _random(6, 5), _random(6, 4, dtype=torch.bfloat16)]
)
def test_b35_tied_with_a_different_head_loads_with_a_warning(
    tmp_path: Path, head: torch.Tensor
) -> None:
    (warning,) = _head_case(tmp_path, tied=True, head=head)[0].warnings
    assert f"{HEAD} differs from {EMBED}" in warning


def test_b35_untied_with_a_head_loads(tmp_path: Path) -> None:
    head = _random(6, 4, seed=1)
    plan, params = _head_case(tmp_path, tied=False, head=head)
    assert plan.warnings == ()
    assert torch.equal(params[HEAD], head)


def test_b35_untied_without_a_head_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMismatch, match=rf"missing for {HEAD}: {HEAD}"):
        _head_case(tmp_path, tied=False, head=None)


def test_equal_values_are_compared_across_chunks(tmp_path: Path) -> None:
    first = _random(3_000_000)
    last_differs = first.clone()
    last_differs[-1] += 1
    nan = torch.tensor([torch.nan])
    save_file(
        {"a": first, "b": last_differs, "c": first.double(), "n": nan, "m": nan.clone()},
        tmp_path / "x.safetensors",
    )
    info = read_header(tmp_path / "x.safetensors")
    assert have_equal_values(info["a"], info["c"])
    assert have_equal_values(info["n"], info["m"])
    assert not have_equal_values(info["a"], info["b"])
    assert not have_equal_values(info["b"], info["c"])


# Reading


@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_values_convert_as_by_tensor_to(
    tmp_path: Path, source: torch.dtype, target: torch.dtype
) -> None:
    values = torch.cat(
        [
            _random(2000, dtype=source),
            torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65520.0, 1e-8, 1e-40, 3.4e38]).to(
                source
            ),
        ]
    )
    spec = _plain("x", tuple(values.shape), target)
    params = _params(spec)
    load(_plan(_checkpoint(tmp_path, {"x": values}), spec), params)
    assert torch.equal(params["x"], values.to(target))


@pytest.mark.parametrize("chunk_bytes", [1, 64, 100, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_of_any_chunk_size_arrive_in_an_arena(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, dtype: torch.dtype
) -> None:
    """A rank takes some rows of one matrix and some columns of another, an expert and a scalar."""
    monkeypatch.setattr(loader_module, "CHUNK_BYTES", chunk_bytes)
    a, b, e, s = _random(8, 6), _random(8, 6, seed=1), _random(5, 6, seed=2), _random(seed=3)
    checkpoint = _checkpoint(tmp_path, {"a": a, "b": b, "e": e, "s": s})
    specs = (
        ParameterSpec(
            "rows", (4, 6), dtype, ((Source("a", (8, 6), ((2, 6), (0, 6)), _whole((4, 6))),),)
        ),
        ParameterSpec(
            "columns", (8, 2), dtype, ((Source("b", (8, 6), ((0, 8), (3, 5)), _whole((8, 2))),),)
        ),
        ParameterSpec(
            "experts",
            (2, 5, 6),
            dtype,
            (
                (
                    Source("e", (5, 6), _whole((5, 6)), ((0, 1), (0, 5), (0, 6))),
                    Source("a", (8, 6), ((0, 5), (0, 6)), ((1, 2), (0, 5), (0, 6))),
                ),
            ),
        ),
        _plain("s", (), dtype),
    )
    layout = WeightLayout.of(specs)
    arena = Arena("weights", layout.total_bytes)
    arena.map(layout.total_bytes)
    params = layout.bind(arena)
    load(_plan(checkpoint, *specs), params, num_threads=3)
    assert torch.equal(params["rows"], a[2:6].to(dtype))
    assert torch.equal(params["columns"], b[:, 3:5].to(dtype))
    assert torch.equal(params["experts"], torch.stack([e, a[:5]]).to(dtype))
    assert torch.equal(params["s"], s.to(dtype))
    arena.close()


def test_progress_counts_the_bytes_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "CHUNK_BYTES", 400)
    specs = (_plain("a", (50, 4)), _plain("b", (30,), torch.bfloat16))
    checkpoint = _checkpoint(tmp_path, {"a": _random(50, 4), "b": _random(30)})
    seen: list[tuple[int, int]] = []
    load(_plan(checkpoint, *specs), _params(*specs), lambda *report: seen.append(report))
    assert seen == [(400, 920), (800, 920), (920, 920)]


def test_a_file_that_shrinks_after_the_plan_is_reported(tmp_path: Path) -> None:
    spec = _plain("a", (50, 4))
    checkpoint = _checkpoint(tmp_path, {"a": _random(50, 4)})
    plan = _plan(checkpoint, spec)
    path = checkpoint.tensors["a"].file
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CheckpointMismatch, match="became shorter while it was read"):
        load(plan, _params(spec))
    path.unlink()
    with pytest.raises(CheckpointNotFound, match="cannot read"):
        load(plan, _params(spec))


def test_an_empty_parameter_needs_no_bytes(tmp_path: Path) -> None:
    spec = _plain("a", (0, 4))
    checkpoint = _checkpoint(tmp_path, {"a": torch.zeros(0, 4)})
    load(_plan(checkpoint, spec), _params(spec))
