"""What a benchmark of servers gives: every request as it went, and what they come to."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from msgspec import Struct

FORMAT = 1

PromptsSeen = Literal["fresh", "same"]


class RequestRecord(Struct, frozen=True, array_like=True):
    """Times are in seconds. Of a request that failed, `error` says what kind of failure it was."""

    began: float  # since the run began
    ttft: float  # until the first piece of text; 0 if there was none
    total: float  # until the end of the answer
    gaps: tuple[float, ...]  # between pieces of text
    prompt_tokens: int  # as the server counts them
    cached_tokens: int  # of those, what came from its prefix cache; -1 if it does not say
    output_tokens: int
    wanted_tokens: int  # 0 if the answer may end early
    error: str  # kind; empty if it succeeded


class Run(Struct, frozen=True):
    """One server under one load, once."""

    server: str  # ServerInfo.name
    level: str  # "c16": 16 clients in a closed loop; "r4": 4 requests a second on average
    repeat: int  # from 0
    seconds: float  # from the first request to the end of the last
    requests: tuple[RequestRecord, ...]
    hit_rate: (
        float  # cached prompt tokens per prompt token, by the server's metrics, else by its answers; -1 if unknown
    )
    client_busy: float  # share of its time for which the busiest client process computed
    client_lag: float = 0.0  # seconds by which a client process noticed an event late, at most, in 99 of 100 cases
    client_processes: int = 1
    sent_before: int = 0  # requests whose prompt this server had from an earlier run of this measurement


class ServerInfo(Struct, frozen=True):
    name: str
    url: str
    software: str  # with its version, as far as it tells
    model: str
    plan_hash: str  # of the configuration that it reports; "unknown" if it reports none


class Workload(Struct, frozen=True):
    name: str
    description: str  # with every number that made it
    seed: int
    prompts: PromptsSeen  # "fresh": no prompt was sent before; "same": every run sends the same ones
    shared_tokens: int  # prompt tokens that requests of one run share on purpose, on average


class BenchResult(Struct, frozen=True):
    format: int
    date: str  # ISO 8601, UTC
    machine: str  # of the client
    versions: str
    command: str
    workload: Workload
    servers: tuple[ServerInfo, ...]
    runs: tuple[Run, ...]
    warnings: tuple[str, ...]  # what a reader must know before the numbers


class Percentiles(Struct, frozen=True):
    """In seconds; NaN of nothing."""

    p50: float
    p90: float
    p99: float


class Summary(Struct, frozen=True):
    """One server at one level, over all repeats."""

    server: str
    level: str
    requests: int
    output_rate: float  # output tokens per second: the median of the repeats
    request_rate: float
    ttft: Percentiles
    inter_token: Percentiles  # each gap between pieces of text
    per_token: Percentiles  # of each request: the time after its first piece, per token that came then
    end_to_end: Percentiles
    hit_rate: float
    errors: dict[str, int]  # by kind
    short: int  # answers with fewer tokens than were wanted
    ratio: float  # the first server's output rate over this one's: the median of paired repeats; 1 for the first itself
    ratio_low: float
    ratio_high: float


def percentile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest values, as numpy's default. values: sorted. NaN of nothing."""
    if not values:
        return math.nan
    place = share * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (place - low)


def output_rate(run: Run) -> float:
    """Output tokens of requests that succeeded, per second of the whole run."""
    return sum(request.output_tokens for request in run.requests if not request.error) / run.seconds


def levels(result: BenchResult) -> list[str]:
    return list(dict.fromkeys(run.level for run in result.runs))


def summaries(result: BenchResult) -> list[Summary]:
    """By level, and within a level in the order of the servers."""
    found: list[Summary] = []
    for level in levels(result):
        first = _runs(result, result.servers[0].name, level)
        found += [
            _summary(server.name, level, runs, first)
            for server in result.servers
            if (runs := _runs(result, server.name, level))
        ]
    return found


def _runs(result: BenchResult, server: str, level: str) -> list[Run]:
    return [run for run in result.runs if run.server == server and run.level == level]


def _summary(server: str, level: str, runs: list[Run], first: list[Run]) -> Summary:
    requests = [request for run in runs for request in run.requests]
    done = [request for request in requests if not request.error]
    known = [run.hit_rate for run in runs if run.hit_rate >= 0]
    pairs = {run.repeat: run for run in first}
    ratios = [output_rate(pairs[run.repeat]) / (output_rate(run) or math.nan) for run in runs if run.repeat in pairs]
    return Summary(
        server=server,
        level=level,
        requests=len(requests),
        output_rate=statistics.median(output_rate(run) for run in runs),
        request_rate=statistics.median(
            sum(not request.error for request in run.requests) / run.seconds for run in runs
        ),
        ttft=_percentiles(done, lambda request: (request.ttft,)),
        inter_token=_percentiles(done, lambda request: request.gaps),
        per_token=_percentiles(done, _per_token),
        end_to_end=_percentiles(done, lambda request: (request.total,)),
        hit_rate=statistics.mean(known) if known else -1.0,
        errors=dict(Counter(request.error for request in requests if request.error)),
        short=sum(request.output_tokens < request.wanted_tokens for request in done),
        ratio=statistics.median(ratios) if ratios else math.nan,
        ratio_low=min(ratios, default=math.nan),
        ratio_high=max(ratios, default=math.nan),
    )


def _per_token(request: RequestRecord) -> tuple[float, ...]:
    return (sum(request.gaps) / (request.output_tokens - 1),) if request.output_tokens > 1 and request.gaps else ()


def _percentiles(
    requests: Iterable[RequestRecord], values_of: Callable[[RequestRecord], Iterable[float]]
) -> Percentiles:
    values = sorted(value for request in requests for value in values_of(request))
    return Percentiles(percentile(values, 0.5), percentile(values, 0.9), percentile(values, 0.99))
