"""What commands share: flags, names of files, counts in words.

Flags of settings are generated from config.settings, those of sampling parameters stand here.

A flag that was not given is None among the parsed arguments, so that a default of a command, a line of a batch or a
file of settings can fill it in.
"""

from __future__ import annotations

import argparse
import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import shtab
from msgspec import Struct

from surefoot.config import settings as settings_module
from surefoot.config.settings import SettingInfo, Settings, SettingsError
from surefoot.frontend.sampling_params import SamplingParams

Arguments = Mapping[str, Any]  # parsed, by `dest`

DIRECTORIES = {"model_cache", "record_dir"}  # settings that name one
FROM_ELSEWHERE = f"""\
A setting that no flag gives comes from the environment, as in
{settings_module.ENVIRONMENT_PREFIX}THREADS=2, else from the TOML file, as in `threads = 2`. Otherwise
it has its default, which is in brackets here."""


class SamplingFlag(Struct, frozen=True):
    """A field of SamplingParams on the command line."""

    kind: type
    help: str
    flag: str = ""  # if it is not the field's name

    def spelled(self, name: str) -> str:
        return self.flag or "--" + name.replace("_", "-")


SAMPLING_FLAGS = {
    "max_tokens": SamplingFlag(int, "new tokens at most"),
    "temperature": SamplingFlag(float, "0 takes the most probable token; 1 draws from the model's own distribution"),
    "top_k": SamplingFlag(int, "draw from the k most probable tokens; 0 is all"),
    "top_p": SamplingFlag(float, "draw from the fewest tokens that reach this probability"),
    "min_p": SamplingFlag(float, "drop tokens less probable than this share of the most probable one"),
    "min_tokens": SamplingFlag(int, "new tokens before an end-of-text token"),
    "repetition_penalty": SamplingFlag(float, "above 1: fewer tokens again that are in prompt or output"),
    "presence_penalty": SamplingFlag(float, "above 0: fewer tokens again that are in the output"),
    "frequency_penalty": SamplingFlag(float, "the same, times their count there"),
    "seed": SamplingFlag(int, "same seed, same output", flag="--sampling-seed"),
    "stop": SamplingFlag(str, "end before this text; repeatable"),
}


GENERATE_DEFAULTS = {"temperature": 0.0, "max_tokens": 256}  # a base model may never end by itself
CHAT_DEFAULTS = {"temperature": 0.6, "top_p": 0.9}  # small models repeat themselves without


def add_settings(command: argparse.ArgumentParser, infos: Sequence[SettingInfo], model_argument: bool) -> None:
    """Flags for these settings, in their groups. `model_argument`: the model may be a positional argument too."""
    for name in settings_module.GROUPS:
        group = command.add_argument_group(name)
        if name == "model" and model_argument:
            complete_files(group.add_argument("model_argument", nargs="?", metavar="MODEL", help="the same as --model"))
        for info in infos:
            if info.group == name:
                _add_setting(group, info)
    group = command.add_argument_group("settings from elsewhere", FROM_ELSEWHERE)
    complete_files(
        group.add_argument(
            "--config", metavar="FILE", default="", help="TOML file of settings by name; also SUREFOOT_CONFIG"
        )
    )


def add_sampling(command: argparse.ArgumentParser, defaults: Mapping[str, float]) -> None:
    """`defaults`: of this command, where they are not those of SamplingParams. They are told, not set: see above."""
    group = command.add_argument_group("sampling")
    for name, flag in SAMPLING_FLAGS.items():
        note = flag.help if name not in defaults else f"{flag.help} [{defaults[name]}]"
        metavar = "TEXT" if flag.kind is str else "N"
        group.add_argument(
            flag.spelled(name),
            dest=_dest(name),
            type=flag.kind,
            action="append" if name == "stop" else "store",
            metavar=metavar,
            help=note,
        )


def settings_of(arguments: Arguments) -> Settings:
    """Raises SettingsError."""
    given = given_settings(arguments)
    model = arguments.get("model_argument")
    if model is not None:
        if "model" in given:
            raise SettingsError(
                f"the model is given twice, as {model!r} and as --model {given['model']!r}: give it once"
            )
        given["model"] = model
    settings = settings_module.load(given, arguments["config"])
    if not settings.model:
        raise SettingsError("the model is an empty text, perhaps of an unset variable: name one, or leave it out")
    return settings


def split_model(arguments: Arguments) -> Arguments:
    """Takes the first of the positional arguments for the model, if it looks like one and --model is not given.

    Raises ValueError if a later one is the file of a model.
    """
    if arguments["model"] is not None or not arguments["prompts"]:
        return arguments
    first, *rest = arguments["prompts"]
    for word in rest:
        if word.endswith(".gguf") and Path(word).is_file():
            raise ValueError(f"{word} is a model, not a prompt: the model comes first, or after --model")
    return {**arguments, "model_argument": first, "prompts": rest} if _is_like_a_model(first) else arguments


def _is_like_a_model(text: str) -> bool:
    """A word with a slash, or that ends in .gguf, or that names a directory here."""
    return bool(re.fullmatch(r"\S+", text)) and ("/" in text or text.endswith(".gguf") or Path(text).is_dir())


def given_settings(arguments: Arguments) -> dict[str, Any]:
    """By name, those that flags gave."""
    names = [info.name for info in settings_module.infos()]
    return {name: arguments[name] for name in names if arguments.get(name) is not None}


def given_sampling(arguments: Arguments) -> dict[str, Any]:
    """Fields of SamplingParams, those that flags gave."""
    return {name: arguments[_dest(name)] for name in SAMPLING_FLAGS if arguments[_dest(name)] is not None}


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Raises ParameterError for a value out of range."""
    return SamplingParams(**{**fields, "stop": tuple(fields.get("stop", ()))})


def of_command(command: argparse.ArgumentParser) -> list[str]:
    return [flag for action in command._actions for flag in action.option_strings]


def path_of(name: str) -> Path:
    """With ~ replaced. Raises ValueError if that is not known, or nothing was given."""
    if not name:
        raise ValueError("give the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{name} begins with a user who is not known here: write the whole path") from error


@contextlib.contextmanager
def file_errors(path: Path) -> Iterator[None]:
    """What the operating system says about `path` becomes a sentence with its name and the way out."""
    try:
        yield
    except FileNotFoundError as error:
        if path.parent.is_dir():
            raise OSError(f"there is no file {path}: give the name of one") from error
        raise OSError(f"there is no directory {path.parent} for {path.name}: make it, or give another file") from error
    except IsADirectoryError as error:
        raise OSError(f"{path} is a directory: give a file") from error
    except OSError as error:
        raise OSError(f"{path} cannot be used: {error.strerror}; give another file") from error


def counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def complete_files(action: argparse.Action, how: Any = shtab.FILE) -> None:
    """shtab reads from the action how its values are completed."""
    action.complete = how  # type: ignore[attr-defined]


def _dest(name: str) -> str:
    """`seed` is a setting too."""
    return "sampling_" + name


def _add_setting(group: argparse._ArgumentGroup, info: SettingInfo) -> None:
    default = info.default.replace(str(Path.home()), "~") or "none"
    note = f"{info.help} [{default}]".replace("%", "%%")
    if info.is_switch:
        group.add_argument(info.flag, action="store_true", default=None, help=info.help)
    elif info.choices:
        group.add_argument(info.flag, dest=info.name, choices=info.choices, help=note)
    elif info.name in DIRECTORIES:
        complete_files(group.add_argument(info.flag, dest=info.name, metavar="DIR", help=note), shtab.DIRECTORY)
    elif info.name == "model":
        complete_files(group.add_argument(info.flag, dest=info.name, metavar="MODEL", help=note))
    else:
        metavar = "N" if "number" in info.allowed else "TEXT"
        group.add_argument(info.flag, dest=info.name, metavar=metavar, help=note)
