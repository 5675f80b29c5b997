"""The command line: `surefoot serve | chat | generate`. Flags of settings are generated from config.settings."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from surefoot import __version__
from surefoot.config import settings as settings_module
from surefoot.config.settings import Settings
from surefoot.frontend.sampling_params import SamplingParams

if TYPE_CHECKING:
    from surefoot.llm import LLM

EXIT_BAD_INPUT = 2
SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "new tokens at most"),
    "temperature": (float, "0 takes the most probable token; 1 draws from the model's own distribution"),
    "top_k": (int, "draw from the k most probable tokens; 0 is all"),
    "top_p": (float, "draw from the fewest tokens that reach this probability"),
    "min_p": (float, "drop tokens less probable than this share of the most probable one"),
    "min_tokens": (int, "new tokens before an end-of-text token"),
}

GENERATE_SAMPLING = {"temperature": 0.0}
CHAT_SAMPLING = {"temperature": 0.6, "top_p": 0.9}  # small models repeat themselves without


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="surefoot", description="An LLM serving engine.")
    root.add_argument("--version", action="version", version=f"surefoot {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, help: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=help, description=help, allow_abbrev=False)

    _add_settings(command("serve", "serve a model over the OpenAI API"), for_server=True)

    chat = command("chat", "talk to a model in the terminal, without a server")
    _add_settings(chat, for_server=False)
    _add_sampling(chat, CHAT_SAMPLING)

    generate = command("generate", "continue prompts, arguments or lines of standard input, without a server")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT")
    _add_settings(generate, for_server=False)
    _add_sampling(generate, GENERATE_SAMPLING)
    return root


def _add_settings(command: argparse.ArgumentParser, for_server: bool) -> None:
    group = command.add_argument_group(
        "settings", f"also from a TOML file, or from the environment as {settings_module.ENVIRONMENT_PREFIX}<NAME>"
    )
    group.add_argument("--config", metavar="FILE", default="", help="TOML file with settings by name")
    for info in settings_module.infos():
        if info.of_server and not for_server:
            continue
        note = f"{info.help} [{info.default or 'none'}]".replace("%", "%%")
        if info.is_switch:
            group.add_argument(info.flag, action="store_true", default=None, help=info.help)
        else:
            group.add_argument(info.flag, dest=info.name, metavar="VALUE", help=note)


def _add_sampling(command: argparse.ArgumentParser, defaults: dict[str, float]) -> None:
    group = command.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING_FLAGS.items():
        default = defaults.get(name)
        note = text if default is None else f"{text} [{default}]"
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N", default=default, help=note)
    group.add_argument("--sampling-seed", dest="sampling_seed", type=int, metavar="N", help="same seed, same output")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def _settings(arguments: dict[str, Any]) -> Settings:
    names = {info.name for info in settings_module.infos()}
    given = {name: value for name, value in arguments.items() if name in names and value is not None}
    return settings_module.load(given, arguments["config"])


def _sampling(arguments: dict[str, Any]) -> SamplingParams:
    given = {name: arguments[name] for name in SAMPLING_FLAGS if arguments[name] is not None}
    return SamplingParams(**given, seed=arguments["sampling_seed"], stop=tuple(arguments["stop"]))


def main(argv: Sequence[str] | None = None) -> int:
    root = parser()
    known, unknown = root.parse_known_args(argv)
    if unknown:
        root.error(f"there is no {unknown[0]}{_meant(unknown[0], known.command)}")
    arguments = vars(known)
    console = Console(stderr=True)
    try:
        settings = _settings(arguments)
        match arguments["command"]:
            case "serve":
                from surefoot import launch

                return launch.serve(settings, console)
            case "chat":
                return _chat(settings, _sampling(arguments), console)
            case _:
                return _generate(settings, _sampling(arguments), arguments["prompts"], console)
    except (ValueError, OSError) as error:  # settings, checkpoints, plans, parameters and files: it has the way out
        console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 130


def _meant(flag: str, command: str) -> str:
    flags = [info.flag for info in settings_module.infos()] + ["--" + name.replace("_", "-") for name in SAMPLING_FLAGS]
    close = difflib.get_close_matches(flag.partition("=")[0], flags, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f": {hint}`surefoot {command} --help` lists all flags"


def _load(settings: Settings, console: Console) -> LLM:
    with console.status("loading the model"):
        from surefoot import LLM

        return LLM(settings)


def _generate(settings: Settings, params: SamplingParams, prompts: list[str], console: Console) -> int:
    if not prompts and sys.stdin.isatty():
        console.print("prompts, one a line; Ctrl-D ends:")
    wanted = prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    if not all(wanted) or not wanted:
        raise ValueError("there is no prompt: give it as an argument, or one a line on standard input")
    with _load(settings, console) as llm:
        with console.status(f"generating {len(wanted)} completions"):
            completions = llm.generate(wanted, params)
        for prompt, completion in zip(wanted, completions, strict=True):
            print(prompt + completion.text)
    return 0


def _chat(settings: Settings, params: SamplingParams, console: Console) -> int:
    with contextlib.suppress(ImportError):  # not in every build of Python: line editing, history, long lines
        import readline  # noqa: F401
    with _load(settings, console) as llm:
        console.print(f"{llm.plan.served_model_name}: Ctrl-D ends, Ctrl-C stops an answer.")
        messages: list[dict[str, str]] = []
        while (text := _ask(console)) is not None:
            if not text:
                continue
            messages.append({"role": "user", "content": text})
            answer = ""
            try:
                for piece in llm.stream_chat(messages, params):
                    print(piece, end="", flush=True)
                    answer += piece
            except KeyboardInterrupt:
                pass
            except ValueError as error:  # the conversation has outgrown the context, say
                console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False)
                messages.pop()
                continue
            print()
            messages.append({"role": "assistant", "content": answer})
    return 0


def _ask(console: Console) -> str | None:
    """The next line, None at the end of input."""
    while True:
        try:
            return input("> " if sys.stdin.isatty() else "").strip()
        except KeyboardInterrupt:
            console.print("\nCtrl-D ends")
        except EOFError:
            if sys.stdin.isatty():
                print()
            return None


if __name__ == "__main__":
    sys.exit(main())
