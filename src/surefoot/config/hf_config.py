"""Typed look-ups in a Hugging Face config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from surefoot.checkpoint.errors import ModelSpecError

T = TypeVar("T", int, float, bool, str)


class HFConfig:
    """A JSON object. A null counts as missing unless a method says otherwise."""

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        self.where = where
        self.raw = values

    @classmethod
    def read(cls, path: Path) -> HFConfig:
        try:
            values = json.loads(path.read_bytes())
        except OSError as error:
            raise ModelSpecError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ModelSpecError(f"{path} is not valid JSON: {error}") from error
        except RecursionError as error:
            raise ModelSpecError(f"{path} is nested too deeply to be a model's config.json") from error
        if not isinstance(values, dict):
            raise ModelSpecError(f"{path} holds {type(values).__name__}, not a JSON object")
        return cls(str(path), values)

    def __contains__(self, key: str) -> bool:
        return self.raw.get(key) is not None

    def with_defaults(self, defaults: Mapping[str, Any]) -> HFConfig:
        """Values of keys that are missing; a null stays one, since it says "none" where a default says "some"."""
        return HFConfig(self.where, {**defaults, **self.raw})

    def with_values(self, values: Mapping[str, Any]) -> HFConfig:
        return HFConfig(self.where, {**self.raw, **values})

    def section(self, key: str, outer: Sequence[str] = ()) -> HFConfig:
        """The object at `key`, empty if there is none. Keys of `outer` are taken from this object if it lacks them."""
        nested = {} if key not in self else self.raw[key]
        if not isinstance(nested, dict):
            raise ModelSpecError(f"{self.where}: {key} = {nested!r} should be an object or null")
        inherited = {name: self.raw[name] for name in outer if name in self}
        return HFConfig(f"{self.where}, {key}", {**inherited, **nested})

    def value(self, key: str, kind: type[T]) -> T:
        if key not in self:
            raise ModelSpecError(f"{self.where} lacks {key!r}")
        return self._typed(key, self.raw[key], kind)

    def value_or(self, key: str, default: T) -> T:
        return self.value(key, type(default)) if key in self else default

    def values(self, key: str, kind: type[T]) -> tuple[T, ...]:
        """A list that must be there."""
        if key not in self:
            raise ModelSpecError(f"{self.where} lacks {key!r}")
        found = self.raw[key]
        if not isinstance(found, list):
            raise ModelSpecError(f"{self.where}: {key} should be a list of {kind.__name__}, it is {_shortened(found)}")
        return tuple(self._typed(f"{key}[{i}]", value, kind) for i, value in enumerate(found))

    def refuse_unless(self, key: str, supported: Sequence[Any], default: Any) -> None:
        value = self.raw[key] if key in self else default
        if value not in supported:
            listed = " or ".join(map(repr, supported))
            raise ModelSpecError(f"{self.where}: {key} = {_shortened(value)} is not supported; supported is {listed}")

    def _typed(self, key: str, value: Any, kind: type[T]) -> T:
        if type(value) is int and abs(value) >= 1 << 63:
            raise ModelSpecError(f"{self.where}: {key} = {_shortened(value)} does not fit 64 bits")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise ModelSpecError(f"{self.where}: {key} should be one {kind.__name__}, it is {_shortened(value)}")
        return value


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:100] + "..."
