"""Layer 1. Which parameters a described model has and which checkpoint tensors fill them.

Projections that read the same input are merged: q, k and v; gate and up; all experts of a
layer. Checkpoints may hold them apart, merged (Phi-3), or with experts stacked, so each
parameter lists all those forms.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch

from gpuworker.model.description import ModelDescription, MoeSpec
from gpuworker.model.parameters import ParameterSpec, Source

__all__ = ["is_ignorable", "parameter_specs"]

_Shape = tuple[int, ...]
# A checkpoint tensor below the prefix, its shape, and where its elements go: the offset along
# the first axis, or the expert and the offset along the second.
_Part = tuple[str, _Shape, tuple[int, ...]]


def parameter_specs(description: ModelDescription, dtype: torch.dtype) -> tuple[ParameterSpec, ...]:
    """List the parameters in the order in which a forward pass uses them."""
    return tuple(_Manifest(description, dtype).specs())


def is_ignorable(description: ModelDescription, name: str) -> bool:
    """Say whether a checkpoint tensor is known and not needed.

    These are rotary buffers that old checkpoints carry, the head of a model whose head is its
    embedding, and parts of multimodal models that are not run.
    """
    if name.endswith((".rotary_emb.inv_freq", ".rotary_emb.cos_cached", ".rotary_emb.sin_cached")):
        return True
    if description.tie_word_embeddings and name in _head_names(description):
        return True
    return name.startswith(description.ignored_prefixes) if description.ignored_prefixes else False


def _head_names(description: ModelDescription) -> tuple[str, ...]:
    # lm_head is a sibling of the model, so "language_model.model." gives "language_model.".
    prefixes = (prefix.removesuffix("model.") for prefix in description.checkpoint_prefixes)
    return tuple(dict.fromkeys(f"{prefix}lm_head.weight" for prefix in ("", *prefixes)))


class _Manifest:
    """Builds the specs of one model."""

    def __init__(self, description: ModelDescription, dtype: torch.dtype) -> None:
        self._d = description
        self._dtype = dtype

    def specs(self) -> Iterator[ParameterSpec]:
        d = self._d
        yield self._plain("embed.weight", (d.vocab_size, d.hidden_size), "embed_tokens.weight")
        for index in range(d.num_layers):
            yield from self._layer(index)
        yield self._plain("norm.weight", (d.hidden_size,), "norm.weight")
        if not d.tie_word_embeddings:
            shape = (d.vocab_size, d.hidden_size)
            variants = tuple((_source(name, shape, shape, (0, 0)),) for name in _head_names(d))
            yield ParameterSpec("lm_head.weight", shape, self._dtype, variants)

    def _layer(self, index: int) -> Iterator[ParameterSpec]:
        d = self._d
        ours, theirs = f"layers.{index}.", f"layers.{index}."
        hidden = (d.hidden_size,)
        q_size, kv_size = d.num_attention_heads * d.head_size, d.num_kv_heads * d.head_size
        if d.norm_position != "post":
            yield self._plain(f"{ours}input_norm.weight", hidden, f"{theirs}input_layernorm.weight")
        yield from self._merged(
            f"{ours}attention.qkv",
            [
                [
                    (f"{theirs}self_attn.q_proj", q_size),
                    (f"{theirs}self_attn.k_proj", kv_size),
                    (f"{theirs}self_attn.v_proj", kv_size),
                ],
                [(f"{theirs}self_attn.qkv_proj", q_size + 2 * kv_size)],
            ],
            d.qkv_bias,
        )
        if d.qk_norm != "none":
            full = d.qk_norm == "full"
            for name, size in (("q_norm", q_size), ("k_norm", kv_size)):
                shape = (size if full else d.head_size,)
                yield self._plain(
                    f"{ours}attention.{name}.weight", shape, f"{theirs}self_attn.{name}.weight"
                )
        yield from self._linear(f"{ours}attention.o", q_size, f"{theirs}self_attn.o_proj", d.o_bias)
        if d.norm_position != "pre":
            yield self._plain(
                f"{ours}attention_output_norm.weight",
                hidden,
                f"{theirs}post_attention_layernorm.weight",
            )
        if d.norm_position != "post":
            name = (
                "post_attention_layernorm"
                if d.norm_position == "pre"
                else "pre_feedforward_layernorm"
            )
            yield self._plain(f"{ours}mlp_norm.weight", hidden, f"{theirs}{name}.weight")
        moe = d.layers[index].moe
        if moe is None:
            yield from self._mlp(f"{ours}mlp.", f"{theirs}mlp.", d.intermediate_size, d.mlp_bias)
        else:
            yield from self._moe(f"{ours}moe.", theirs, moe)
        if d.norm_position != "pre":
            yield self._plain(
                f"{ours}mlp_output_norm.weight",
                hidden,
                f"{theirs}post_feedforward_layernorm.weight",
            )

    def _mlp(self, ours: str, theirs: str, size: int, bias: bool) -> Iterator[ParameterSpec]:
        forms = [
            [(f"{theirs}gate_proj", size), (f"{theirs}up_proj", size)],
            [(f"{theirs}gate_up_proj", 2 * size)],
        ]
        yield from self._merged(f"{ours}gate_up", forms, bias)
        yield from self._linear(f"{ours}down", size, f"{theirs}down_proj", bias)

    def _moe(self, ours: str, theirs: str, moe: MoeSpec) -> Iterator[ParameterSpec]:
        hidden, size, num = self._d.hidden_size, moe.intermediate_size, moe.num_experts
        blocks = (f"{theirs}mlp.", f"{theirs}block_sparse_moe.")
        shape: _Shape = (num, hidden)
        yield self._spec(
            f"{ours}router.weight", shape, [[(f"{b}gate.weight", shape, (0, 0))] for b in blocks]
        )
        qwen, mixtral = (f"{b}experts." for b in blocks)
        shape = (num, 2 * size, hidden)
        stacked: list[list[_Part]] = [
            [(f"{b}experts.gate_up_proj", shape, (0, 0, 0))] for b in blocks
        ]
        apart: list[list[_Part]] = [
            [
                (f"{prefix}{expert}.{name}.weight", (size, hidden), (expert, offset, 0))
                for expert in range(num)
                for name, offset in zip(names, (0, size), strict=True)
            ]
            for prefix, names in ((qwen, ("gate_proj", "up_proj")), (mixtral, ("w1", "w3")))
        ]
        yield self._spec(f"{ours}gate_up.weight", shape, apart + stacked)
        shape = (num, hidden, size)
        stacked = [[(f"{b}experts.down_proj", shape, (0, 0, 0))] for b in blocks]
        apart = [
            [
                (f"{prefix}{expert}.{name}.weight", (hidden, size), (expert, 0, 0))
                for expert in range(num)
            ]
            for prefix, name in ((qwen, "down_proj"), (mixtral, "w2"))
        ]
        yield self._spec(f"{ours}down.weight", shape, apart + stacked)
        if moe.shared_intermediate_size:
            shared = f"{theirs}mlp.shared_expert"
            yield self._plain(f"{ours}shared.gate.weight", (1, hidden), f"{shared}_gate.weight")
            yield from self._mlp(
                f"{ours}shared.", f"{shared}.", moe.shared_intermediate_size, False
            )

    def _plain(self, name: str, shape: _Shape, source: str) -> ParameterSpec:
        return self._spec(name, shape, [[(source, shape, (0,) * len(shape))]])

    def _linear(self, name: str, in_size: int, source: str, bias: bool) -> Iterator[ParameterSpec]:
        hidden = self._d.hidden_size
        yield self._plain(f"{name}.weight", (hidden, in_size), f"{source}.weight")
        if bias:
            yield self._plain(f"{name}.bias", (hidden,), f"{source}.bias")

    def _merged(
        self, name: str, forms: Sequence[Sequence[tuple[str, int]]], bias: bool
    ) -> Iterator[ParameterSpec]:
        """Merge projections of the hidden state: each form names them with their output sizes."""
        for kind, tail in (("weight", (self._d.hidden_size,)), ("bias", ())):
            if kind == "bias" and not bias:
                continue
            parts: list[list[_Part]] = []
            for form in forms:
                offsets = itertools.accumulate((size for _, size in form), initial=0)
                parts.append(
                    [
                        (f"{source}.{kind}", (size, *tail), (offset, *(0 for _ in tail)))
                        for (source, size), offset in zip(form, offsets, strict=False)
                    ]
                )
            total = sum(size for _, size in forms[0])
            yield self._spec(f"{name}.{kind}", (total, *tail), parts)

    def _spec(self, name: str, shape: _Shape, forms: Sequence[Sequence[_Part]]) -> ParameterSpec:
        variants = tuple(
            tuple(_source(prefix + source, part, shape, offsets) for source, part, offsets in form)
            for prefix in self._d.checkpoint_prefixes
            for form in forms
        )
        return ParameterSpec(name, shape, self._dtype, variants)


def _source(name: str, part: _Shape, shape: _Shape, offsets: tuple[int, ...]) -> Source:
    extents = (1,) * (len(shape) - len(part)) + part
    target = tuple(
        (offset, offset + extent) for offset, extent in zip(offsets, extents, strict=True)
    )
    return Source(name, part, tuple((0, extent) for extent in part), target)
