"""What describe reads from a config, and what the manifest makes of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors import safe_open

import tiny_models
from gpuworker.errors import CheckpointMismatch, UnsupportedModel
from gpuworker.model.description import describe
from gpuworker.model.families import FAMILIES
from gpuworker.model.manifest import is_ignorable, parameter_specs

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def _describe(architecture: str = "Llama", **changes: object) -> Any:
    return describe({**BASE, "architectures": [f"{architecture}ForCausalLM"], **changes})


def _windows(description: Any) -> list[int | None]:
    return [layer.sliding_window for layer in description.layers]


def test_unknown_architecture_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        _describe("Mamba")
    assert "MambaForCausalLM" in caught.value.message
    assert all(name in caught.value.message for name in FAMILIES)


def test_model_type_serves_where_architectures_is_missing() -> None:
    config = {**BASE, "model_type": "qwen3"}
    del config["architectures"]
    assert describe(config).architecture == "Qwen3ForCausalLM"
    with pytest.raises(UnsupportedModel, match="'t5'"):
        describe({**config, "model_type": "t5"})


def test_unknown_activation_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match=r"'mish'.*silu"):
        _describe(hidden_act="mish")


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers"])
def test_missing_field_is_refused_by_name(field: str) -> None:
    config = {k: v for k, v in BASE.items() if k != field}
    with pytest.raises(CheckpointMismatch, match=field):
        describe(config)


@pytest.mark.parametrize(
    "change",
    [
        {"num_key_value_heads": 3},
        {"hidden_size": 66},
        {"hidden_size": "64"},
        {"vocab_size": 0},
        {"eos_token_id": ["a"]},
    ],
)
def test_contradictory_or_malformed_fields_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CheckpointMismatch):
        _describe(**change)


def test_bidirectional_attention_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="bidirectional"):
        _describe("Gemma", use_bidirectional_attention=True)


@pytest.mark.parametrize(
    ("architecture", "tied"),
    [("Llama", False), ("Qwen2", False), ("Gemma", True), ("Gemma2", True), ("SmolLM3", True)],
)
def test_missing_tie_flag_takes_the_architectures_default(architecture: str, tied: bool) -> None:
    assert _describe(architecture).tie_word_embeddings is tied
    assert _describe(architecture, tie_word_embeddings=not tied).tie_word_embeddings is not tied


@pytest.mark.parametrize(("given", "expected"), [(2, (2,)), ([1, 106], (1, 106)), (None, (2,))])
def test_eos_token_ids(given: object, expected: tuple[int, ...]) -> None:
    assert _describe(eos_token_id=given).eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "float16"}, "float16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({}, None),
    ],
)
def test_dtype_name(fields: dict[str, object], expected: str | None) -> None:
    assert _describe(**fields).dtype_name == expected


def test_sliding_windows_per_layer() -> None:
    assert _windows(_describe("Mistral", sliding_window=8)) == [8] * 4
    assert _windows(_describe("Mistral")) == [4096] * 4
    assert _windows(_describe("Mistral", sliding_window=None)) == [None] * 4
    assert _windows(_describe("Llama", sliding_window=8)) == [None] * 4
    qwen = {"sliding_window": 8, "max_window_layers": 3}
    assert _windows(_describe("Qwen2", **qwen)) == [None] * 4
    assert _windows(_describe("Qwen2", use_sliding_window=True, **qwen)) == [None] * 3 + [8]
    assert _windows(_describe("Gemma2", sliding_window=8)) == [8, None, 8, None]
    assert _windows(_describe("Olmo3", sliding_window=8)) == [8, 8, 8, None]
    types = ["full_attention", "sliding_attention"] * 2
    assert _windows(_describe("Gemma2", sliding_window=8, layer_types=types)) == [None, 8] * 2
    with pytest.raises(UnsupportedModel, match="linear_attention"):
        _describe("Gemma2", layer_types=["linear_attention"] * 4)


def test_layers_without_rope() -> None:
    assert [layer.rope for layer in _describe("SmolLM3").layers] == [0, 0, 0, None]
    layers = _describe("SmolLM3", no_rope_layers=[0, 1, 1, 0]).layers
    assert [layer.rope for layer in layers] == [None, 0, 0, None]


def test_a_null_soft_cap_is_off() -> None:
    assert _describe("Gemma2").attention_softcap == 50.0
    assert _describe("Gemma2", attn_logit_softcapping=None).attention_softcap is None


def test_sparse_and_dense_layers() -> None:
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    layers = _describe("Qwen3Moe", decoder_sparse_step=2, mlp_only_layers=[3], **moe).layers
    assert [layer.moe is not None for layer in layers] == [False, True, False, False]
    with pytest.raises(CheckpointMismatch, match="num_experts_per_tok"):
        _describe("Qwen3Moe", **{**moe, "num_experts_per_tok": 5})


def test_text_part_of_a_multimodal_config() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 64, "num_hidden_layers": 6}
    description = describe(
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "text_config": {**text, "intermediate_size": 128, "sliding_window": 32},
            "vision_config": {"hidden_size": 1152},
            "eos_token_id": [1, 106],
            "torch_dtype": "bfloat16",
        }
    )
    assert (description.hidden_size, description.head_size) == (64, 256)
    assert _windows(description) == [32] * 5 + [None]
    assert description.eos_token_ids == (1, 106)
    assert is_ignorable(description, "vision_tower.blocks.0.weight")
    specs = parameter_specs(description, torch.float32)
    names = {s.name for p in specs for variant in p.variants for s in variant}
    assert "language_model.model.layers.0.self_attn.q_proj.weight" in names


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_sources_tile_every_parameter_exactly(name: str) -> None:
    for spec in parameter_specs(describe(tiny_models.config_dict(name)), torch.float32):
        for variant in spec.variants:
            covered = torch.zeros(spec.shape, dtype=torch.int8)
            for source in variant:
                covered[tuple(slice(*interval) for interval in source.target)] += 1
                extents = [b - a for a, b in source.source]
                assert [b - a for a, b in source.target][-len(extents) :] == extents
                assert torch.Size(extents).numel() == torch.Size(source.shape).numel()
            assert bool((covered == 1).all()), (spec.name, variant[0].name)


@pytest.mark.parametrize("name", tiny_models.MODELS)
def test_one_variant_fits_what_transformers_writes(name: str) -> None:
    description = describe(tiny_models.config_dict(name))
    with safe_open(tiny_models.checkpoint(name) / "model.safetensors", "pt") as file:
        shapes = {k: tuple(file.get_slice(k).get_shape()) for k in file.keys()}  # noqa: SIM118
    needed: set[str] = set()
    for spec in parameter_specs(description, torch.float32):
        present = [v for v in spec.variants if all(s.name in shapes for s in v)]
        assert len(present) == 1, spec.name
        assert all(shapes[s.name] == s.shape for s in present[0])
        needed.update(s.name for s in present[0])
    assert needed == set(shapes)


def test_fused_and_stacked_forms_are_accepted() -> None:
    description = describe(tiny_models.config_dict("mixtral"))
    specs = {s.name: s for s in parameter_specs(description, torch.float32)}
    names = [[s.name for s in v] for v in specs["layers.0.moe.gate_up.weight"].variants]
    assert ["model.layers.0.mlp.experts.gate_up_proj"] in names
    names = [[s.name for s in v] for v in specs["layers.0.attention.qkv.weight"].variants]
    assert ["layers.0.self_attn.qkv_proj.weight"] in names


def test_head_of_a_tied_model_is_ignorable_only_there() -> None:
    tied = describe(tiny_models.config_dict("llama-tied"))
    untied = describe(tiny_models.config_dict("llama"))
    assert is_ignorable(tied, "lm_head.weight")
    assert not is_ignorable(untied, "lm_head.weight")
    assert is_ignorable(untied, "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert not is_ignorable(tied, "model.layers.0.self_attn.rope.weight")
    assert "lm_head.weight" not in {s.name for s in parameter_specs(tied, torch.float32)}
    assert "lm_head.weight" in {s.name for s in parameter_specs(untied, torch.float32)}


def test_descriptions_are_stable_through_json() -> None:
    config = tiny_models.config_dict("gemma3")
    assert describe(config) == describe(json.loads(json.dumps(config)))
