"""Measures servers in turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct

from surefoot.bench import servers
from surefoot.bench.client import Target
from surefoot.bench.load import arriving
from surefoot.bench.processes import LoadProcesses, Measured
from surefoot.bench.results import RequestRecord, Run, percentile
from surefoot.bench.workloads import Session, Workload

SEARCH_STEPS = 12  # runs of a search for a rate, at most
CHANCE = 0.02  # of prompt tokens that may come from a cache although no prompt was sent before
TEMPLATE_TOKENS = 64  # with which all chats of a model may begin
LIMITS_LONG = 20  # times its TTFT limit that a run of a search lasts: a rate 6 % too high then shows
BUSY_SECONDS = 1.0  # of a run that is long enough to say how busy the client was
BUSY_FROM = 0.8  # share of its time that the client may compute before its own delays show in the numbers
LAG_FROM = 0.02  # seconds by which it may be late


class Level(Struct, frozen=True):
    """A load: so many clients in a closed loop, or so many requests a second."""

    clients: int  # 0: an open loop
    rate: float  # 0: at the times that the workload gives
    burstiness: float

    @property
    def name(self) -> str:
        if self.clients:
            return f"c{self.clients}"
        return f"r{self.rate:g}" if self.rate else "trace"


class Limits(Struct, frozen=True):
    """Latencies in seconds that a share of all requests must keep."""

    ttft: float
    inter_token: float
    share: float


class Watcher(Protocol):
    def begin(self, server: str, level: str, repeat: int, requests: int) -> None: ...

    def ended(self, requests: int) -> None: ...


class Measurement:
    """Collects runs as they end, so that an interrupted measurement has those that did."""

    def __init__(
        self,
        targets: dict[str, Target],
        workload: Workload,
        seed: int,
        same_prompts: bool,
        processes: LoadProcesses,
        watcher: Watcher,
    ) -> None:
        self._targets = targets
        self._workload = workload
        self._seed = seed
        self._same_prompts = same_prompts
        self._processes = processes
        self._watcher = watcher
        self._used = 0  # sessions that were made, and are not to come again
        self._warmed_up = 0  # of those, in the warm-up
        self._sent: dict[str, set[int]] = {name: set() for name in targets}  # hashes of prompts
        self.runs: list[Run] = []

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(self._targets)

    def warm_up(self, requests: int) -> None:
        """With prompts that no measured one begins like, if the workload has as many."""
        for name, target in self._targets.items() if requests else ():
            self._watcher.begin(name, "warm-up", 0, requests)
            sessions = self._sessions(f"warm-up/{name}", requests)
            self._processes.run(target, sessions, min(4, requests), self._watcher.ended)
            self._sent[name].update(map(_prompt_hash, sessions))
        self._warmed_up = self._used

    def run_level(self, level: Level, requests: int, repeats: int) -> None:
        """Each server in its turn, forth and back: A B, B A, A B."""
        for repeat in range(repeats):
            sessions = self._sessions("same" if self._same_prompts else f"{level.name}/{repeat}", requests)
            names = list(self._targets)
            for name in names if repeat % 2 == 0 else reversed(names):
                self.runs.append(self._run(name, level, repeat, sessions))

    def find_rate(
        self, name: str, limits: Limits, first: float, burstiness: float, requests: int
    ) -> tuple[float, bool]:
        """The highest rate that keeps the limits, and whether a higher one was seen to break them.

        Between it and the lowest rate that breaks them there is less than a twentieth, if the runs suffice. 0 if not
        even a thousandth of `first` keeps them. requests: of a run; 0 for as many as show that a queue grows.
        """
        good, bad, rate = 0.0, 0.0, first
        for _ in range(SEARCH_STEPS):
            count = requests or max(32, math.ceil(LIMITS_LONG * limits.ttft * rate))
            level = Level(0, rate, burstiness)
            run = self._run(name, level, 0, self._sessions("same" if self._same_prompts else level.name, count))
            self.runs.append(run)
            if keeps(run, limits):
                good = rate
            else:
                bad = rate
            if bad and (bad < first / 1000 if not good else bad / good < 1.05):
                break
            rate = (good + bad) / 2 if good and bad else 2 * good or bad / 2
        return good, bad > 0

    def _sessions(self, which: str, count: int) -> list[Session]:
        """The same for the same `which`. Of a file with questions, those that no earlier fresh run has sent."""
        used = self._warmed_up if which == "same" else self._used
        self._used = max(self._used, used + count)
        return list(self._workload.sessions(count, random.Random(f"{self._seed}/{which}"), used))

    def _run(self, name: str, level: Level, repeat: int, sessions: list[Session]) -> Run:
        target = self._targets[name]
        hashes = list(map(_prompt_hash, sessions))
        sent_before = sum(one in self._sent[name] for one in hashes)
        self._sent[name].update(hashes)
        self._watcher.begin(name, level.name, repeat, sum(len(session.turns) for session in sessions))
        if level.rate:
            rng = random.Random(f"{self._seed}/{level.name}/{repeat}/arrivals")
            sessions = list(arriving(sessions, level.rate, level.burstiness, rng))
        before = servers.hits(target.url, target.api_key)
        measured = self._processes.run(target, sessions, level.clients, self._watcher.ended)
        after = servers.hits(target.url, target.api_key)
        return Run(
            server=name,
            level=level.name,
            repeat=repeat,
            seconds=max(record.began + record.total for record in measured.records),
            requests=measured.records,
            hit_rate=_hit_rate(before, after, measured),
            client_busy=measured.busy,
            client_lag=measured.lag,
            client_processes=measured.processes,
            sent_before=sent_before,
        )


def _prompt_hash(session: Session) -> int:
    return hash(session.turns[0].content)


def keeps(run: Run, limits: Limits) -> bool:
    """Whether the wanted share of all requests, failed ones included, kept both limits."""

    def kept(request: RequestRecord) -> bool:
        slowest = percentile(sorted(request.gaps), limits.share) if request.gaps else 0.0
        return not request.error and request.ttft <= limits.ttft and slowest <= limits.inter_token

    return sum(map(kept, run.requests)) >= limits.share * len(run.requests)


def _hit_rate(before: tuple[float, float] | None, after: tuple[float, float] | None, measured: Measured) -> float:
    if before and after and after[1] > before[1]:
        return (after[0] - before[0]) / (after[1] - before[1])
    told = [record for record in measured.records if record.cached_tokens >= 0]
    prompt_tokens = sum(record.prompt_tokens for record in told)
    return sum(record.cached_tokens for record in told) / prompt_tokens if prompt_tokens else -1.0


def doubts(workload: Workload, chat: bool, same_prompts: bool, runs: list[Run]) -> Iterator[str]:
    """What a reader must know before the numbers: prompts that a server had before, hits beyond what the workload
    shares on purpose, a client that was slow itself."""
    for run in runs:
        where = f"{run.server} {run.level}"
        if run.sent_before and not same_prompts:
            yield f"{where}: {run.sent_before} of {len(run.requests)} prompts had been sent to it in an earlier run"
        wanted = sum(record.prompt_tokens for record in run.requests)
        if wanted and run.hit_rate >= 0:
            cached = f"{where}: {run.hit_rate:.0%} of prompt tokens came from its cache"
            shared = workload.shared_share + TEMPLATE_TOKENS * chat * len(run.requests) / wanted
            if same_prompts:
                yield f"{cached}, since every run sends the same prompts"
            elif run.hit_rate > shared + CHANCE and not run.sent_before:
                yield f"{cached}, although no run had sent them before"
        if run.seconds >= BUSY_SECONDS and run.client_busy > BUSY_FROM:
            yield (
                f"{where}: the client computed for {run.client_busy:.0%} of its time and may be what limits the "
                "numbers: give it more processes (--clients) or a machine of its own"
            )
        elif run.client_lag > LAG_FROM:
            yield (
                f"{where}: the client noticed events up to {1000 * run.client_lag:.0f} ms late, which is in the "
                "latencies: something else computes on its machine"
            )
