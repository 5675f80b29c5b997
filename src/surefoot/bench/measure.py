"""Measures servers in turns, so that what else the machine does falls on all of them alike."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Protocol

from msgspec import Struct

from surefoot.bench import servers
from surefoot.bench.client import Target
from surefoot.bench.load import arriving, closed_loop, open_loop
from surefoot.bench.results import RequestRecord, Run, percentile
from surefoot.bench.workloads import Session, Workload

SEARCH_STEPS = 6  # of a bisection, after the rate has been doubled until it was too high
CHANCE = 0.02  # of prompt tokens that may come from a cache although no prompt was sent before


TEMPLATE_TOKENS = 64  # with which all chats of a model may begin


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

    def request_ended(self, record: RequestRecord) -> None: ...


class Measurement:
    """Collects runs as they end, so that an interrupted measurement has those that did."""

    def __init__(
        self, targets: dict[str, Target], workload: Workload, seed: int, same_prompts: bool, watcher: Watcher
    ) -> None:
        self._targets = targets
        self._workload = workload
        self._seed = seed
        self._same_prompts = same_prompts
        self._watcher = watcher
        self.runs: list[Run] = []

    def warm_up(self, requests: int) -> None:
        """With prompts that no measured one begins like."""
        for name, target in self._targets.items():
            self._watcher.begin(name, "warm-up", 0, requests)
            sessions = list(self._workload.sessions(requests, random.Random(f"{self._seed}/warm-up/{name}")))
            asyncio.run(closed_loop(target, sessions, min(4, requests), self._watcher.request_ended))

    def run_level(self, level: Level, requests: int, repeats: int) -> None:
        """Each server in its turn, forth and back: A B, B A, A B."""
        for repeat in range(repeats):
            names = list(self._targets)
            for name in names if repeat % 2 == 0 else reversed(names):
                self.runs.append(self._run(name, level, repeat, requests))

    def find_rate(self, name: str, limits: Limits, first: float, burstiness: float, requests: int) -> float:
        """The highest rate that keeps the limits, between which and the next tried one that does not there is less than
        a twentieth. 0 if not even a thousandth of `first` does."""
        good, bad, rate = 0.0, 0.0, first
        for _ in range(2 * SEARCH_STEPS):
            run = self._run(name, Level(0, rate, burstiness), 0, requests)
            self.runs.append(run)
            if keeps(run, limits):
                good = rate
            else:
                bad = rate
            if bad and good and bad / good < 1.05:
                break
            if bad and not good and bad < first / 1000:
                break
            rate = (good + bad) / 2 if good and bad else 2 * good or bad / 2
        return good

    def _run(self, name: str, level: Level, repeat: int, requests: int) -> Run:
        target = self._targets[name]
        # The same prompts for all servers of a repeat; others for the next one, unless all are to be the same.
        which = "same" if self._same_prompts else f"{level.name}/{repeat}"
        rng = random.Random(f"{self._seed}/{which}")
        sessions = list(self._workload.sessions(requests, rng))
        self._watcher.begin(name, level.name, repeat, sum(len(session.turns) for session in sessions))
        before = servers.hits(target.url, target.api_key)
        cpu, wall = time.process_time(), time.perf_counter()
        records, seconds = asyncio.run(self._load(target, level, sessions, rng))
        busy = (time.process_time() - cpu) / (time.perf_counter() - wall)
        after = servers.hits(target.url, target.api_key)
        return Run(name, level.name, repeat, seconds, tuple(records), _hit_rate(before, after, records), busy)

    async def _load(
        self, target: Target, level: Level, sessions: list[Session], rng: random.Random
    ) -> tuple[list[RequestRecord], float]:
        if level.clients:
            return await closed_loop(target, sessions, level.clients, self._watcher.request_ended)
        if level.rate:
            sessions = list(arriving(sessions, level.rate, level.burstiness, rng))
        return await open_loop(target, sessions, self._watcher.request_ended)


def keeps(run: Run, limits: Limits) -> bool:
    """Whether the wanted share of all requests, failed ones included, kept both limits."""

    def kept(request: RequestRecord) -> bool:
        slowest = percentile(sorted(request.gaps), limits.share) if request.gaps else 0.0
        return not request.error and request.ttft <= limits.ttft and slowest <= limits.inter_token

    return sum(map(kept, run.requests)) >= limits.share * len(run.requests)


def _hit_rate(
    before: tuple[float, float] | None, after: tuple[float, float] | None, records: list[RequestRecord]
) -> float:
    if before and after and after[1] > before[1]:
        return (after[0] - before[0]) / (after[1] - before[1])
    prompt_tokens = sum(record.prompt_tokens for record in records)
    cached = sum(record.cached_tokens for record in records)
    return cached / prompt_tokens if cached else -1.0


def hygiene(workload: Workload, chat: bool, same_prompts: bool, runs: list[Run]) -> Iterator[str]:
    """What the caches make of the numbers beyond what the workload shares on purpose, if anything."""
    for run in runs:
        wanted = sum(record.prompt_tokens for record in run.requests)
        if not wanted or run.hit_rate < 0:
            continue
        shared = (workload.shared_tokens + TEMPLATE_TOKENS * chat) * len(run.requests) / wanted
        if same_prompts:
            yield f"{_cached(run)}, since every run sends the same prompts"
        elif run.hit_rate > shared + CHANCE:
            yield f"{_cached(run)}, although no prompt was sent before"


def _cached(run: Run) -> str:
    return f"{run.server} {run.level}: {run.hit_rate:.0%} of prompt tokens came from its cache"
