"""Layer 1. Which rotary embedding a config asks for.

Three spellings are in use: `rope_scaling` with `type`, `rope_scaling` with `rope_type`, and
`rope_parameters` (which also holds `rope_theta`), either flat or one per layer type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

from gpuworker.errors import CheckpointMismatch, UnsupportedModel
from gpuworker.model.config_fields import Fields

__all__ = ["RopeKind", "RopeSpec", "read_ropes"]

RopeKind = Literal["default", "dynamic", "linear", "llama3", "longrope", "yarn"]

# Names that older configs use for kinds that have been renamed since.
_RENAMED = {"su": "longrope"}

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """One rotary embedding, with everything that its frequencies depend on."""

    kind: RopeKind
    theta: float
    rotary_dim: int
    """Leading elements of a head that are rotated; even."""
    max_position_embeddings: int
    original_max_position_embeddings: int
    """Context length before scaling; max_position_embeddings where the kind has none."""
    factor: float = 1.0
    attention_factor: float | None = None
    """Multiplies cos and sin; None derives it as the kind prescribes."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def read_ropes(
    config: Fields, head_size: int, theta: float, local_theta: float | None
) -> dict[str, RopeSpec]:
    """Return the rope of each layer type, keyed full_attention and sliding_attention.

    theta and local_theta are the architecture's defaults; local_theta is None where sliding
    layers rotate as the others do. Raises UnsupportedModel for an unknown kind and
    CheckpointMismatch for missing, malformed or contradictory fields.
    """
    parameters = config.mapping("rope_parameters")
    scaling = config.mapping("rope_scaling")
    theta = config.number("rope_theta", theta)
    local = config.number("rope_local_base_freq", local_theta or theta)
    nested = parameters is not None and (_FULL in parameters or _SLIDING in parameters)
    if parameters is not None and nested:
        full = _section(parameters, _FULL)
        sliding = _section(parameters, _SLIDING)
        if scaling is not None:
            full = {**full, **scaling}
        full_spec = _read(config, full, head_size, theta)
        fallback = local if local_theta is not None else theta
        return {_FULL: full_spec, _SLIDING: _read(config, sliding, head_size, fallback)}
    spec = _read(config, scaling or parameters or {}, head_size, theta)
    if local_theta is None:
        return {_FULL: spec, _SLIDING: spec}
    return {_FULL: spec, _SLIDING: _read(config, {}, head_size, local)}


def _section(parameters: Mapping[str, object], layer_type: str) -> Mapping[str, object]:
    section = parameters.get(layer_type)
    if section is None:
        return {}
    if not isinstance(section, Mapping):
        raise CheckpointMismatch(
            f"config: rope_parameters.{layer_type} is {section!r}; it must be an object"
        )
    return cast("Mapping[str, object]", section)


def _kind(section: Mapping[str, object]) -> RopeKind:
    names = {
        key: _RENAMED.get(str(section[key]), str(section[key]))
        for key in ("rope_type", "type")
        if section.get(key) is not None
    }
    if len(set(names.values())) > 1:
        raise CheckpointMismatch(
            f"config: rope type is {section['type']!r} and rope_type is {section['rope_type']!r}; "
            "remove one of them"
        )
    name = next(iter(names.values()), "default")
    if name not in get_args(RopeKind):
        raise UnsupportedModel(
            f"config: rope type {name!r} is not supported; supported are "
            f"{', '.join(get_args(RopeKind))}"
        )
    return cast("RopeKind", name)


def _read(
    config: Fields, section: Mapping[str, object], head_size: int, default_theta: float
) -> RopeSpec:
    kind = _kind(section)
    fields = Fields(section, f"config: rope type {kind!r}")
    partial = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    rotary_dim = int(head_size * partial)
    if rotary_dim % 2 or not 0 < rotary_dim <= head_size:
        raise CheckpointMismatch(
            f"config: rope rotates {rotary_dim} of {head_size} elements of a head; "
            "it must be a positive even number within the head"
        )
    max_position = config.integer("max_position_embeddings")
    original = max_position
    if kind in ("llama3", "longrope", "yarn"):
        # A value next to the rope section wins: Phi-3 writes it there.
        original = (
            config.integer("original_max_position_embeddings")
            if "original_max_position_embeddings" in config
            else fields.integer("original_max_position_embeddings")
        )
    spec = RopeSpec(
        kind=kind,
        theta=fields.number("rope_theta", default_theta),
        rotary_dim=rotary_dim,
        max_position_embeddings=max_position,
        original_max_position_embeddings=original,
        factor=_factor(fields, kind, max_position / original),
        attention_factor=fields.optional_number("attention_factor"),
        beta_fast=fields.number("beta_fast", 32.0) or 32.0,
        beta_slow=fields.number("beta_slow", 1.0) or 1.0,
        mscale=fields.optional_number("mscale"),
        mscale_all_dim=fields.optional_number("mscale_all_dim"),
        truncate=fields.flag("truncate", True),
        low_freq_factor=fields.number("low_freq_factor") if kind == "llama3" else 1.0,
        high_freq_factor=fields.number("high_freq_factor") if kind == "llama3" else 1.0,
        short_factor=fields.numbers("short_factor") if kind == "longrope" else (),
        long_factor=fields.numbers("long_factor") if kind == "longrope" else (),
    )
    for name in ("short_factor", "long_factor"):
        given = len(spec.short_factor if name == "short_factor" else spec.long_factor)
        if kind == "longrope" and given != rotary_dim // 2:
            raise CheckpointMismatch(
                f"config: rope {name} has {given} numbers; {rotary_dim // 2} are needed, "
                "half of the rotated elements of a head"
            )
    return spec


def _factor(fields: Fields, kind: RopeKind, ratio: float) -> float:
    if kind == "default":
        return 1.0
    if kind == "longrope" or (kind == "yarn" and "factor" in fields.raw):
        # Null means the ratio of the two context lengths.
        factor = fields.number("factor", ratio)
    else:
        factor = fields.number("factor")
    if factor <= 0.0:
        raise CheckpointMismatch(f"config: rope factor is {factor}; it must be positive")
    return factor
