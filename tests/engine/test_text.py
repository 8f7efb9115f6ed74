"""Tokenizer, chat template and streamed decoding on a byte-level tokenizer built here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gpuworker.engine import StreamDecoder, Tokenizer
from gpuworker.errors import (
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    InvalidRequest,
)

TEMPLATE = """{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- raise_exception('no tools here') }}
    {%- endif %}
    {{- bos_token + message.role + ': ' + message.content }}
    {% generation %}{{ '!' }}{% endgeneration %}
{%- endfor %}
{% if add_generation_prompt %}
{{ eos_token }}assistant:
{% endif %}"""
RENDERED = "<s>user: hi\n!</s>assistant:\n"
MESSAGES = [{"role": "user", "content": "hi"}]


def _save(directory: Path, config: dict[str, object]) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE({byte: index for index, byte in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _config(template: object) -> dict[str, object]:
    eos_token = {"__type": "AddedToken", "content": "</s>", "special": True}
    return {"bos_token": "<s>", "eos_token": eos_token, "chat_template": template}


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    _save(tmp_path, _config(TEMPLATE))
    return Tokenizer.from_directory(tmp_path)


def test_text_survives_encode_and_decode(tokenizer: Tokenizer) -> None:
    text = "snow \u2603 and \U0001f600"
    assert len(tokenizer.encode("\u2603")) == 3
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.vocab_size == 258


def test_special_tokens_are_left_out_of_text_unless_asked_for(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<s>a</s>")
    assert len(ids) == 3
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>a</s>"


def test_a_chat_template_is_rendered_with_the_special_tokens(tokenizer: Tokenizer) -> None:
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.decode(ids, skip_special_tokens=False) == RENDERED
    ids = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>user: hi\n!"


def test_rendering_agrees_with_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    _save(tmp_path, _config(TEMPLATE) | {"tokenizer_class": "PreTrainedTokenizerFast"})
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    expected = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert Tokenizer.from_directory(tmp_path).apply_chat_template(MESSAGES) == expected


def test_a_list_of_templates_has_a_default(tmp_path: Path) -> None:
    entries = [{"name": "other", "template": "x"}, {"name": "default", "template": TEMPLATE}]
    _save(tmp_path, _config(entries))
    ids = Tokenizer.from_directory(tmp_path).apply_chat_template(MESSAGES)
    assert Tokenizer.from_directory(tmp_path).decode(ids, skip_special_tokens=False) == RENDERED
    _save(tmp_path, _config(entries[:1]))
    with pytest.raises(CheckpointMismatch, match="other; none is called default"):
        Tokenizer.from_directory(tmp_path)


def test_a_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    _save(tmp_path, _config("not this"))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.apply_chat_template(MESSAGES)
    assert tokenizer.decode(ids, skip_special_tokens=False) == RENDERED


def test_a_template_may_refuse_messages(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="no tools here"):
        tokenizer.apply_chat_template([{"role": "tool", "content": ""}])


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
    ],
)
def test_a_template_runs_in_a_sandbox(tmp_path: Path, template: str) -> None:
    _save(tmp_path, _config(template))
    with pytest.raises(InvalidRequest, match=r"unsafe|is not safely callable"):
        Tokenizer.from_directory(tmp_path).apply_chat_template(MESSAGES)


def test_json_in_a_template_is_not_escaped_for_html(tmp_path: Path) -> None:
    _save(tmp_path, _config("{{ messages[0].content | tojson }}{{ strftime_now('%%') }}"))
    tokenizer = Tokenizer.from_directory(tmp_path)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "<\u2603>"}])
    assert tokenizer.decode(ids) == '"<\u2603>"%'


def test_a_checkpoint_without_template_still_encodes(tmp_path: Path) -> None:
    _save(tmp_path, {})
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)


def test_faulty_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match=r"tokenizer\.json does not exist"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is not a tokenizer"):
        Tokenizer.from_directory(tmp_path)
    _save(tmp_path, _config("{% if %}"))
    with pytest.raises(CheckpointMismatch, match="does not compile"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        Tokenizer.from_directory(tmp_path)


def test_a_stream_never_contains_half_a_character(tokenizer: Tokenizer) -> None:
    text = "a\u00e9\u2603\U0001f600<s>z"
    stream = StreamDecoder(tokenizer)
    parts = [stream.push([token]) for token in tokenizer.encode(text)]
    assert parts == ["a", "", "\u00e9", "", "", "\u2603", "", "", "", "\U0001f600", "", "z"]
    assert stream.flush() == ""


def test_what_remains_incomplete_is_flushed(tokenizer: Tokenizer) -> None:
    stream = StreamDecoder(tokenizer)
    assert stream.push(tokenizer.encode("ab\u2603")[:-1]) == ""
    assert stream.flush() == "ab\ufffd"
    assert stream.push(tokenizer.encode("c")) == "c"


def test_a_stream_agrees_with_decoding_at_once_for_words_with_leading_spaces(
    tmp_path: Path,
) -> None:
    words = {"\u2581one": 0, "\u2581two": 1, "s": 2}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="s"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = Tokenizer.from_directory(tmp_path)
    ids = [0, 2, 1, 2, 2, 0]
    stream = StreamDecoder(loaded)
    assert "".join(stream.push([token]) for token in ids) + stream.flush() == loaded.decode(ids)
    assert loaded.decode(ids) == "ones twoss one"
