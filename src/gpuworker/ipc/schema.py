"""Layer 0. The messages as a document: JSON schema and Markdown, from the one table."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, get_type_hints

import msgspec

from gpuworker.events import EVENTS
from gpuworker.ipc.wire import EventHeader, ReplyHeader, RequestHeader
from gpuworker.messages import (
    REPLY_OF,
    REQUESTS,
    Failure,
    PeerHealth,
    SessionHealth,
    message_tag,
)
from gpuworker.replies import KVLayerSpec, MemoryUse
from gpuworker.step import Logprobs, NewRequest, Refusal, SamplingParams

__all__ = ["json_schema", "message_reference"]

_PARTS: tuple[type[msgspec.Struct], ...] = (
    NewRequest,
    SamplingParams,
    Refusal,
    Logprobs,
    KVLayerSpec,
    MemoryUse,
    SessionHealth,
    PeerHealth,
)


def json_schema() -> dict[str, Any]:
    """Return a JSON schema of every message: an array, its tag first, then its fields in order.

    Events and the arrays of the headers, too. Buffers are base64 text in JSON and binary in
    msgpack.
    """
    headers = {"request": RequestHeader, "reply": ReplyHeader, "event": EventHeader}
    types = [*REQUESTS, *REPLY_OF.values(), Failure, *EVENTS, *headers.values()]
    references, definitions = msgspec.json.schema_components(types, ref_template="#/$defs/{name}")
    by_type = dict(zip(types, references, strict=True))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "gpuworker messages",
        "oneOf": [by_type[request] for request in REQUESTS],
        "x-replies": {
            message_tag(request.__name__): [by_type[reply], by_type[Failure]]
            for request, reply in REPLY_OF.items()
        },
        "x-events": {message_tag(event.__name__): by_type[event] for event in EVENTS},
        "x-headers": {name: by_type[header] for name, header in headers.items()},
        "$defs": dict(sorted(definitions.items())),
    }


def message_reference() -> str:
    """Return the reference of all messages as Markdown: each request, its reply, their fields."""
    lines = [
        "# Messages",
        "",
        "Generated from the table of requests; `make docs` renews it. On the wire a message is a",
        "msgpack array: its tag, then its fields in this order. `Failure` may answer any request.",
        "",
        "| request | reply |",
        "|---|---|",
    ]
    lines += [
        f"| [`{message_tag(request.__name__)}`](#{message_tag(request.__name__)}) "
        f"| [`{message_tag(reply.__name__)}`](#{message_tag(reply.__name__)}) |"
        for request, reply in REPLY_OF.items()
    ]
    for request, reply in REPLY_OF.items():
        lines += _section(request, message_tag(request.__name__))
        lines += _section(reply, message_tag(reply.__name__))
    lines += _section(Failure, message_tag(Failure.__name__))
    lines += ["", "# Parts of messages"]
    for part in _PARTS:
        lines += _section(part, part.__name__)
    return "\n".join(lines) + "\n"


def _section(cls: type[msgspec.Struct], title: str) -> Iterator[str]:
    yield from ("", f"## {title}", "", inspect.cleandoc(cls.__doc__ or ""))
    fields = msgspec.structs.fields(cls)
    if not fields:
        return
    docs = dict(_field_docs(cls))
    hints = get_type_hints(cls)
    yield from ("", "| field | type | default | meaning |", "|---|---|---|---|")
    for field in fields:
        default = "" if field.required else f"`{_default(field)}`"
        kind = _type_name(hints[field.name])
        yield f"| `{field.name}` | `{kind}` | {default} | {docs.get(field.name, '')} |"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.default_factory is not msgspec.NODEFAULT:
        return repr(field.default_factory())
    if isinstance(field.default, memoryview):
        return "empty"
    if isinstance(field.default, msgspec.Struct):
        return type(field.default).__name__
    return repr(field.default)


def _type_name(hint: Any) -> str:
    name = inspect.formatannotation(hint) if not isinstance(hint, type) else hint.__name__
    for module in (
        "gpuworker.step.",
        "gpuworker.replies.",
        "gpuworker.health.",
        "gpuworker.messages.",
        "typing.",
    ):
        name = name.replace(module, "")
    return name.replace("|", "or")


def _field_docs(cls: type) -> Iterable[tuple[str, str]]:
    """Yield the string that follows each field in the source, on one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    definition = tree.body[0]
    assert isinstance(definition, ast.ClassDef)
    for field, doc in zip(definition.body, definition.body[1:], strict=False):
        match field, doc:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                yield name, " ".join(text.split())
