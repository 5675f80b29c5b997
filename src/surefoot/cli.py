"""The command line: `surefoot serve | chat | generate`. Flags of settings are generated from config.settings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console

from surefoot import __version__
from surefoot.config import settings as settings_module
from surefoot.config.settings import Settings
from surefoot.frontend.sampling_params import SamplingParams

EXIT_BAD_INPUT = 2
SAMPLING_FLAGS: dict[str, tuple[type, str]] = {
    "max_tokens": (int, "new tokens at most"),
    "temperature": (float, "0 takes the most probable token; 1 draws from the model's own distribution [0]"),
    "top_k": (int, "draw from the k most probable tokens; 0 is all"),
    "top_p": (float, "draw from the fewest tokens that reach this probability"),
    "min_p": (float, "drop tokens less probable than this share of the most probable one"),
    "min_tokens": (int, "new tokens before an end-of-text token"),
}


def parser() -> argparse.ArgumentParser:
    root = argparse.ArgumentParser(prog="surefoot", description="An LLM serving engine.")
    root.add_argument("--version", action="version", version=f"surefoot {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND")

    serve = commands.add_parser("serve", help="serve a model over the OpenAI API")
    _add_settings(serve)

    chat = commands.add_parser("chat", help="talk to a model in the terminal")
    _add_settings(chat)
    _add_sampling(chat)

    generate = commands.add_parser("generate", help="continue prompts: arguments, or lines of standard input")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT")
    _add_settings(generate)
    _add_sampling(generate)
    return root


def _add_settings(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group(
        "settings", f"also from a TOML file, or from the environment as {settings_module.ENVIRONMENT_PREFIX}<NAME>"
    )
    group.add_argument("--config", metavar="FILE", default="", help="TOML file with settings by name")
    for info in settings_module.infos():
        note = f"{info.help} [{info.default or 'none'}]".replace("%", "%%")
        if info.is_switch:
            group.add_argument(info.flag, action="store_true", default=None, help=info.help)
        else:
            group.add_argument(info.flag, dest=info.name, metavar="VALUE", help=note)


def _add_sampling(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    for name, (kind, text) in SAMPLING_FLAGS.items():
        group.add_argument("--" + name.replace("_", "-"), type=kind, metavar="N", help=text)
    group.add_argument("--sampling-seed", dest="sampling_seed", type=int, metavar="N", help="same seed, same output")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before this text; repeatable")


def _settings(arguments: dict[str, Any]) -> Settings:
    names = {info.name for info in settings_module.infos()}
    given = {name: value for name, value in arguments.items() if name in names and value is not None}
    return settings_module.load(given, arguments["config"])


def _sampling(arguments: dict[str, Any]) -> SamplingParams:
    given = {name: arguments[name] for name in SAMPLING_FLAGS if arguments[name] is not None}
    return SamplingParams(**{"temperature": 0, **given}, seed=arguments["sampling_seed"], stop=tuple(arguments["stop"]))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = vars(parser().parse_args(argv))
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
                return _generate(settings, _sampling(arguments), arguments["prompts"])
    except ValueError as error:  # settings, checkpoints, plans and parameters: the message has the way out
        console.print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 130


def _generate(settings: Settings, params: SamplingParams, prompts: list[str]) -> int:
    from surefoot.llm import LLM

    wanted = prompts or [line.rstrip("\n") for line in sys.stdin]
    if not all(wanted) or not wanted:
        raise ValueError("there is no prompt: give it as an argument, or one a line on standard input")
    with LLM(settings) as llm:
        for prompt, completion in zip(wanted, llm.generate(wanted, params), strict=True):
            print(prompt + completion.text)
    return 0


def _chat(settings: Settings, params: SamplingParams, console: Console) -> int:
    from surefoot.llm import LLM

    with LLM(settings) as llm:
        console.print(f"{llm.plan.served_model_name}: Ctrl-D ends, Ctrl-C stops an answer.")
        messages: list[dict[str, str]] = []
        while (text := _ask()) is not None:
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
                console.print(f"[bold red]error:[/] {error}", highlight=False)
                messages.pop()
                continue
            print()
            messages.append({"role": "assistant", "content": answer})
    return 0


def _ask() -> str | None:
    """The next line, None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


if __name__ == "__main__":
    sys.exit(main())
