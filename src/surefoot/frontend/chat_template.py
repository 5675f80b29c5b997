"""Chat templates: the Jinja program of a checkpoint that turns messages into one prompt text.

A template is foreign code. It runs in Jinja's sandbox, cannot change what it is given, and whatever goes wrong in it
is a `ChatTemplateError` of that request. The names it may use are those of Hugging Face's convention.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]  # "role", "content", and whatever else the template reads


class ChatTemplateError(ValueError):
    """There is no chat template, it is not valid Jinja, or it does not take these messages."""


class ChatTemplate:
    """A compiled template, with the special tokens (such as `bos_token`) that it may write."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source, globals=dict(special_tokens))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the model's chat template is not valid (line {error.lineno}): {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """The prompt text. With `add_generation_prompt` it ends where the assistant's answer begins."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None
            )
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template does not take these messages: {error}") from error


class NoChatTemplate:
    """Stands in for the template of a model that has none: a base model."""

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> NoReturn:
        raise ChatTemplateError(
            "this model has no chat template, so it cannot take chat messages; use /v1/completions with a prompt text"
        )


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _Namespace(Namespace):
    """Jinja's `namespace()`. Names such as `__call__` would let a template reach the environment behind the sandbox."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        for name, value in dict(*args, **kwargs).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")
        super().__setitem__(name, value)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012  (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which a prompt must not have."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
