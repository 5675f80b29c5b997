"""Chat templates: the Jinja program of a checkpoint that turns messages into one prompt text.

A template is foreign code. It runs in Jinja's sandbox, cannot change what it is given, and whatever goes wrong in it
is a `ChatTemplateError` of that request. The names it may use are those of Hugging Face's convention.

What it can cost is bounded where a short template could cost the most: numbers that `range` counts, texts and lists
that `*` repeats, numbers that `*` and `**` make, and the length of the prompt. Not bounded are the time of loops over
other things, and the size of one value that is joined (`~`), replaced or padded (`center`, "%9999d") together.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from datetime import datetime
from types import MappingProxyType
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Message = Mapping[str, Any]  # "role", "content", and whatever else the template reads

MAX_PROMPT_CHARACTERS = 16_000_000  # a million tokens have about four million
MAX_RANGE = 100_000  # numbers that all ranges of a rendering count together
MAX_REPEATED = 100_000  # characters, or elements
MAX_NUMBER_BITS = 4096


class ChatTemplateError(ValueError):
    """There is no chat template, it is not valid Jinja, or it does not take these messages."""

    def __init__(self, message: str, param: str = "messages") -> None:
        super().__init__(message)
        self.param = param  # what of the request is wrong


class ChatTemplate:
    """A compiled template, with the special tokens (such as `bos_token`) that it may write."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template = _environment().from_string(source, globals=dict(special_tokens))
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(f"the model's chat template is not valid (line {error.lineno}): {error}") from error
        except Exception as error:  # what Python itself refuses, such as thousands of brackets
            raise ChatTemplateError(f"the model's chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """The prompt text. With `add_generation_prompt` it ends where the assistant's answer begins.

        `variables` are what else the template may read, such as Qwen 3's `enable_thinking`. As in Hugging Face's
        library, a field of a message that is None counts as absent.
        """
        given = {
            "messages": [{key: value for key, value in message.items() if value is not None} for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
            "range": _limited_range(),
        }
        if taken := sorted(variables.keys() & (given.keys() | self._template.globals.keys())):
            told = f"a chat template's variable cannot be called {taken[0]!r}: the name has a meaning"
            raise ChatTemplateError(told, "chat_template_kwargs")
        try:
            return "".join(_limited(self._template.generate({**variables, **given})))
        except Exception as error:
            raise ChatTemplateError(f"the model's chat template does not take these messages: {error}") from error


class NoChatTemplate:
    """Stands in for the template of a model that has none: a base model."""

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> NoReturn:
        raise ChatTemplateError(
            "this model has no chat template, so it cannot take chat messages; use /v1/completions with a prompt text"
        )


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        repeated = next((value for value in (left, right) if isinstance(value, Sized)), None)
        if repeated is not None:
            count = right if repeated is left else left
            if isinstance(count, int) and len(repeated) * count > MAX_REPEATED:
                raise SecurityError(f"{len(repeated)} * {count} elements are more than {MAX_REPEATED}")
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_NUMBER_BITS:
                raise SecurityError(f"a number of {bits} bits is more than {MAX_NUMBER_BITS}")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    del environment.globals["lipsum"]  # texts of any length, and of no use
    environment.globals["namespace"] = _Namespace
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _limited_range() -> Callable[..., range]:
    """`range` for one rendering: nested loops multiply."""
    left = MAX_RANGE

    def limited(*arguments: int) -> range:
        nonlocal left
        numbers = range(*arguments)
        left -= len(numbers)
        if left < 0:
            raise SecurityError(f"its ranges count more than {MAX_RANGE} numbers")
        return numbers

    return limited


def _limited(pieces: Iterable[str]) -> Iterator[str]:
    length = 0
    for piece in pieces:
        length += len(piece)
        if length > MAX_PROMPT_CHARACTERS:
            raise SecurityError(f"the prompt has more than {MAX_PROMPT_CHARACTERS} characters")
        yield piece


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
