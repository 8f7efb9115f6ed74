"""Layer 5. Chat templates, rendered as transformers renders them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from gpuworker.errors import CheckpointError, CheckpointMismatch, InvalidRequest

__all__ = ["ChatTemplate", "Message", "read_json"]

Message = Mapping[str, object]
"""role and content, and whatever else the template reads."""


class _GenerationTag(jinja2.ext.Extension):
    """Let {% generation %} blocks through; they only mark what an assistant said."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Turns messages into the text that the model was trained to continue.

    The template comes with the checkpoint, so it runs in jinja's immutable sandbox.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        """Compile; variables are the special tokens. Raises CheckpointMismatch on bad syntax."""
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise CheckpointMismatch(f"the chat template does not compile: {error}") from error
        self._variables = dict(variables)

    @classmethod
    def from_directory(cls, directory: Path, config: Mapping[str, object]) -> ChatTemplate | None:
        """Find the template of a checkpoint, given its tokenizer_config.json; None without one.

        chat_template.jinja wins over the key chat_template, which is a string or a list of
        named ones, of which "default" is taken.
        """
        path = directory / "chat_template.jinja"
        source = path.read_text("utf-8") if path.is_file() else config.get("chat_template")
        if isinstance(source, Sequence) and not isinstance(source, str):
            named = {entry["name"]: entry["template"] for entry in source}
            if "default" not in named:
                raise CheckpointMismatch(
                    f"{directory}: the chat templates are {', '.join(sorted(named))}; "
                    "none is called default"
                )
            source = named["default"]
        if source is None:
            return None
        if not isinstance(source, str):
            raise CheckpointMismatch(f"{directory}: chat_template is neither text nor a list")
        return cls(source, _special_tokens(config))

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        """Render; raises InvalidRequest when the template refuses the messages."""
        try:
            return self._template.render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequest(f"the chat template refuses the messages: {error}") from error


def read_json(path: Path) -> dict[str, object]:
    """Read a JSON object of a checkpoint; raises CheckpointError that names the file."""
    try:
        data: object = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(data, dict):
        raise CheckpointMismatch(f"{path} holds no JSON object")
    return data


def _special_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Collect bos_token, eos_token, ...: plain strings or objects with their content."""
    tokens: dict[str, str] = {}
    for key, value in config.items():
        if not key.endswith("_token"):
            continue
        content = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(content, str):
            tokens[key] = content
    return tokens


def _to_json(value: object, indent: int | None = None) -> str:
    # Unlike jinja's own filter it escapes nothing for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
