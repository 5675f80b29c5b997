"""`surefoot generate`: prompts from arguments or from lines of standard input, or a batch from a JSONL file."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from surefoot.commands import batch, flags
from surefoot.commands.flags import Arguments, counted
from surefoot.commands.in_process_server import InProcessServer
from surefoot.config.resolve import server_plan
from surefoot.config.settings import Settings
from surefoot.http import json_body
from surefoot.llm import LLM, GenerationError
from surefoot.protocol.messages import Event, TokenBatch

EXIT_OK, EXIT_FAILED = 0, 1
BYTE_ORDER_MARK = "\N{BYTE ORDER MARK}"  # editors on Windows begin a file with it

Json = dict[str, Any]


def run(settings: Settings, arguments: Arguments, console: Console) -> int:
    """Raises ValueError or OSError for what is wrong with flags, files or prompts."""
    if arguments["input"]:
        if arguments["prompts"]:
            raise ValueError("prompts are given as arguments and by --input: give one of them")
        return _run_batch(settings, arguments, console)
    for name in ("output", "resume"):
        if arguments[name]:
            raise ValueError(f"--{name} is for batches: give the file of requests with --input FILE")
    params = flags.sampling_params(flags.GENERATE_DEFAULTS | flags.given_sampling(arguments))
    prompts = arguments["prompts"] or _read_prompts(console)
    if not all(prompts) or not prompts:
        model = arguments.get("model_argument")
        taken = f" ({model} was taken as the model; with --model MODEL it would be a prompt)" if model else ""
        raise ValueError(f"there is no prompt{taken}: give it as an argument, or one a line on standard input")
    with load(settings, console) as llm:
        try:
            with console.status(f"generating {counted(len(prompts), 'completion')}"):
                completions = llm.generate(prompts, params)
        except GenerationError as error:
            console.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
            return EXIT_FAILED
        for prompt, completion in zip(prompts, completions, strict=True):
            print(prompt + completion.text)
    return EXIT_OK


def load(settings: Settings, console: Console) -> LLM:
    with console.status("loading the model"):
        return LLM(settings)


def _read_prompts(console: Console) -> list[str]:
    if sys.stdin.isatty():
        console.print("prompts, one a line; Ctrl-D ends:")
    text = sys.stdin.read().removeprefix(BYTE_ORDER_MARK)
    return [line for line in text.split("\n") if line.strip()]


# ---- Batches ---------------------------------------------------------------------------------------------------------


def _run_batch(settings: Settings, arguments: Arguments, console: Console) -> int:
    given, name, resume = flags.given_sampling(arguments), arguments["output"], arguments["resume"]
    if resume and not name:
        raise ValueError("--resume needs --output FILE: the answers that there are")
    texts = _read_lines(arguments["input"])
    lines = [batch.parse(text, index, given, flags.GENERATE_DEFAULTS) for index, text in enumerate(texts)]
    with _open_output(arguments["input"], name, resume) as output:
        done = _skip_answered(flags.path_of(name), lines) if resume else 0
        if done == len(lines):
            console.print("all lines are answered already")
            return EXIT_OK
        with load(settings, console) as llm, _Report(console, len(lines), done) as report:
            asyncio.run(_answer(llm, settings, lines[done:], output, report))
    return EXIT_OK


async def _answer(llm: LLM, settings: Settings, lines: Sequence[batch.Line], output: BinaryIO, report: _Report) -> None:
    def write(result: Json) -> None:
        output.write(batch.json_line(result))
        output.flush()
        report.count(result)

    plan = server_plan(msgspec.structs.replace(settings, api_key=""), llm.plan)
    async with InProcessServer(llm, plan) as server:
        server.client.subscribe(report.observe)
        await batch.answer_all(server, lines, llm.places, write)


def _read_lines(name: str) -> list[bytes]:
    """Without blank ones."""
    data = sys.stdin.buffer.read() if name == "-" else _read(flags.path_of(name))
    lines = [line for line in data.removeprefix(codecs.BOM_UTF8).split(b"\n") if line.strip()]
    if not lines:
        raise ValueError(f"{name} has no lines: give a JSONL file, one request a line")
    return lines


def _read(path: Path) -> bytes:
    with flags.file_errors(path):
        return path.read_bytes()


@contextlib.contextmanager
def _open_output(source: str, name: str, resume: bool) -> Iterator[BinaryIO]:
    """What is written goes to its end. It may be a pipe, as /dev/stdout often is.

    Raises ValueError if something would be lost in the file.
    """
    if not name:
        yield sys.stdout.buffer
        return
    path = flags.path_of(name)
    with flags.file_errors(path):
        file = path.open("ab")
    with file:
        if path.is_file():
            if os.path.samefile("/dev/stdin" if source == "-" else flags.path_of(source), path):
                raise ValueError(f"{path} is the input too: give another --output")
            _lock(file)
            if not resume and file.tell():
                raise ValueError(f"{path} has answers already: go on with --resume, or give another file")
        yield file


def _lock(file: BinaryIO) -> None:
    """Until it is closed. Raises ValueError if another run has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"another run writes {file.name}: wait for its end, or give another --output") from error
    except OSError:
        pass  # not every file system has locks


def _skip_answered(path: Path, lines: Sequence[batch.Line]) -> int:
    """How many lines have answers in the file, whose end is then where the next one belongs.

    Raises ValueError if they are answers to something else.
    """
    if not path.is_file():
        raise ValueError(f"--resume goes on in a file, and {path} is none: give another --output")
    *answers, rest = _read(path).split(b"\n")
    if len(answers) > len(lines):
        has, only = counted(len(answers), "answer"), counted(len(lines), "line")
        raise ValueError(f"{path} has {has}, and the input only {only}: give another file")
    for number, (answer, line) in enumerate(zip(answers, lines, strict=False), 1):
        if not line.matches(_parse_answer(answer)):
            raise ValueError(f"line {number} of {path} does not answer line {number} of the input: give another file")
    if rest and not (len(answers) < len(lines) and lines[len(answers)].may_begin(rest)):
        raise ValueError(f"the end of {path} is no answer to the input that was cut short: give another file")
    os.truncate(path, path.stat().st_size - len(rest))  # half a line, if the last run was killed
    return len(answers)


def _parse_answer(text: bytes) -> Json:
    """Empty, if it is none."""
    try:
        answer = json_body.parse(text)
    except json_body.InvalidJson:
        return {}
    return answer if isinstance(answer, dict) else {}


class _Report:
    """A bar while a batch runs, and one line about it at its end. Both go to standard error."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._console = console
        self._total = total
        self._done = done
        self._before = f" ({done} before)" if done else ""
        self._errors = 0
        self._tokens = 0
        columns = BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn()
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._task = self._progress.add_task("", total=total, completed=done, speed="")

    def __enter__(self) -> _Report:
        self._began = time.monotonic()
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._progress.stop()
        seconds = max(1e-3, time.monotonic() - self._began)
        ended = "stopped early: " if kind is not None else ""
        lines = counted(self._total, "line")
        self._console.print(
            f"{ended}{self._done} of {lines} answered{self._before}, {self._errors} with an error; "
            f"{counted(self._tokens, 'token')} in {seconds:.1f} s ({self._tokens / seconds:.0f} tok/s)",
            highlight=False,
            soft_wrap=True,
        )

    def count(self, result: Json) -> None:
        """One line has been answered."""
        status = result.get("response", result).get("status_code", 200)
        self._done += 1
        self._errors += status != 200
        self._progress.advance(self._task)

    def observe(self, event: Event) -> None:
        if isinstance(event, TokenBatch):
            self._tokens += len(event.token_ids)
            speed = self._tokens / max(1e-3, time.monotonic() - self._began)
            self._progress.update(self._task, speed=f"{speed:.0f} tok/s")
