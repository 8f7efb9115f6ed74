"""Layer 1. Typed reading of the fields of a config.json; null counts as missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from gpuworker.errors import CheckpointMismatch

__all__ = ["Fields"]


class Fields:
    """A JSON object with typed access; raises CheckpointMismatch naming field and value.

    defaults fill in for fields that are missing or null, as the architecture prescribes.
    """

    def __init__(
        self,
        raw: Mapping[str, object],
        where: str = "config",
        defaults: Mapping[str, object] | None = None,
    ) -> None:
        self.raw = raw
        self._where = where
        self._defaults = defaults or {}

    def __contains__(self, name: str) -> bool:
        return self._get(name) is not None

    def _get(self, name: str) -> object:
        value = self.raw.get(name)
        return self._defaults.get(name) if value is None else value

    def _wrong(self, name: str, value: object, wanted: str) -> CheckpointMismatch:
        return CheckpointMismatch(f"{self._where}: {name} is {value!r}; it must be {wanted}")

    def optional_number(self, name: str) -> float | None:
        """Return a number, or None when it is missing."""
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, value, "a number")
        return float(value)

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number; raises when it is missing and has no default."""
        value = self.optional_number(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointMismatch(f"{self._where}: required field {name} is missing")
        return value

    def optional_integer(self, name: str) -> int | None:
        """Return an integer, or None when it is missing."""
        value = self._get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, value, "an integer")
        return value

    def integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int:
        """Return an integer of at least minimum; raises when it is missing without default."""
        value = self.optional_integer(name)
        if value is None:
            value = default
        if value is None:
            raise CheckpointMismatch(f"{self._where}: required field {name} is missing")
        if value < minimum:
            raise self._wrong(name, value, f"at least {minimum}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, (bool, int)):
            raise self._wrong(name, value, "true or false")
        return bool(value)

    def text(self, name: str, default: str = "") -> str:
        """Return a string."""
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def mapping(self, name: str) -> Mapping[str, object] | None:
        """Return an object, or None when it is missing."""
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return cast("Mapping[str, object]", value)

    def _list(self, name: str) -> list[object] | None:
        value = self._get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self._wrong(name, value, "a list")
        return list(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers; raises when it is missing."""
        values = self._list(name)
        if values is None:
            raise CheckpointMismatch(f"{self._where}: required field {name} is missing")
        numbers = [v for v in values if isinstance(v, (int, float)) and not isinstance(v, bool)]
        if len(numbers) != len(values):
            raise self._wrong(name, values, "a list of numbers")
        return tuple(float(v) for v in numbers)

    def integers(self, name: str) -> tuple[int, ...]:
        """Return a list of integers; one bare integer and a missing field are lists too."""
        value = self._get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            return (value,)
        values = self._list(name) or []
        numbers = [int(v) for v in values if isinstance(v, (bool, int))]
        if len(numbers) != len(values):
            raise self._wrong(name, values, "a list of integers")
        return tuple(numbers)

    def texts(self, name: str) -> tuple[str, ...]:
        """Return a list of strings; a missing field is an empty list."""
        values = self._list(name) or []
        texts = [v for v in values if isinstance(v, str)]
        if len(texts) != len(values):
            raise self._wrong(name, values, "a list of strings")
        return tuple(texts)
