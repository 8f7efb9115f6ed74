"""Layer 5. Text in and out: the checkpoint's tokenizer, its chat template, streamed decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuworker.errors import CheckpointError, CheckpointNotFound, ConfigError, InvalidRequest

if TYPE_CHECKING:
    import tokenizers

    from gpuworker.engine.chat import ChatTemplate, Message

__all__ = ["StreamDecoder", "Tokenizer"]

_EXTRA = "install the extra gpuworker[text]"


class Tokenizer:
    """The tokenizer of a checkpoint; text in, token ids out, and back."""

    def __init__(
        self, tokenizer: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._chat_template = chat_template

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """Read tokenizer.json and the chat template, if there is one.

        Raises CheckpointNotFound without tokenizer.json, CheckpointError when a file is not
        what it should be, ConfigError when tokenizers or jinja2 is not installed.
        """
        try:
            import tokenizers

            from gpuworker.engine.chat import ChatTemplate, read_json
        except ModuleNotFoundError as error:
            raise ConfigError(f"text needs the package {error.name}; {_EXTRA}") from error
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise CheckpointNotFound(
                f"{file} does not exist; save the tokenizer in its fast (JSON) form beside the "
                "weights"
            )
        data = file.read_bytes()
        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except ValueError as error:
            raise CheckpointError(f"{file} is not a tokenizer: {error}") from error
        config_path = directory / "tokenizer_config.json"
        config = read_json(config_path) if config_path.is_file() else {}
        return cls(tokenizer, ChatTemplate.from_directory(directory, config))

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def has_chat_template(self) -> bool:
        """Whether apply_chat_template can work."""
        return self._chat_template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def apply_chat_template(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return the prompt for a conversation; the template writes the special tokens itself.

        Raises InvalidRequest when the checkpoint has no template, or when it refuses.
        """
        if self._chat_template is None:
            raise InvalidRequest("the checkpoint has no chat template; encode plain text instead")
        text = self._chat_template.render(messages, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)


class StreamDecoder:
    """Turns tokens into text as they come, and never emits half a character.

    A token may hold part of a character's bytes, and may decode differently behind another
    one (a leading space). So the last emitted tokens are decoded again together with the new
    ones, and what is new in the text is emitted once it no longer ends in U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._emitted: list[int] = []  # tokens of the last text, for their effect on the next
        self._pending: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        """Add tokens and return the text that is complete by now, possibly none."""
        self._pending += token_ids
        return self._take(final=False)

    def flush(self) -> str:
        """Return what is left, with U+FFFD for incomplete characters."""
        return self._take(final=True)

    def _take(self, *, final: bool) -> str:
        before = self._decode(self._emitted)
        text = self._decode(self._emitted + self._pending)
        if not final and (len(text) <= len(before) or text.endswith("\ufffd")):
            return ""
        self._emitted, self._pending = self._pending or self._emitted, []
        return text[len(before) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
