"""Layer 5. Turns a GGUF file of a Llama model into a Hugging Face model directory.

Only what the demo model needs is understood: the llama architecture without rope scaling, and
byte-level BPE with the pre-tokenizers of _PRE_TOKENIZERS. Everything else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from gpuworker.errors import CheckpointMismatch, UnsupportedModel

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

__all__ = [
    "byte_level_tokenizer",
    "convert_gguf_llama",
    "tokenizer_config",
    "write_json",
    "write_safetensors",
]

_CONTROL, _USER_DEFINED = 3, 4
"""GGUF token types that are matched in the text before anything is split."""
_PRE_TOKENIZERS = {"smollm": True, "gpt-2": False}
"""Names in GGUF, and whether each digit stands alone."""
_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


def convert_gguf_llama(
    gguf_path: Path, directory: Path, on_progress: Callable[[str], None] | None = None
) -> None:
    """Write config, bfloat16 weights, tokenizer and generation config into a directory.

    Quantised tensors are dequantised to float32 and rounded once to bfloat16. A file without an
    output tensor is a tied model. Raises UnsupportedModel for what is not understood and
    CheckpointMismatch for a missing key; the directory's contents are undefined then.
    """
    from gguf import GGUFReader

    metadata = _Metadata(GGUFReader(gguf_path))
    config = _config(metadata)
    tokenizer = _tokenizer(metadata)
    if on_progress is not None:
        on_progress(f"converting {len(metadata.reader.tensors)} tensors to bfloat16")
    tensors = _tensors(metadata, num_heads=metadata.integer("llama.attention.head_count"))
    write_safetensors(tensors, directory / "model.safetensors")
    tokenizer.save(str(directory / "tokenizer.json"))
    tokens = metadata.strings("tokenizer.ggml.tokens")
    bos = metadata.integer("tokenizer.ggml.bos_token_id")
    eos = metadata.integer("tokenizer.ggml.eos_token_id")
    write_json(directory / "config.json", config)
    write_json(
        directory / "generation_config.json",
        {"bos_token_id": bos, "eos_token_id": eos},
    )
    write_json(
        directory / "tokenizer_config.json",
        tokenizer_config(
            chat_template=metadata.string("tokenizer.chat_template"),
            bos_token=tokens[bos],
            eos_token=tokens[eos],
            max_length=metadata.integer("llama.context_length"),
        ),
    )


def byte_level_tokenizer(
    vocab: Mapping[str, int],
    merges: list[tuple[str, str]],
    special_tokens: list[str],
    *,
    split_digits: bool,
) -> Tokenizer:
    """Build a byte-level BPE tokenizer that adds nothing of its own to a text.

    special_tokens are matched verbatim before the text is split; split_digits makes every digit
    a piece of its own before GPT-2's expression cuts the rest.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=dict(vocab), merges=merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        if split_digits
        else byte_level
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in special_tokens]
    )
    return tokenizer


def tokenizer_config(
    *, chat_template: str, bos_token: str, eos_token: str, max_length: int
) -> dict[str, object]:
    """Return the contents of tokenizer_config.json for a tokenizer that adds no tokens."""
    return {
        "add_bos_token": False,
        "add_prefix_space": False,
        "bos_token": bos_token,
        "chat_template": chat_template,
        "clean_up_tokenization_spaces": False,
        "eos_token": eos_token,
        "model_max_length": max_length,
        "pad_token": eos_token,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def write_json(path: Path, value: dict[str, object]) -> None:
    """Write one of a model directory's JSON files."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write a weight file that others may read, as they may the JSON files beside it."""
    # The library creates its file for the owner alone.
    path.touch()
    mode = path.stat().st_mode
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(mode)


class _Metadata:
    """Typed look-ups in the key-value section."""

    def __init__(self, reader: GGUFReader) -> None:
        self.reader = reader
        self._path = reader.data.filename

    def _get(self, key: str, kind: type | tuple[type, ...]) -> object:
        field = self.reader.fields.get(key)
        value = None if field is None else field.contents()
        if not isinstance(value, kind):
            raise CheckpointMismatch(
                f"{self._path}: key {key} is {value!r:.60}; the conversion needs it"
            )
        return value

    def integer(self, key: str) -> int:
        value = self._get(key, int)
        assert isinstance(value, int)
        return value

    def number(self, key: str) -> float:
        value = self._get(key, (int, float))
        assert isinstance(value, (int, float))
        # A float32 constant such as 1e-5 reads as 9.99999974e-06; give back its short form.
        return float(f"{value:.7g}")

    def string(self, key: str) -> str:
        value = self._get(key, str)
        assert isinstance(value, str)
        return value

    def strings(self, key: str) -> list[str]:
        value = self._get(key, list)
        assert isinstance(value, list)
        return value

    def integers(self, key: str) -> list[int]:
        value = self._get(key, list)
        assert isinstance(value, list)
        return value

    def has(self, key: str) -> bool:
        return key in self.reader.fields


def _config(metadata: _Metadata) -> dict[str, object]:
    architecture = metadata.string("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"GGUF architecture {architecture!r}; only 'llama' is converted")
    scaling = [key for key in metadata.reader.fields if key.startswith("llama.rope.scaling.")]
    if scaling:
        raise UnsupportedModel(f"GGUF keys {', '.join(scaling)}; rope scaling is not converted")
    hidden_size = metadata.integer("llama.embedding_length")
    num_heads = metadata.integer("llama.attention.head_count")
    names = {tensor.name for tensor in metadata.reader.tensors}
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "bos_token_id": metadata.integer("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.integer("tokenizer.ggml.eos_token_id"),
        "head_dim": hidden_size // num_heads,
        "hidden_act": "silu",
        "hidden_size": hidden_size,
        "intermediate_size": metadata.integer("llama.feed_forward_length"),
        "max_position_embeddings": metadata.integer("llama.context_length"),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": num_heads,
        "num_hidden_layers": metadata.integer("llama.block_count"),
        "num_key_value_heads": metadata.integer("llama.attention.head_count_kv"),
        "rms_norm_eps": metadata.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number("llama.rope.freq_base"),
        "tie_word_embeddings": "output.weight" not in names,
        "torch_dtype": "bfloat16",
        "vocab_size": len(metadata.strings("tokenizer.ggml.tokens")),
    }


def _tensors(metadata: _Metadata, *, num_heads: int) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    num_kv_heads = metadata.integer("llama.attention.head_count_kv")
    tensors: dict[str, torch.Tensor] = {}
    for entry in metadata.reader.tensors:
        # A copy: the reader's arrays are views of a read-only file mapping.
        values = torch.from_numpy(dequantize(entry.data, entry.tensor_type).copy())
        values = values.reshape([int(extent) for extent in reversed(entry.shape)])
        if entry.name.endswith(".attn_q.weight"):
            values = _undo_rope_permutation(values, num_heads)
        elif entry.name.endswith(".attn_k.weight"):
            values = _undo_rope_permutation(values, num_kv_heads)
        tensors[_hugging_face_name(entry.name)] = values.to(torch.bfloat16).contiguous()
    return tensors


def _undo_rope_permutation(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return [rows, columns] with each head's halves one after the other again.

    GGUF interleaves the rows of a head (0, d/2, 1, d/2+1, ...), because its rope rotates
    neighbours; Hugging Face rotates row i with row i + d/2.
    """
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def _hugging_face_name(name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    prefix, _, rest = name.partition(".")
    layer, _, part = rest.partition(".")
    if prefix != "blk" or part not in _LAYER_TENSORS:
        raise UnsupportedModel(f"GGUF tensor {name} has no place in a Llama checkpoint")
    return f"model.layers.{layer}.{_LAYER_TENSORS[part]}"


def _tokenizer(metadata: _Metadata) -> Tokenizer:
    model = metadata.string("tokenizer.ggml.model")
    split = metadata.string("tokenizer.ggml.pre")
    if model != "gpt2" or split not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"GGUF tokenizer {model!r} with pre-tokenizer {split!r}; converted are 'gpt2' with "
            f"{', '.join(map(repr, _PRE_TOKENIZERS))}"
        )
    if metadata.has("tokenizer.ggml.add_bos_token"):
        adds_bos = metadata.reader.fields["tokenizer.ggml.add_bos_token"].contents()
        if adds_bos:
            raise UnsupportedModel("GGUF tokenizer adds a BOS token; that is not converted")
    tokens = metadata.strings("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    merges = [tuple(pair.split(" ", 1)) for pair in metadata.strings("tokenizer.ggml.merges")]
    return byte_level_tokenizer(
        {token: index for index, token in enumerate(tokens)},
        [(left, right) for left, right in merges],
        [
            token
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ],
        split_digits=_PRE_TOKENIZERS[split],
    )
