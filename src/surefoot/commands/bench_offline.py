"""`surefoot bench offline`: scheduler, loop and runner without HTTP and text. Tokens go in, tokens come out."""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from surefoot.bench.workloads import Maker, PrefixWorkload, RandomWorkload, Session
from surefoot.commands.flags import Arguments
from surefoot.config.settings import Settings
from surefoot.frontend.sampling_params import SamplingParams, Vocabulary
from surefoot.llm import LLM
from surefoot.protocol.messages import Event, FinishReason, GenerateRequest, Refused, Submit, TokenBatch

EXIT_FAILED = 1
WARM_UP_REQUESTS = 4


class PathTimes(Struct, frozen=True):
    """Steps of one execution path. A step lasts from the commit before it to its own, so that scheduling which the
    step does not hide is in it."""

    path: str
    steps: int
    seconds: float  # of all
    median: float  # seconds of one


class OfflineRun(Struct, frozen=True):
    """One batch of requests from its first step to its last."""

    seconds: float
    output_tokens: int
    prompt_tokens: int
    cached_tokens: int  # of those, what came from the prefix cache
    preemptions: int
    paths: tuple[PathTimes, ...]  # most time first

    @property
    def output_rate(self) -> float:
        return self.output_tokens / self.seconds

    @property
    def total_rate(self) -> float:
        return (self.output_tokens + self.prompt_tokens) / self.seconds

    @property
    def steps(self) -> int:
        return sum(path.steps for path in self.paths)


class BenchFailed(Exception):
    """A request ended without its answer."""


class _Load:
    """Inbox and outbox of one run: submits as many requests as the engine takes, counts what it answers."""

    def __init__(self, requests: Sequence[GenerateRequest], places: int) -> None:
        self._todo = deque(requests)
        self._places = places
        self._alive = 0
        self._last_commit = time.perf_counter()
        self.step_seconds: defaultdict[str, list[float]] = defaultdict(list)  # by path
        self.output_tokens = 0
        self.cached_tokens = 0

    @property
    def is_open(self) -> bool:
        return bool(self._todo)

    def drain(self, block: bool) -> Iterator[Submit]:
        while self._todo and self._alive < self._places:
            self._alive += 1
            yield Submit(self._todo.popleft())

    def send(self, events: Sequence[Event]) -> None:
        """Raises BenchFailed if a request was refused or has ended in an error."""
        for event in events:
            match event:
                case Refused(_, _, detail):
                    raise BenchFailed(detail)
                case TokenBatch():
                    self._count(event)

    def _count(self, batch: TokenBatch) -> None:
        now = time.perf_counter()
        for finished in batch.finished:
            if finished.reason is not FinishReason.LENGTH:
                raise BenchFailed(finished.detail or finished.reason)
            self._alive -= 1
            self.cached_tokens += finished.cached_tokens
        self.output_tokens += len(batch.token_ids)
        self.step_seconds[batch.path].append(now - self._last_commit)
        self._last_commit = now


def run(settings: Settings, arguments: Arguments, console: Console) -> int:
    """All prompts are random token ids, and no two runs share one. Raises ValueError for a setting that is wrong."""
    for name, least in (("requests", 1), ("repeat", 1), ("prefix_length", 0)):
        if arguments[name] < least:
            raise ValueError(f"--{name.replace('_', '-')} {arguments[name]}: it must be at least {least}")
    seed = random.SystemRandom().randrange(2**31) if arguments["bench_seed"] is None else arguments["bench_seed"]
    with LLM(settings) as llm:
        maker = Maker("ids", llm.plan.model.vocab_size)
        workload: RandomWorkload | PrefixWorkload = RandomWorkload(maker, arguments["input"], arguments["output"])
        if length := arguments["prefix_length"]:
            workload = PrefixWorkload(maker, 1, length, arguments["input"], arguments["output"])
        runs = []
        try:
            for repeat in range(-1, arguments["repeat"]):  # the first one warms up
                sessions = list(workload.sessions(arguments["requests"], random.Random(f"{seed}/{repeat}")))
                console.print(f"run {repeat + 1} of {arguments['repeat']}" if repeat >= 0 else "warm-up")
                one = run_once(llm, sessions if repeat >= 0 else sessions[:WARM_UP_REQUESTS])
                runs += [one] if repeat >= 0 else []
        except BenchFailed as error:
            console.print(f"[bold red]error:[/] a request failed: {escape(str(error))}", highlight=False)
            return EXIT_FAILED
    _print(runs, f"{arguments['requests']} at once: {workload.describe()}; seed {seed}; no prompt is sent twice")
    if arguments["json"]:
        content = {"workload": workload.describe(), "seed": seed, "plan": llm.plan, "runs": runs}
        Path(arguments["json"]).write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        console.print(f"written: {arguments['json']}")
    return 0


def run_once(llm: LLM, sessions: Sequence[Session]) -> OfflineRun:
    """Answers the first turns of all `sessions`, greedily and at their full length. Raises BenchFailed."""
    vocabulary = Vocabulary(llm.plan.model.vocab_size, ())
    requests = []
    for number, session in enumerate(sessions):
        turn = session.turns[0]
        params = SamplingParams(temperature=0, max_tokens=turn.output_tokens, ignore_eos=True)
        prompt = tuple(map(int, turn.content))
        requests.append(params.to_request(number, prompt, vocabulary, llm.plan.bounds.max_model_len, llm.plan.seed))
    preemptions = llm.scheduler.preemptions
    load = _Load(requests, llm.places)
    began = time.perf_counter()
    llm.serve(load, load)
    return OfflineRun(
        seconds=time.perf_counter() - began,
        output_tokens=load.output_tokens,
        prompt_tokens=sum(len(request.prompt_ids) for request in requests),
        cached_tokens=load.cached_tokens,
        preemptions=llm.scheduler.preemptions - preemptions,
        paths=_path_times(load.step_seconds),
    )


def _path_times(step_seconds: Mapping[str, Sequence[float]]) -> tuple[PathTimes, ...]:
    paths = [
        PathTimes(path, len(each), sum(each), statistics.median(each)) for path, each in step_seconds.items() if each
    ]
    return tuple(sorted(paths, key=lambda path: -path.seconds))


def _print(runs: Sequence[OfflineRun], what: str) -> None:
    out = Console(file=sys.stdout, highlight=False)
    out.print(what, soft_wrap=True)
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("run", "output tok/s", "total tok/s", "seconds", "steps", "ms/step", "cached", "preempted"):
        table.add_column(column, justify="right")
    for number, one in enumerate(runs, 1):
        table.add_row(
            str(number),
            f"{one.output_rate:.1f}",
            f"{one.total_rate:.1f}",
            f"{one.seconds:.2f}",
            str(one.steps),
            f"{1000 * one.seconds / one.steps:.2f}",
            f"{one.cached_tokens / one.prompt_tokens:.0%}",
            str(one.preemptions),
        )
    out.print(table)
    rates = [one.output_rate for one in runs]
    median = statistics.median_low(rates)
    out.print(f"median: {median:.1f} output tok/s ({min(rates):.1f} to {max(rates):.1f}). Its steps by path:")
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("path", no_wrap=True)
    for column in ("steps", "ms/step", "of the time"):
        table.add_column(column, justify="right")
    chosen = runs[rates.index(median)]
    for path in chosen.paths:
        share = path.seconds / chosen.seconds
        table.add_row(path.path, str(path.steps), f"{1000 * path.median:.2f}", f"{share:.0%}")
    out.print(table)
