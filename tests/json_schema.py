"""A JSON schema's say on a value: the keywords that our schema uses, and no others."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

__all__ = ["faults"]

_SILENT = {"title", "description", "default", "required"}
_TYPES: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}


def faults(schema: dict[str, Any], shape: dict[str, Any], value: Any) -> list[str]:
    """Say what of a value a shape does not allow; raises KeyError for a keyword that is new."""
    return [f"{value!r} {fault}" for fault in _faults(schema["$defs"], shape, value)]


def _faults(defs: dict[str, Any], shape: dict[str, Any], value: Any) -> Iterator[str]:
    for keyword, limit in shape.items():
        if keyword in _SILENT:
            continue
        if keyword == "$ref":
            yield from _faults(defs, defs[limit.rpartition("/")[2]], value)
        elif keyword == "anyOf":
            if all(any(_faults(defs, choice, value)) for choice in limit):
                yield f"is none of {limit}"
        elif keyword == "type":
            is_bool = isinstance(value, bool) and limit != "boolean"  # an int in Python only
            if is_bool or not isinstance(value, _TYPES[limit]):
                yield f"is no {limit}"
                return
        else:
            yield from _CHECKS[keyword](defs, shape, limit, value)


def _enum(_: Any, __: Any, limit: list[Any], value: Any) -> Iterator[str]:
    if value not in limit or isinstance(value, bool):
        yield f"is none of {limit}"


def _bounds(value: float, low: float, high: float, what: str) -> Iterator[str]:
    if not low <= value <= high:
        yield f"{what} {value} is outside [{low}, {high}]"


def _prefix(defs: Any, _: Any, limit: list[Any], value: list[Any]) -> Iterator[str]:
    for part, item in zip(limit, value, strict=False):
        yield from _faults(defs, part, item)


def _items(defs: Any, _: Any, limit: dict[str, Any], value: list[Any]) -> Iterator[str]:
    for item in value:
        yield from _faults(defs, limit, item)


def _properties(
    defs: Any, shape: dict[str, Any], limit: dict[str, Any], value: dict[str, Any]
) -> Iterator[str]:
    for name in shape.get("required", []):
        if name not in value:
            yield f"lacks {name}"
    for name, item in value.items():
        if name in limit:
            yield from _faults(defs, limit[name], item)


def _others(defs: Any, shape: dict[str, Any], limit: Any, value: dict[str, Any]) -> Iterator[str]:
    for name in value.keys() - shape.get("properties", {}).keys():
        if limit is False:
            yield f"has an unknown {name}"
        else:
            yield from _faults(defs, limit, value[name])


def _base64(_: Any, __: Any, limit: str, value: str) -> Iterator[str]:
    try:
        base64.b64decode(value, validate=True)
    except binascii.Error:
        yield f"is no {limit}"


_CHECKS: dict[str, Any] = {
    "additionalProperties": _others,
    "contentEncoding": _base64,
    "enum": _enum,
    "items": _items,
    "maxItems": lambda _, __, limit, value: _bounds(len(value), 0, limit, "length"),
    "maxLength": lambda _, __, limit, value: _bounds(len(value), 0, limit, "length"),
    "maximum": lambda _, __, limit, value: _bounds(value, -(2**64), limit, "number"),
    "minItems": lambda _, __, limit, value: _bounds(len(value), limit, 2**32, "length"),
    "minLength": lambda _, __, limit, value: _bounds(len(value), limit, 2**32, "length"),
    "minimum": lambda _, __, limit, value: _bounds(value, limit, 2**64, "number"),
    "prefixItems": _prefix,
    "properties": _properties,
}
