"""How a bug is planted: by an edit of a module's source."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from types import ModuleType

import pytest


@dataclass(frozen=True)
class Fault:
    """A bug: each `old` text, which occurs once in the module's source, becomes `new`."""

    name: str
    module: ModuleType
    edits: tuple[tuple[str, str], ...]
    shows_in_tokens: bool = False  # found even if the scheduler's own state is never checked


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the module's classes the methods of its edited source."""
    source = inspect.getsource(fault.module)
    for old, new in fault.edits:
        assert source.count(old) == 1, f"{fault.name}: {old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    spec = importlib.util.spec_from_loader(fault.module.__name__, loader=None)
    assert spec is not None
    edited = importlib.util.module_from_spec(spec)
    exec(compile(source, fault.name, "exec"), edited.__dict__)
    for name, edited_class in inspect.getmembers(edited, inspect.isclass):
        if edited_class.__module__ == fault.module.__name__:
            original = getattr(fault.module, name)
            for attribute, value in vars(edited_class).items():
                if inspect.isfunction(value):
                    monkeypatch.setattr(original, attribute, value)
