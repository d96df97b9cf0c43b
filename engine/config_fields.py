"""Typed reading of config.json: a wrong or missing value is an error that names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.errors import ModelFilesError


class ConfigFields:
    """A view of a JSON object. `default=None` means that the field must be there; a JSON null counts as absent."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Present, and null."""
        return name in self._values and self._values[name] is None

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self._wrong(name, value, "an integer")
        return value

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.integer(name, default)
        if value <= 0:
            raise self._wrong(name, value, "positive")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._wrong(name, value, "a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a string")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, (int, float)) for item in value):
            raise self._wrong(name, value, "a list of numbers")
        return tuple(float(item) for item in value)

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._get(name, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, value, "a list of strings")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One id or a list of them; absent is empty."""
        value = self._values.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in ids):
            raise self._wrong(name, value, "a token id or a list of them")
        return tuple(ids)

    def nested(self, name: str) -> ConfigFields | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "an object")
        return ConfigFields(value, f"{self._where}: {name}")

    def _get(self, name: str, default: Any) -> Any:
        value = self._values.get(name)
        value = default if value is None else value
        if value is None:
            raise ModelFilesError(f"{self._where} has no {name!r}")
        return value

    def _wrong(self, name: str, value: Any, expected: str) -> ModelFilesError:
        return ModelFilesError(f"{self._where}: {name!r} is {value!r}, not {expected}")
