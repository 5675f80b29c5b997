"""Bodies of requests as RFC 8259 has them: UTF-8, no NaN, no name twice in an object, no nesting without end.

Python's JSON reader takes all of these. Here each is a 400 that says what is wrong and where.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn

from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from surefoot.frontend.sampling_params import quoted
from surefoot.http.turns import in_turn

MAX_DEPTH = 64  # of objects and lists inside each other; a request has 5, chat_template_kwargs may have more


class InvalidJson(HTTPException):
    def __init__(self, detail: str) -> None:
        super().__init__(400, f"the body is not valid JSON: {detail}")


class JsonRoute(APIRoute):
    """A route whose body is read by `parse`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly


class _StrictRequest(Request):
    async def json(self) -> Any:
        body = await self.body()
        return await in_turn(len(body), lambda: parse(body))


def parse(raw: bytes) -> Any:
    """Raises InvalidJson."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise InvalidJson(f"byte {error.start} is not UTF-8") from error
    try:
        parsed = json.loads(text, object_pairs_hook=_object, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise InvalidJson(f"{error.msg} at position {error.pos}") from error
    except RecursionError as error:
        raise _too_deep() from error
    except ValueError as error:  # an integer of thousands of digits
        raise InvalidJson("a number has too many digits") from error
    if isinstance(parsed, dict | list) and text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(parsed, MAX_DEPTH)
    return parsed


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise InvalidJson(f"{quoted(_first_repeated(name for name, _ in pairs))} stands twice in one object")
    try:
        "".join(made).encode()
    except UnicodeEncodeError as error:
        raise InvalidJson("a name has half a character (a lone surrogate)") from error
    return made


def _first_repeated(names: Iterable[str]) -> str:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise ValueError("no name is repeated")


def _refuse_constant(name: str) -> NoReturn:
    raise InvalidJson(f"{name} is not a JSON number")


def _check_depth(value: dict[str, Any] | list[Any], room: int) -> None:
    if room == 0:
        raise _too_deep()
    for item in value.values() if isinstance(value, dict) else value:
        if isinstance(item, dict | list) and (item or room == 1):
            _check_depth(item, room - 1)


def _too_deep() -> InvalidJson:
    return InvalidJson(f"objects and lists are nested more than {MAX_DEPTH} deep")
