"""The command line: what each command is for, which flags it has, and what its exit code is.

What a command does is in `commands`, imported only when it runs: `surefoot --help` and `surefoot plan` load no torch.
"""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence

import shtab
from rich.console import Console
from rich.markup import escape

from surefoot import __version__
from surefoot.commands import bench_serve, flags
from surefoot.commands.flags import Arguments
from surefoot.config import settings as settings_module
from surefoot.config.settings import limit_openmp_spinning

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE: who read the output has left
WIDEST_HELP = 100
SHELLS = ("bash", "zsh", "fish")

COMMANDS = {
    "serve": "serve a model over the OpenAI API",
    "chat": "talk to a model in the terminal",
    "generate": "continue prompts, or answer a file of requests",
    "plan": "show what serve would do here, without loading the weights",
    "bench": "measure servers side by side, the engine alone, or one step",
    "completion": "print a script that completes commands in your shell",
}
USAGE = {
    "serve": "[MODEL] [flags]",
    "chat": "[MODEL] [flags]",
    "generate": "[MODEL] [PROMPT ...] [flags]",
    "plan": "[MODEL] [flags]",
    "bench": "KIND [URL or MODEL] [flags]",
    "completion": "SHELL",
}

ROOT_EXAMPLES = """\
surefoot serve model.gguf --port 8001
surefoot chat
surefoot generate "The capital of France is" --max-tokens 8
surefoot plan model.gguf --max-model-len 4096
surefoot bench serve http://127.0.0.1:8000
eval "$(surefoot completion bash)"
"""

MODEL = """\
MODEL is a GGUF file, the directory of a Hugging Face model, or its id on the
hub (org/name). Without it, SmolLM2-135M-Instruct runs: 98 MB, fetched once."""

MORE = """\
`surefoot COMMAND --help` has more examples and all flags.
Docs are in the source tree: README.md to begin with, docs/settings.md for the
settings, docs/http.md for the API, docs/architecture.md for the design."""

EXAMPLES = {
    "serve": """\
surefoot serve                       the default model on 127.0.0.1:8000
surefoot serve model.gguf --port 8001
surefoot serve org/name --max-model-len 4096 --max-running-requests 64
SUREFOOT_API_KEY=secret surefoot serve --config surefoot.toml""",
    "chat": """\
surefoot chat                        type /help there for what else it does
surefoot chat model.gguf --temperature 0
surefoot chat --url http://127.0.0.1:8000/v1
echo "What is the capital of France?" | surefoot chat""",
    "generate": """\
surefoot generate "The capital of France is" --max-tokens 8
surefoot generate model.gguf "Once upon a time" "In 1912" --temperature 0.8
surefoot generate --stop . < prompts.txt
surefoot generate -i requests.jsonl -o answers.jsonl""",
    "plan": """\
surefoot plan                        the default model on this machine
surefoot plan model.gguf --max-running-requests 256 --max-model-len 8192
surefoot plan model.gguf --json | jq .bounds""",
    "bench": """\
surefoot bench serve --against http://127.0.0.1:8080 --html report.html
surefoot bench serve --workload prefix --concurrency 16 --repeat 3
surefoot bench serve --find-rate --ttft-limit 1 --itl-limit 0.1
surefoot bench step model.gguf --context 1024""",
    "completion": """\
eval "$(surefoot completion bash)"   for this shell, or as a line of ~/.bashrc
surefoot completion zsh > ~/.zfunc/_surefoot
surefoot completion fish > ~/.config/fish/completions/surefoot.fish""",
}

PROMPTS = """\
A first argument without spaces that has a slash, ends in .gguf or names a
directory here is the MODEL. With --model, all arguments are prompts. A prompt
is printed with its continuation."""

PLAN = "Takes the flags of `serve`. Exits with 2 if the configuration cannot work."

BATCH = """\
A line of FILE is {"prompt": "..."} or {"messages": [...]}, with any field of
the API and perhaps an "id"; or it is a line of an OpenAI batch: {"custom_id",
"method", "url", "body"}. Answers are lines in the same order. A line that is
wrong gets its error as its answer. Sampling flags fill in what a line leaves
out."""


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, but no wider than is easy to read."""

    def __init__(self, prog: str) -> None:
        width = min(WIDEST_HELP, shutil.get_terminal_size().columns) - 2
        super().__init__(prog, max_help_position=30, width=width)

    def _format_action(self, action: argparse.Action) -> str:
        """Commands are listed without a headline of their own."""
        if isinstance(action, argparse._SubParsersAction):
            return "".join(map(self._format_action, action._get_subactions()))
        return super()._format_action(action)


def parser() -> argparse.ArgumentParser:
    return _parsers()[0]


def _parsers() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Of everything, and of each command."""
    root = argparse.ArgumentParser(
        prog="surefoot",
        usage="surefoot COMMAND [flags]",
        description="An LLM serving engine that decides once, isolates failures, and keeps evidence.",
        formatter_class=HelpFormatter,
        add_help=False,
    )
    subparsers = root.add_subparsers(
        dest="command", required=True, metavar="COMMAND", title="commands", prog="surefoot"
    )
    root.add_argument_group("examples", ROOT_EXAMPLES)
    root.add_argument_group("models", MODEL)
    more = root.add_argument_group("more", MORE)
    more.add_argument("--version", action="version", version=f"surefoot {__version__}", help="show the version")
    _add_help(more)
    commands = {}
    for name, add_flags in (
        ("serve", _add_serve),
        ("chat", _add_chat),
        ("generate", _add_generate),
        ("plan", _add_plan),
        ("bench", _add_bench),
        ("completion", _add_completion),
    ):
        what = COMMANDS[name]
        commands[name] = subparsers.add_parser(
            name,
            usage=f"surefoot {name} {USAGE[name]}",
            help=what,
            description=what[0].upper() + what[1:] + ".",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        commands[name].add_argument_group("examples", EXAMPLES[name])
        add_flags(commands[name])
        _add_help(commands[name].add_argument_group("more"))
    return root, commands


def _add_help(group: argparse._ArgumentGroup) -> None:
    group.add_argument("-h", "--help", action="help", help="show this text")


def _add_serve(command: argparse.ArgumentParser) -> None:
    flags.add_settings(command, settings_module.infos(), model_argument=True)


def _add_chat(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("conversation")
    group.add_argument("--url", metavar="URL", default="", help="talk to this server instead of loading a model")
    group.add_argument("--api-key", metavar="KEY", help="key of that server [none]")
    group.add_argument("--system", metavar="TEXT", default="", help="system message to begin with")
    flags.add_settings(command, _offline_settings(), model_argument=True)
    flags.add_sampling(command, flags.CHAT_DEFAULTS)


def _add_generate(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("prompts", PROMPTS)
    group.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to continue; without any, lines of stdin")
    group = command.add_argument_group("batches", BATCH)
    flags.complete_files(group.add_argument("-i", "--input", metavar="FILE", help="JSONL file of requests; - is stdin"))
    flags.complete_files(group.add_argument("-o", "--output", metavar="FILE", help="file of answers [stdout]"))
    group.add_argument("--resume", action="store_true", help="go on where an earlier run has stopped")
    flags.add_settings(command, _offline_settings("served_model_name"), model_argument=False)
    flags.add_sampling(command, flags.GENERATE_DEFAULTS)


def _add_plan(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("output", PLAN)
    group.add_argument("--json", action="store_true", help="for programs: one JSON object")
    flags.add_settings(command, settings_module.infos(), model_argument=True)


def _add_bench(command: argparse.ArgumentParser) -> None:
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND", title="kinds", prog="surefoot bench")
    for kind, (what, argument, add_flags) in BENCHES.items():
        one = kinds.add_parser(
            kind,
            usage=f"surefoot bench {kind} [{argument}] [flags]",
            help=what,
            description=what[0].upper() + what[1:] + ".",
            formatter_class=HelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        add_flags(one)
        _add_help(one.add_argument_group("more"))


def _add_bench_offline(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("load")
    group.add_argument("--requests", type=int, default=16, metavar="N", help="all at once [%(default)s]")
    for name in ("input", "output"):
        group.add_argument(
            f"--{name}", type=bench_serve.length, default=bench_serve.length("128"), metavar="TOKENS", help="[128]"
        )
    group.add_argument("--prefix-length", type=int, default=0, metavar="TOKENS", help="that all share [%(default)s]")
    group.add_argument("--bench-seed", type=int, metavar="N", help="of the prompts [from the clock]")
    _add_engine_bench(command, group, repeat=3)


def _add_bench_step(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("steps")
    group.add_argument("--context", type=int, default=256, metavar="TOKENS", help="of each row [%(default)s]")
    flags.complete_files(group.add_argument("--csv", metavar="FILE", help="the table in full"))
    _add_engine_bench(command, group, repeat=10)


def _add_engine_bench(command: argparse.ArgumentParser, group: argparse._ArgumentGroup, repeat: int) -> None:
    group.add_argument("--repeat", type=int, default=repeat, metavar="N", help="measurements [%(default)s]")
    flags.complete_files(group.add_argument("--json", metavar="FILE", help="everything, for programs"))
    flags.add_settings(command, _offline_settings(), model_argument=True)


BENCHES = {
    "serve": ("measure servers over HTTP, side by side", "URL", bench_serve.add_arguments),
    "offline": ("measure the engine without HTTP", "MODEL", _add_bench_offline),
    "step": ("measure steps by kind and size, beside this machine's limits", "MODEL", _add_bench_step),
}


def _add_completion(command: argparse.ArgumentParser) -> None:
    command.add_argument_group("shells").add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))


def _offline_settings(*also: str) -> list[settings_module.SettingInfo]:
    return [info for info in settings_module.infos() if not info.of_server or info.name in also]


def main(argv: Sequence[str] | None = None) -> int:
    _open_standard_streams()
    try:
        return _run(sys.argv[1:] if argv is None else argv)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter's last flush must not fail
        return EXIT_BROKEN_PIPE
    except (ValueError, OSError, MemoryError) as error:  # of settings, checkpoints, plans and files: it has the way out
        message = f"[bold red]error:[/] {escape(str(error) or 'out of memory')}"
        Console(stderr=True).print(message, highlight=False, soft_wrap=True)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _open_standard_streams() -> None:
    """/dev/null for those that were closed (`<&-`): else the next file that is opened takes the number of one."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if vars(sys)[name] is None:
            number = os.open(os.devnull, os.O_RDWR)  # the lowest that is free
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))


def _run(argv: Sequence[str]) -> int:
    if not argv:
        parser().print_help(sys.stderr)
        return EXIT_BAD_INPUT
    arguments = _parse(argv)
    if arguments["command"] == "completion":
        print(shtab.complete(parser(), arguments["shell"]))
        return 0
    console = Console(stderr=True)
    if arguments["command"] == "bench" and arguments["kind"] == "serve":
        return bench_serve.run(argparse.Namespace(**arguments), console)
    settings = flags.settings_of(arguments)
    limit_openmp_spinning()
    match arguments["command"]:
        case "serve":
            from surefoot import launch

            return launch.serve(settings, console)
        case "plan":
            from surefoot.commands import plan

            return plan.run(settings, arguments["json"], console)
        case "chat":
            from surefoot.commands import chat

            return chat.run(settings, arguments, console)
        case "bench" if arguments["kind"] == "offline":
            from surefoot.commands import bench_offline

            return bench_offline.run(settings, arguments, console)
        case "bench":
            from surefoot.commands import bench_step

            return bench_step.run(settings, arguments, console)
        case _:
            from surefoot.commands import generate

            return generate.run(settings, arguments, console)


def _parse(argv: Sequence[str]) -> Arguments:
    """Exits if a word is not known. Raises ValueError if a model stands among the prompts."""
    root, commands = _parsers()
    first = argv[0]
    if not first.startswith("-") and first not in commands:
        root.error(f"there is no command {first}{_meant(first, commands)}`surefoot --help` lists all")
    parsed, unknown = root.parse_known_args(argv)
    arguments, name = vars(parsed), parsed.command
    late = [word for word in unknown if name == "generate" and not word.startswith("-")]  # prompts after flags
    if wrong := [word for word in unknown if word not in late]:
        if name == "bench":
            see = f"`surefoot bench {parsed.kind} --help` lists all flags"
            commands[name].error(f"unexpected argument {wrong[0]!r}: {see}")
        commands[name].error(_what_is(wrong[0], name, commands))
    if name == "generate":
        return flags.split_model({**arguments, "prompts": [*arguments["prompts"], *late]})
    return arguments


def _what_is(word: str, name: str, commands: Mapping[str, argparse.ArgumentParser]) -> str:
    """The error about a word of the command line that command `name` does not take."""
    flag = word.partition("=")[0]
    see = f"`surefoot {name} --help` lists all flags"
    if not flag.startswith("-"):
        return f"unexpected argument {word!r}: {see}"
    others = [other for other, command in commands.items() if flag in flags.of_command(command)]
    if others:
        return f"{flag} means nothing to {name}, it is a flag of {', '.join(others)}: {see}"
    return f"there is no {flag}{_meant(flag, flags.of_command(commands[name]))}{see}"


def _meant(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1)
    return f": did you mean {close[0]}? " if close else ": "


if __name__ == "__main__":
    sys.exit(main())
