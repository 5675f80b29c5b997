"""`surefoot bench serve`: how fast servers answer, side by side."""

from __future__ import annotations

import argparse
import math
import platform
import random
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from surefoot import __version__
from surefoot.bench.results import FORMAT, BenchResult, RequestRecord, ServerInfo
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
from surefoot.commands import bench_serve_output as output
from surefoot.config.hardware import probe

if TYPE_CHECKING:
    from surefoot.bench.measure import Level, Measurement

EXIT_OK, EXIT_FAILED_REQUESTS = 0, 1
LONGEST_QUESTION = 1024  # tokens, of a ShareGPT file
CLIENTS_EACH = 128  # that one process takes with ease, each with a stream of its own
RATE_EACH = 100.0  # requests a second, likewise

# The flags that make a workload; any other would be ignored, and is refused.
WORKLOAD_FLAGS: dict[str, dict[str, Any]] = {
    "random": {"input": Length(128, 128), "output": Length(128, 128), "prompt_kind": None, "vocab_size": 30000},
    "prefix": {
        "input": Length(128, 128),
        "output": Length(128, 128),
        "prefix_length": 1000,
        "prefixes": 1,
        "prompt_kind": None,
        "vocab_size": 30000,
    },
    "conversations": {"input": Length(128, 128), "output": Length(128, 128), "turns": Length(4, 4)},
    "sharegpt": {"input": Length(1, LONGEST_QUESTION), "output": None, "file": None},
    "trace": {"file": None, "speed": 1.0, "prompt_kind": None, "vocab_size": 30000},
}
LIMIT_FLAGS = {"ttft_limit": 2.0, "itl_limit": 0.2, "limit_share": 0.9}


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
    group.add_argument("--input", type=length, metavar="TOKENS", help="of a prompt: 128, or 64-256 [128]")
    group.add_argument("--output", type=length, metavar="TOKENS", help="of an answer [128]")
    group.add_argument("--prefix-length", type=count, metavar="TOKENS", help="of shared prefixes [1000]")
    group.add_argument("--prefixes", type=count, metavar="N", help="how many there are [1]")
    group.add_argument("--turns", type=length, metavar="N", help="of a conversation [4]")
    group.add_argument("--file", type=Path, metavar="FILE", help="of sharegpt (JSON) or trace (JSONL)")
    group.add_argument("--speed", type=float, metavar="X", help="at which a trace is replayed [1]")
    group.add_argument("--prompt-kind", choices=("ids", "words"), help="[ids; words for --chat]")
    group.add_argument("--vocab-size", type=count, metavar="N", help="ids are below this [30000]")
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
    group.add_argument("--burstiness", type=float, metavar="X", help="1: Poisson; below: bursts; above: evener [1]")
    group.add_argument(
        "--find-rate", action="store_true", help="the highest rate that keeps --ttft-limit and --itl-limit"
    )
    group.add_argument("--ttft-limit", type=float, metavar="SECONDS", help="[2]")
    group.add_argument("--itl-limit", type=float, metavar="SECONDS", help="between pieces of text [0.2]")
    group.add_argument("--limit-share", type=float, metavar="X", help="of requests, and of gaps, that keep them [0.9]")
    group.add_argument(
        "--requests",
        type=count,
        metavar="N",
        help="of a run [twice the concurrency; 32 with --rate; all of a trace; as many as --find-rate needs]",
    )
    group.add_argument(
        "--repeat", type=count, default=1, metavar="N", help="runs of each server and level [%(default)s]"
    )
    group.add_argument(
        "--warm-up", type=natural, default=4, metavar="N", help="requests before the first run [%(default)s]"
    )
    group.add_argument(
        "--clients", metavar="N", default="auto", help="processes that send the load [auto: as many as it needs]"
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--json", type=Path, metavar="FILE", help="everything, for programs")
    group.add_argument("--html", type=Path, metavar="FILE", help="a report with figures")
    group.add_argument("--figures", type=Path, metavar="DIR", help="the figures as PNG and SVG")
    group.add_argument("--allow-errors", action="store_true", help="exit with 0 although requests failed or fell short")


def length(text: str) -> Length:
    try:
        return Length.parse(text)
    except WorkloadError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no count: write 1 or more")
    return int(text)


def natural(text: str) -> int:
    return 0 if text == "0" else count(text)


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
    from surefoot.bench.measure import Measurement
    from surefoot.bench.processes import LoadProcesses, LostProcessError

    seed = random.SystemRandom().randrange(2**31) if args.seed is None else args.seed
    workload = _workload(args, seed)
    levels = _levels(args)
    processes = _processes(args.clients, levels)
    found = [servers.look_at(name, url, args.model, args.api_key) for name, url in _names(args).items()]
    targets = {
        info.name: Target(info.url, info.model, args.chat, args.api_key, args.timeout, not args.stop_at_eos)
        for info in found
    }
    rates: dict[str, tuple[float, bool]] = {}
    stopped: BaseException | None = None
    with LoadProcesses(processes) as load, output.Bar(console) as bar:
        measurement = Measurement(targets, workload, seed, args.prompts == "same", load, bar)
        try:
            _measure(args, measurement, levels, workload, rates)
        except (KeyboardInterrupt, WorkloadError, LostProcessError) as error:  # what was finished is reported
            stopped = error
    if not measurement.runs and stopped:
        raise stopped
    result = _result(args, workload, seed, found, measurement)
    output.show(result, rates)
    output.write(result, args.json, args.html, args.figures, console)
    if stopped:
        raise stopped  # for its message and exit code
    failed = any(_has_failed(record) for run in result.runs for record in run.requests)
    return EXIT_FAILED_REQUESTS if failed and not args.allow_errors else EXIT_OK


def _has_failed(record: RequestRecord) -> bool:
    return bool(record.error) or record.output_tokens < record.wanted_tokens


def _measure(
    args: argparse.Namespace,
    measurement: Measurement,
    levels: list[Level],
    workload: Workload,
    rates: dict[str, tuple[float, bool]],
) -> None:
    """Fills in `rates` as they are found."""
    from surefoot.bench.measure import Limits

    if args.find_rate:
        measurement.warm_up(args.warm_up)
        limits = Limits(*_given(args, LIMIT_FLAGS).values())
        for name in measurement.servers:
            rates[name] = measurement.find_rate(name, limits, levels[0].rate, levels[0].burstiness, args.requests or 0)
        return
    counts = [args.requests or _requests(level, workload) for level in levels]
    if isinstance(workload, ShareGPTWorkload):
        measured = max(counts) if args.prompts == "same" else args.repeat * sum(counts)
        workload.require(args.warm_up * len(measurement.servers) + measured)
    measurement.warm_up(args.warm_up)
    for level, requests in zip(levels, counts, strict=True):
        measurement.run_level(level, requests, args.repeat)


def _requests(level: Level, workload: Workload) -> int:
    if level.clients:
        return 2 * level.clients
    return len(workload) if isinstance(workload, TraceWorkload) else 32


def _given(args: argparse.Namespace, defaults: dict[str, Any]) -> dict[str, Any]:
    given = vars(args)
    return {name: default if given[name] is None else given[name] for name, default in defaults.items()}


def _refuse(args: argparse.Namespace, names: set[str], why: str) -> None:
    """Those flags mean nothing to what was asked for."""
    for name in sorted(names):
        if vars(args)[name] is not None:
            raise WorkloadError(f"--{name.replace('_', '-')} means nothing {why}")


def _names(args: argparse.Namespace) -> dict[str, str]:
    urls = [url.rstrip("/").removesuffix("/v1") for url in (args.url, *args.against)]
    names = [*args.name, *(url.partition("://")[2] for url in urls[len(args.name) :])]
    if len(set(names)) < len(urls) or len(names) > len(urls):
        raise WorkloadError(f"{len(urls)} servers need as many different names: give --name for each")
    return dict(zip(names, urls, strict=True))


def _levels(args: argparse.Namespace) -> list[Level]:
    from surefoot.bench.measure import Level

    wrong = [
        value for value in (*args.concurrency, *args.rate, args.timeout, *_limits(args)) if not 0 < value < math.inf
    ]
    if wrong:
        raise WorkloadError(
            f"{wrong[0]:g} is no load and no limit: --concurrency, --rate, --timeout and the limits are positive"
        )
    burstiness = 1.0 if args.burstiness is None else args.burstiness
    if not 0 < burstiness < math.inf:
        raise WorkloadError(f"--burstiness {burstiness:g} is no shape of a distribution: it is positive")
    if args.find_rate:
        if args.concurrency or len(args.rate) > 1 or args.repeat > 1 or args.workload == "trace":
            raise WorkloadError(
                "--find-rate takes one --rate to begin with, and no --concurrency, --repeat or trace: it makes its load"
            )
        return [Level(0, args.rate[0] if args.rate else 1.0, burstiness)]
    _refuse(args, set(LIMIT_FLAGS), "without --find-rate")
    if not args.rate:
        _refuse(args, {"burstiness"}, "without --rate or --find-rate")
    if args.workload == "trace" and not args.concurrency and not args.rate:
        return [Level(0, 0.0, burstiness)]
    levels = [Level(0, rate, burstiness) for rate in args.rate]
    return [Level(clients, 0.0, 1.0) for clients in args.concurrency or ([] if levels else [1, 16, 64])] + levels


def _limits(args: argparse.Namespace) -> list[float]:
    limits = _given(args, LIMIT_FLAGS)
    if limits["limit_share"] > 1:
        raise WorkloadError(f"--limit-share {limits['limit_share']:g} is no share: it is at most 1")
    return list(limits.values())


def _processes(wanted: str, levels: list[Level]) -> int:
    if wanted != "auto":
        try:
            return count(wanted)
        except argparse.ArgumentTypeError as error:
            raise WorkloadError(f"--clients: {error}, or auto") from None
    need = max(max(level.clients / CLIENTS_EACH, level.rate / RATE_EACH) for level in levels)
    return max(1, min(probe().num_cpus // 2, math.ceil(need)))


def _workload(args: argparse.Namespace, seed: int) -> Workload:
    known = WORKLOAD_FLAGS[args.workload]
    _refuse(
        args,
        {name for flags in WORKLOAD_FLAGS.values() for name in flags} - set(known),
        f"to --workload {args.workload}",
    )
    given = _given(args, known)
    kind: PromptKind = given.get("prompt_kind") or ("words" if args.chat or args.workload == "conversations" else "ids")
    if kind == "ids" and args.chat:
        raise WorkloadError("--chat takes no token ids: use --prompt-kind words")
    if "file" in given and given["file"] is None:
        raise WorkloadError(f"--workload {args.workload} needs --file")
    maker = Maker(kind, given.get("vocab_size", 0))
    match args.workload:
        case "random":
            return RandomWorkload(maker, given["input"], given["output"])
        case "prefix":
            return PrefixWorkload(maker, given["prefixes"], given["prefix_length"], given["input"], given["output"])
        case "conversations":
            return ConversationWorkload(maker, given["turns"], given["input"], given["output"])
        case "sharegpt":
            return ShareGPTWorkload(given["file"], given["input"].high, given["output"], seed)
        case _:
            return TraceWorkload(given["file"], maker, given["speed"])


def _result(
    args: argparse.Namespace, workload: Workload, seed: int, found: list[ServerInfo], measurement: Measurement
) -> BenchResult:
    from surefoot.bench.measure import doubts

    machine = probe()
    warnings = [*doubts(workload, args.chat, args.prompts == "same", measurement.runs)]
    if args.seed is not None:
        warnings.append(
            f"--seed {args.seed} was given: a server that an earlier benchmark sent this load with this seed has had "
            "these prompts before"
        )
    return BenchResult(
        format=FORMAT,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=f"{machine.num_cpus} x {machine.cpu_name}",
        versions=f"surefoot {__version__}, Python {platform.python_version()}",
        command=_command(args.api_key),
        workload=WorkloadRecord(workload.name, workload.describe(), seed, args.prompts, workload.shared_tokens),
        servers=tuple(found),
        runs=tuple(measurement.runs),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _command(api_key: str) -> str:
    """As it was typed, but for the key: results are passed around."""
    words = ["surefoot", *sys.argv[1:]]
    return shlex.join(word.replace(api_key, "KEY") if api_key else word for word in words)
