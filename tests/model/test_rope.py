"""Rotary tables against transformers, and every spelling of a rope section."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

from gpuworker.errors import CheckpointMismatch, UnsupportedModel
from gpuworker.kernels.batch import AttentionBatch
from gpuworker.model.description import describe
from gpuworker.model.rope import RopeTable

POSITIONS = (0, 63, 4096, 32768)
SHORT = [1.0 + 0.01 * i for i in range(16)]
LONG = [1.5 + 0.9 * i for i in range(16)]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": SHORT,
    "long_factor": LONG,
    "original_max_position_embeddings": 4096,
}
SECTIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn-mscale": {**YARN, "mscale": 0.8, "mscale_all_dim": 1.1, "beta_fast": 16, "beta_slow": 2},
    "yarn-untruncated": {**YARN, "truncate": False, "attention_factor": 1.3},
    "yarn-null-factor": {**YARN, "factor": None},
    "longrope": LONGROPE,
    "longrope-factor": {**LONGROPE, "factor": 16.0},
    "longrope-attention": {**LONGROPE, "attention_factor": 1.19},
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
}


def _config(**changes: object) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32,
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 16384,
        "rope_theta": 50000.0,
        **changes,
    }


def _batch(seq_len: int) -> AttentionBatch:
    empty = torch.zeros(1, 1, dtype=torch.int32)
    return AttentionBatch((1,), (seq_len,), empty, torch.zeros(1, dtype=torch.int64), 16)


def _cos_sin(config: dict[str, Any], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    (spec,) = describe(config).ropes
    table = RopeTable(spec, 32769, torch.device("cpu"))
    rotation = table.rotation(torch.tensor([position]), _batch(position + 1), torch.float32)
    half = spec.rotary_dim // 2
    sin = torch.cat((-rotation.signed_sin[..., :half], rotation.signed_sin[..., half:]), -1)
    return rotation.cos[0, 0], sin[0, 0]


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", SECTIONS)
@pytest.mark.parametrize("position", POSITIONS)
def test_cos_and_sin_equal_transformers(kind: str, key: str, position: int) -> None:
    section = dict(SECTIONS[kind])
    config = _config(**{key: section})
    if key == "rope_parameters":
        section["rope_theta"] = config.pop("rope_theta")
    parameters = {"rope_theta": 50000.0, **SECTIONS[kind]}
    reference: Any
    if kind == "partial":
        # Llama's own code rotates the whole head whatever the config says.
        phi3 = {**_config(), "architectures": None, "pad_token_id": 0}
        reference = Phi3RotaryEmbedding(
            transformers.Phi3Config(**{**phi3, "rope_parameters": parameters})
        )
    else:
        reference = LlamaRotaryEmbedding(
            transformers.LlamaConfig(**{**_config(), "rope_parameters": parameters})
        )
    cos, sin = reference(torch.zeros(1), torch.tensor([[position]]))
    ours_cos, ours_sin = _cos_sin(config, position)
    torch.testing.assert_close(ours_cos, cos[0, 0], rtol=0, atol=1e-5)
    torch.testing.assert_close(ours_sin, sin[0, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn", "longrope", "default"])
def test_type_and_rope_type_mean_the_same(kind: str) -> None:
    new = dict(SECTIONS[kind])
    old = {**new, "type": kind}
    del old["rope_type"]
    both = {**new, "type": kind}
    specs = [describe(_config(rope_scaling=section)).ropes for section in (new, old, both)]
    assert specs[0] == specs[1] == specs[2]


def test_null_and_missing_scaling_are_the_default() -> None:
    assert describe(_config(rope_scaling=None)).ropes == describe(_config()).ropes
    (spec,) = describe(_config()).ropes
    assert (spec.kind, spec.theta) == ("default", 50000.0)


def test_su_is_longrope() -> None:
    section = {**LONGROPE, "type": "su"}
    del section["rope_type"]
    assert describe(_config(rope_scaling=section)).ropes[0].kind == "longrope"


def test_original_length_beside_the_section_is_used() -> None:
    section = {k: v for k, v in YARN.items() if not k.startswith("original")}
    config = _config(rope_scaling=section, original_max_position_embeddings=2048)
    assert describe(config).ropes[0].original_max_position_embeddings == 2048


def test_conflicting_types_are_refused() -> None:
    with pytest.raises(CheckpointMismatch, match=r"'linear'.*'yarn'"):
        describe(_config(rope_scaling={**YARN, "type": "linear"}))


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_unknown_kind_is_refused_by_name(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"'foo'.*yarn"):
        describe(_config(rope_scaling={key: "foo", "factor": 2.0}))


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("linear", "factor"),
        ("dynamic", "factor"),
        ("yarn", "factor"),
        ("yarn", "original_max_position_embeddings"),
        ("llama3", "factor"),
        ("llama3", "low_freq_factor"),
        ("llama3", "high_freq_factor"),
        ("llama3", "original_max_position_embeddings"),
        ("longrope", "short_factor"),
        ("longrope", "long_factor"),
    ],
)
def test_missing_required_field_is_refused_by_name(kind: str, field: str) -> None:
    section = {k: v for k, v in SECTIONS[kind].items() if k != field}
    with pytest.raises(CheckpointMismatch, match=field):
        describe(_config(rope_scaling=section))


@pytest.mark.parametrize(
    "change", [{"factor": "two"}, {"factor": -1.0}, {"partial_rotary_factor": 1.5}]
)
def test_malformed_field_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointMismatch):
        describe(_config(rope_scaling={**SECTIONS["linear"], **change}))


def test_wrong_number_of_longrope_factors_is_refused() -> None:
    with pytest.raises(CheckpointMismatch, match="short_factor has 3"):
        describe(_config(rope_scaling={**LONGROPE, "short_factor": [1.0, 1.0, 1.0]}))


def test_each_layer_type_has_its_own_rope() -> None:
    sections = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }
    config = _config(
        architectures=["Gemma3ForCausalLM"],
        head_dim=32,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=sections,
    )
    old = _config(
        architectures=["Gemma3ForCausalLM"],
        head_dim=32,
        sliding_window_pattern=2,
        rope_theta=1e6,
        rope_local_base_freq=1e4,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    del config["rope_theta"]
    description = describe(config)
    by_layer = [
        description.ropes[layer.rope] for layer in description.layers if layer.rope is not None
    ]
    assert [(spec.kind, spec.theta) for spec in by_layer] == [("default", 1e4), ("linear", 1e6)]
    assert describe(old).ropes == description.ropes


def test_dynamic_uses_each_requests_own_length() -> None:
    (spec,) = describe(_config(rope_scaling=SECTIONS["dynamic"])).ropes
    table = RopeTable(spec, 20001, torch.device("cpu"))
    positions = torch.tensor([100, 100])
    batch = AttentionBatch(
        (1, 1), (101, 20000), torch.zeros(2, 1, dtype=torch.int32), positions, 16
    )
    together = table.cos_sin(positions, batch)
    assert not torch.equal(together[0], together[1])
    assert torch.equal(together[0], table.cos_sin(positions[:1], _batch(101))[0])
    assert torch.equal(together[1], table.cos_sin(positions[:1], _batch(20000))[0])
