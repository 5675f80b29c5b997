"""`surefoot bench serve`: how fast servers answer, side by side."""

from __future__ import annotations

import argparse
import platform
import random
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from surefoot.bench.results import FORMAT, BenchResult, RequestRecord, ServerInfo, Summary, summaries
from surefoot.bench.results import Workload as WorkloadRecord
from surefoot.bench.workloads import (
    ConversationWorkload,
    Length,
    Maker,
    PrefixWorkload,
    PromptKind,
    RandomWorkload,
    ShareGPTWorkload,
    TraceWorkload,
    Workload,
    WorkloadError,
)
from surefoot.config.hardware import probe

if TYPE_CHECKING:
    from surefoot.bench.measure import Level, Measurement

EXIT_OK, EXIT_FAILED_REQUESTS, EXIT_BAD_ARGUMENTS, EXIT_INTERRUPTED = 0, 1, 2, 130
BUSY_SECONDS = 1.0  # of a run that is long enough to say
BUSY_FROM = 0.8  # share of its time that the client may compute before its own delays show in the numbers


class _Terminal:
    """A bar for each run."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None)

    def begin(self, server: str, level: str, repeat: int, requests: int) -> None:
        description = f"{server} {level}" + (f" #{repeat + 1}" if repeat else "")
        self._progress.reset(self._task, total=requests, description=description)

    def request_ended(self, record: RequestRecord) -> None:
        self._progress.advance(self._task)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_servers(parser.add_argument_group("servers"))
    _add_workload(parser.add_argument_group("workload"))
    _add_load(parser.add_argument_group("load"))
    _add_output(parser.add_argument_group("output"))


def _add_servers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "url", nargs="?", default="http://127.0.0.1:8000", metavar="URL", help="of the server [%(default)s]"
    )
    group.add_argument(
        "--against", action="append", default=[], metavar="URL", help="measure this one too, in turns; repeatable"
    )
    group.add_argument("--name", action="append", default=[], metavar="NAME", help="of the servers, in their order")
    group.add_argument("--model", default="", metavar="NAME", help="model to ask for [the first that a server lists]")
    group.add_argument("--api-key", default="", metavar="KEY", help="key of the servers [none]")
    group.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    group.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="of one request [%(default)s]")
    group.add_argument("--stop-at-eos", action="store_true", help="answers may end early; else ignore_eos is sent")


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--workload",
        choices=("random", "prefix", "conversations", "sharegpt", "trace"),
        default="random",
        help="%(choices)s [%(default)s]",
    )
    group.add_argument(
        "--input",
        type=length,
        default=Length(128, 128),
        metavar="TOKENS",
        help="of a prompt: 128, or 64-256 [128]",
    )
    group.add_argument("--output", type=length, default=Length(128, 128), metavar="TOKENS", help="of an answer [128]")
    group.add_argument(
        "--prefix-length", type=int, default=1000, metavar="TOKENS", help="of shared prefixes [%(default)s]"
    )
    group.add_argument("--prefixes", type=int, default=1, metavar="N", help="how many there are [%(default)s]")
    group.add_argument("--turns", type=length, default=Length(4, 4), metavar="N", help="of a conversation [4]")
    group.add_argument("--file", type=Path, metavar="FILE", help="of sharegpt (JSON) or trace (JSONL)")
    group.add_argument(
        "--speed", type=float, default=1.0, metavar="X", help="at which a trace is replayed [%(default)s]"
    )
    group.add_argument("--prompt-kind", choices=("ids", "words"), help="[ids; words for --chat and conversations]")
    group.add_argument("--vocab-size", type=int, default=30000, metavar="N", help="ids are below this [%(default)s]")
    group.add_argument(
        "--prompts",
        choices=("fresh", "same"),
        default="fresh",
        help="whether every run has prompts of its own [%(default)s]",
    )
    group.add_argument("--seed", type=int, metavar="N", help="of the prompts [from the clock]")


def _add_load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--concurrency", type=int, nargs="+", default=[], metavar="N", help="clients of a closed loop [1 16 64]"
    )
    group.add_argument(
        "--rate", type=float, nargs="+", default=[], metavar="R", help="requests a second of an open loop"
    )
    group.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="1: Poisson; below: bursts; above: evener [%(default)s]",
    )
    group.add_argument(
        "--find-rate", action="store_true", help="the highest rate that keeps --ttft-limit and --itl-limit"
    )
    group.add_argument("--ttft-limit", type=float, default=2.0, metavar="SECONDS", help="[%(default)s]")
    group.add_argument(
        "--itl-limit", type=float, default=0.2, metavar="SECONDS", help="between pieces of text [%(default)s]"
    )
    group.add_argument(
        "--limit-share",
        type=float,
        default=0.9,
        metavar="X",
        help="of requests and of gaps that keep them [%(default)s]",
    )
    group.add_argument(
        "--requests", type=int, default=0, metavar="N", help="of a run [twice the concurrency, 32 at least with --rate]"
    )
    group.add_argument("--repeat", type=int, default=1, metavar="N", help="runs of each server and level [%(default)s]")
    group.add_argument(
        "--warm-up", type=int, default=4, metavar="N", help="requests before the first run [%(default)s]"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    group.add_argument("--html", type=Path, metavar="FILE", help="a report with figures")
    group.add_argument("--figures", type=Path, metavar="DIR", help="the figures as PNG and SVG")
    group.add_argument("--allow-errors", action="store_true", help="exit with 0 although requests failed")


def length(text: str) -> Length:
    try:
        return Length.parse(text)
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(args: argparse.Namespace, console: Console) -> int:
    """Raises WorkloadError or UnreachableError, both ValueErrors, before anything is measured."""
    if args.html or args.figures:
        from surefoot.bench.figures import MissingMatplotlib, require_matplotlib

        try:
            require_matplotlib()
        except MissingMatplotlib as error:
            raise WorkloadError(str(error)) from error
    from surefoot.bench import servers  # what asks servers is not loaded for any other command
    from surefoot.bench.client import Target
    from surefoot.bench.measure import Limits, Measurement

    workload = _workload(args)
    levels = _levels(args)
    found = [servers.look_at(name, url, args.model, args.api_key) for name, url in _names(args).items()]
    extra = {} if args.stop_at_eos else {"ignore_eos": True}
    targets = {info.name: Target(info.url, info.model, args.chat, args.api_key, args.timeout, extra) for info in found}
    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    interrupted = False
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    ) as progress:
        measurement = Measurement(targets, workload, seed, args.prompts == "same", _Terminal(progress))
        highest: dict[str, float] = {}
        try:
            if args.warm_up:
                measurement.warm_up(args.warm_up)
            if args.find_rate:
                limits = Limits(args.ttft_limit, args.itl_limit, args.limit_share)
                for name in targets:
                    first = args.rate[0] if args.rate else 1.0
                    highest[name] = measurement.find_rate(name, limits, first, args.burstiness, args.requests or 32)
            else:
                for level in levels:
                    measurement.run_level(
                        level, args.requests or max(2 * level.clients, 32 if level.rate else 2), args.repeat
                    )
        except KeyboardInterrupt:
            interrupted = True
    if not measurement.runs:
        console.print("nothing was measured")
        return EXIT_INTERRUPTED
    result = _result(args, workload, seed, found, measurement)
    _print(result, highest, Console(file=sys.stdout, highlight=False))
    _write(args, result, console)
    failed = any(record.error for run in result.runs for record in run.requests)
    if interrupted:
        return EXIT_INTERRUPTED
    return EXIT_FAILED_REQUESTS if failed and not args.allow_errors else EXIT_OK


def _names(args: argparse.Namespace) -> dict[str, str]:
    urls = [url.rstrip("/").removesuffix("/v1") for url in (args.url, *args.against)]
    names = [*args.name, *(url.partition("://")[2] for url in urls[len(args.name) :])]
    if len(set(names)) < len(urls) or len(names) > len(urls):
        raise WorkloadError(f"{len(urls)} servers need as many different names: give --name for each")
    return dict(zip(names, urls, strict=True))


def _levels(args: argparse.Namespace) -> list[Level]:
    from surefoot.bench.measure import Level

    if args.workload == "trace" and not args.concurrency and not args.rate:
        return [Level(0, 0.0, args.burstiness)]
    wrong = [value for value in (*args.concurrency, *args.rate) if value <= 0]
    if wrong:
        raise WorkloadError(f"{wrong[0]} is no load: --concurrency and --rate are positive")
    levels = [Level(0, rate, args.burstiness) for rate in args.rate]
    return [Level(clients, 0.0, 1.0) for clients in args.concurrency or ([] if levels else [1, 16, 64])] + levels


def _workload(args: argparse.Namespace) -> Workload:
    kind: PromptKind = args.prompt_kind or ("words" if args.chat or args.workload == "conversations" else "ids")
    if kind == "ids" and args.chat:
        raise WorkloadError("--chat takes no token ids: use --prompt-kind words")
    maker = Maker(kind, args.vocab_size)
    if args.workload in ("sharegpt", "trace") and args.file is None:
        raise WorkloadError(f"--workload {args.workload} needs --file")
    match args.workload:
        case "random":
            return RandomWorkload(maker, args.input, args.output)
        case "prefix":
            return PrefixWorkload(maker, args.prefixes, args.prefix_length, args.input, args.output)
        case "conversations":
            return ConversationWorkload(maker, args.turns, args.input, args.output)
        case "sharegpt":
            return ShareGPTWorkload(args.file, args.input.high)
        case _:
            return TraceWorkload(args.file, maker, args.speed)


def _result(
    args: argparse.Namespace, workload: Workload, seed: int, found: list[ServerInfo], measurement: Measurement
) -> BenchResult:
    from surefoot.bench.measure import hygiene

    machine = probe()
    warnings = list(dict.fromkeys(hygiene(workload, args.chat, args.prompts == "same", measurement.runs)))
    busy = max((run.client_busy for run in measurement.runs if run.seconds >= BUSY_SECONDS), default=0.0)
    if busy > BUSY_FROM:
        warnings.append(f"the client computed for {busy:.0%} of its time: it may be what limits the numbers")
    return BenchResult(
        format=FORMAT,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{machine.num_cpus} x {machine.cpu_name}",
        versions=f"Python {platform.python_version()}",
        command=shlex.join(["surefoot", *sys.argv[1:]]),
        workload=WorkloadRecord(workload.name, workload.describe(), seed, args.prompts, workload.shared_tokens),
        servers=tuple(found),
        runs=tuple(measurement.runs),
        warnings=tuple(warnings),
    )


def _print(result: BenchResult, highest: dict[str, float], out: Console) -> None:
    out.print(f"{result.workload.description}; seed {result.workload.seed}")
    seen = "no prompt was sent before" if result.workload.prompts == "fresh" else "every run sends the same prompts"
    out.print(f"prompts: {result.workload.prompts}, {seen}")
    for server in result.servers:
        out.print(f"{server.name}: {server.software}, model {server.model}, plan {server.plan_hash}")
    several = len(result.servers) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("level", *(["server"] if several else [])):
        table.add_column(column, overflow="fold")
    for column in ("tok/s", "TTFT\nms p50", "\np99", "gap\nms p50", "\np99", "whole\ns p50", "hits", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    if several:
        table.add_column(f"{result.servers[0].name}\n/ this", justify="right")
    found = summaries(result)
    for summary in found:
        table.add_row(*_cells(summary, result.servers[0].name, several))
    out.print(table)
    for summary in found:
        for kind, count in {**summary.errors, "answer with too few tokens": summary.short}.items():
            if count:
                out.print(f"[yellow]{summary.server} {summary.level}: {count} x {kind}[/yellow]", soft_wrap=True)
    for name, rate in highest.items():
        out.print(f"{name}: {rate:.2f} requests a second keep the limits")
    for warning in result.warnings:
        out.print(f"[yellow]{warning}[/yellow]", soft_wrap=True)


def _cells(summary: Summary, first: str, several: bool) -> list[str]:
    cells = [
        summary.level,
        *([summary.server] if several else []),
        f"{summary.output_rate:.1f}",
        f"{1000 * summary.ttft.p50:.0f}",
        f"{1000 * summary.ttft.p99:.0f}",
        f"{1000 * summary.inter_token.p50:.1f}",
        f"{1000 * summary.inter_token.p99:.1f}",
        f"{summary.end_to_end.p50:.2f}",
        "?" if summary.hit_rate < 0 else f"{summary.hit_rate:.0%}",
        str(sum(summary.errors.values())),
    ]
    if several:
        cells.append(
            f"{summary.ratio:.2f}\n{summary.ratio_low:.2f}-{summary.ratio_high:.2f}" if summary.server != first else ""
        )
    return cells


def _write(args: argparse.Namespace, result: BenchResult, console: Console) -> None:
    if args.json:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)))
        console.print(f"written: {args.json}")
    if args.html:
        from surefoot.bench.report import write_html

        write_html(result, args.html)
        console.print(f"written: {args.html}")
    if args.figures:
        from surefoot.bench.figures import draw, export

        paths = export(draw(result), args.figures)
        console.print(f"written: {len(paths)} files in {args.figures}")
