"""What a user may ask for. One flat record; flags, environment variables, TOML keys and docs are generated from it.

A value comes from the first of: command-line flag, environment variable SUREFOOT_<NAME>, TOML file, default.
The file is that of --config, else of SUREFOOT_CONFIG.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from surefoot.checkpoint.default_model import DEFAULT_CACHE_DIR

ENVIRONMENT_PREFIX = "SUREFOOT_"

# Every setting is in one group, under which the command line lists it.
GROUPS = {
    "model": ("model", "revision", "load_format", "model_cache"),
    "engine": (
        "device",
        "dtype",
        "weight_dtype",
        "cpu_kernels",
        "c_compiler",
        "threads",
        "lookahead",
        "disable_prefix_cache",
        "seed",
    ),
    "memory and limits": (
        "max_model_len",
        "max_running_requests",
        "max_queued_requests",
        "max_penalised_requests",
        "mem_fraction",
        "kv_cache_tokens",
        "page_size",
        "chunked_prefill_size",
    ),
    "server": (
        "host",
        "port",
        "api_key",
        "served_model_name",
        "max_body_mib",
        "drain_seconds",
        "max_restarts",
        "record_dir",
        "log_level",
        "log_format",
    ),
}
OF_SERVER = frozenset(GROUPS["server"])  # settings that mean nothing without a server

Auto = Literal["auto"]
AutoPositive = Annotated[int, Meta(ge=1)] | Auto
AutoFraction = Annotated[float, Meta(gt=0, lt=1)] | Auto


def limit_openmp_spinning() -> None:
    """To be called before torch is first imported, here or in the process that will be started.

    By default a thread of libgomp that waits for the others spins for milliseconds. If another program has one of the
    CPUs, the thread that is waited for does not get the one that is wasted so: steps become many times slower
    (docs/log.md). What the user has set stays.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "300")


def state_dir() -> Path:
    """Where a program keeps what the user may want again: history, say (XDG base directories)."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "surefoot"


class SettingsError(ValueError):
    """Lists every setting that is unknown or has a value it cannot have."""


def _help(text: str) -> Meta:
    return Meta(description=text)


class Settings(Struct, frozen=True, kw_only=True):
    """`auto` values are derived by config.resolve, which gives its reasons."""

    model: Annotated[
        str, _help("GGUF file, directory or id of a Hugging Face model; 'default' is SmolLM2-135M-Instruct")
    ] = "default"
    revision: Annotated[str, _help("branch, tag or commit of a Hugging Face id; empty is its main branch")] = ""
    served_model_name: Annotated[str, _help("name of the model in the API")] = "auto"
    load_format: Annotated[
        Literal["checkpoint", "dummy"], _help("'dummy' makes random weights from the seed instead of reading them")
    ] = "checkpoint"
    model_cache: Annotated[str, _help("directory where the default model is kept")] = str(DEFAULT_CACHE_DIR)
    device: Annotated[Literal["auto", "cpu"], _help("where the model runs")] = "auto"
    dtype: Annotated[Literal["auto", "float32"], _help("number format of activations and KV cache")] = "auto"
    weight_dtype: Annotated[
        Literal["auto", "float32", "float16", "stored"],
        _help("number format in which matrices are held; 'stored' is the file's own, where a native kernel reads it"),
    ] = "auto"
    cpu_kernels: Annotated[
        Literal["auto", "native", "torch"], _help("what computes on a CPU: C compiled for this machine, or torch")
    ] = "auto"
    c_compiler: Annotated[str, _help("command that compiles native kernels; empty looks for cc, gcc, clang")] = ""
    threads: Annotated[AutoPositive, _help("CPU threads of the engine")] = "auto"
    max_model_len: Annotated[AutoPositive, _help("longest sequence of prompt and output, in tokens")] = "auto"
    max_running_requests: Annotated[AutoPositive, _help("requests that may run at once")] = "auto"
    max_queued_requests: Annotated[AutoPositive, _help("requests that may wait; more are refused with 503")] = "auto"
    max_penalised_requests: Annotated[
        AutoPositive, _help("running requests that may have a repetition, presence or frequency penalty")
    ] = "auto"
    mem_fraction: Annotated[AutoFraction, _help("share of the available memory for weights and KV cache")] = "auto"
    kv_cache_tokens: Annotated[AutoPositive, _help("tokens that the KV cache holds, instead of what fits")] = "auto"
    page_size: Annotated[AutoPositive, _help("tokens in a page of the KV cache")] = "auto"
    chunked_prefill_size: Annotated[AutoPositive, _help("prompt tokens that one step computes at most")] = "auto"
    disable_prefix_cache: Annotated[bool, _help("compute every prompt whole")] = False
    lookahead: Annotated[Literal["auto", 0, 1], _help("steps planned ahead of the one whose result is known")] = "auto"
    seed: Annotated[
        int, Meta(ge=0, le=2**63 - 1), _help("of dummy weights, and of the seeds of requests that bring none")
    ] = 0
    host: Annotated[str, _help("address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535), _help("port to listen on; 0 takes a free one")] = 8000
    api_key: Annotated[
        str,
        Meta(pattern="^[!-~]*$", title="of ASCII characters without spaces"),
        _help("key that clients must send as a bearer token; empty asks for none"),
    ] = ""
    max_body_mib: Annotated[int, Meta(ge=1, le=1024), _help("largest request body, in MiB; larger ones get 413")] = 8
    drain_seconds: Annotated[
        float, Meta(ge=0, le=1_000_000), _help("how long running requests may go on after SIGTERM")
    ] = 30.0
    max_restarts: Annotated[
        int, Meta(ge=0), _help("restarts of a dead process within 10 minutes before the server gives up")
    ] = 5
    record_dir: Annotated[str, _help("directory of the flight recorder")] = str(DEFAULT_CACHE_DIR.parent / "records")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], _help("what is logged")] = "info"
    log_format: Annotated[
        Literal["text", "json"], _help("how it is written: lines of text, or one JSON object a line")
    ] = "text"


class SettingInfo(Struct, frozen=True):
    """One field, for command line and docs."""

    name: str
    flag: str
    help: str
    allowed: str  # what it may be, in words
    default: str
    is_switch: bool
    of_server: bool  # means nothing to the offline API, `chat` and `generate`
    group: str  # key of GROUPS
    choices: tuple[str, ...]  # all that it may be; empty if that cannot be listed


def infos() -> tuple[SettingInfo, ...]:
    hints = _hints()
    group_of = {name: group for group, names in GROUPS.items() for name in names}
    return tuple(
        SettingInfo(
            name=field.name,
            flag=_flag(field.name),
            help=_description(hints[field.name]),
            allowed=_allowed(hints[field.name]),
            default=in_words(field.default),
            is_switch=hints[field.name].__origin__ is bool,
            of_server=field.name in OF_SERVER,
            group=group_of[field.name],
            choices=_choices(hints[field.name].__origin__),
        )
        for field in msgspec.structs.fields(Settings)
    )


def _choices(hint: Any) -> tuple[str, ...]:
    return tuple(map(str, typing.get_args(hint))) if typing.get_origin(hint) is Literal else ()


def in_words(value: Any) -> str:
    """As it is written in TOML, but without quotes."""
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Source(Struct, frozen=True):
    """Where settings come from."""

    entries: Mapping[str, Any]
    spelled: Callable[[str], str]  # a setting's name as the user writes it there
    place: str = ""  # of a file

    def problem(self, name: str, wrong: str) -> str:
        return f"{self.spelled(name)}{self.place}: {wrong}"


def load(given: Mapping[str, Any], toml_file: str | None = None) -> Settings:
    """Merges the sources. given: by field name; values may be strings. toml_file: that of `--config`, empty if it was
    not given; None says that there is no command line, and `given` are keyword arguments.

    Raises SettingsError with all that is wrong.
    """
    environment = {
        key.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for key, value in os.environ.items()
        if key.startswith(ENVIRONMENT_PREFIX) and not _is_of_kubernetes(key, value)
    }
    toml_of_environment = environment.pop("config", "")
    sources = [_Source(given, str if toml_file is None else _flag), _Source(environment, _variable)]
    if toml_file:
        sources.append(_toml_source(toml_file, "--config"))
    elif toml_of_environment:
        sources.append(_toml_source(toml_of_environment, _variable("config")))
    hints = _hints()
    problems: list[str] = []
    values: dict[str, Any] = {}
    for source in sources:
        for name, value in source.entries.items():
            if name not in hints:
                problems.append(_unknown(name, value, source))
            elif name not in values:
                try:
                    values[name] = msgspec.convert(value, hints[name], strict=False)
                except msgspec.ValidationError:
                    shown = "what is given" if name == "api_key" else repr(value)  # keys are kept out of logs
                    problems.append(source.problem(name, f"{shown} is not valid, expected {_allowed(hints[name])}"))
    if problems:
        raise SettingsError("\n".join(problems))
    return Settings(**values)


def _unknown(name: str, value: Any, source: _Source) -> str:
    if source.place and isinstance(value, dict):
        return f"[{name}]{source.place}: tables are not taken, write the settings in it without its heading"
    close = difflib.get_close_matches(name, _hints(), n=1)
    return source.problem(
        name, "there is no such setting" + (f", did you mean {source.spelled(*close)}?" if close else "")
    )


def _is_of_kubernetes(key: str, value: str) -> bool:
    """Whether the variable is one that pods get for a Service named surefoot."""
    if key == "SUREFOOT_PORT":
        return value.startswith(("tcp://", "udp://", "sctp://"))
    return bool(re.match(r"SUREFOOT_(SERVICE|PORT_\d+)_", key))


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return ENVIRONMENT_PREFIX + name.upper()


def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Settings, include_extras=True)


def _description(hint: Any) -> str:
    return next(str(meta.description) for meta in hint.__metadata__ if isinstance(meta, Meta) and meta.description)


def _toml_source(path: str, named_by: str) -> _Source:
    try:
        with open(path, "rb") as file:
            return _Source(tomllib.load(file), str, f" in {path}")
    except OSError as error:
        raise SettingsError(f"{named_by} {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{named_by} {path} is not TOML: {error}") from error


def _allowed(hint: Any) -> str:
    """What a setting of this type may be, in words."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(map(_allowed, typing.get_args(hint)))
    if typing.get_origin(hint) is Literal:
        return ", ".join(map(repr, typing.get_args(hint)))
    if typing.get_origin(hint) is Annotated:
        limits = [meta for meta in hint.__metadata__ if isinstance(meta, Meta)]
        bounds = [f"{sign} {value}" for meta in limits for sign, value in _bounds(meta)]
        return f"{_allowed(hint.__origin__)} {' and '.join(bounds)}".strip()
    return {int: "a whole number", float: "a number", bool: "true or false", str: "text"}[hint]


def _bounds(meta: Meta) -> list[tuple[str, float | str]]:
    if meta.pattern is not None:
        return [(str(meta.title), "")]
    limits = ((">=", meta.ge), (">", meta.gt), ("<=", meta.le), ("<", meta.lt))
    return [(sign, value) for sign, value in limits if value is not None]
