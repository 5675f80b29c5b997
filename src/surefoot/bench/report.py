"""The report of `surefoot bench serve`: one HTML file that needs no network, no script and no other file.

The template engine escapes what came from outside: names, models, error texts. Only the figures are markup, in which
matplotlib has escaped the text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from jinja2 import Environment, StrictUndefined

from surefoot.bench.figures import COLOURS, Drawing, draw, in_words, inline_svg
from surefoot.bench.results import BenchResult, Percentiles, Run, Summary, levels, output_rate, summaries

BUSY_FROM = 0.8  # share of its time that a client may compute before its own delays show in the numbers


@dataclass(frozen=True)
class Cell:
    text: str
    small: str = ""
    is_bad: bool = False


@dataclass(frozen=True)
class Group:
    """Columns of the summary under one heading; a single column has no heading of its own."""

    name: str
    columns: tuple[str, ...] = ("",)
    is_text: bool = False


@dataclass(frozen=True)
class Row:
    series: int  # of the colours
    server: str
    cells: tuple[Cell, ...]


def write_html(result: BenchResult, path: Path) -> None:
    """Needs matplotlib: call `figures.require_matplotlib` before the measurement."""
    path.write_text(render(result, draw(result)), encoding="utf-8")


def render(result: BenchResult, drawings: Sequence[Drawing]) -> str:
    found = summaries(result)
    names = [server.name for server in result.servers]
    series = {name: at % len(COLOURS) for at, name in enumerate(names)}
    template = resources.files("surefoot.bench").joinpath("report_template.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(template).render(
        title=" against ".join(names) if len(names) > 1 else f"Benchmark of {names[0]}",
        lead=f"{result.workload.name}: {result.workload.description}",
        warnings=warnings(result, found),
        facts=list(_facts(result)),
        server_columns=("Name", "Software", "Model", "URL", "Plan hash"),
        servers=[(s.name, series[s.name], (s.software, s.model, s.url, s.plan_hash)) for s in result.servers],
        summary_note=_summary_note(names),
        summary_groups=_groups(len(names) > 1),
        summary=[
            (
                in_words(level),
                [
                    Row(
                        series[summary.server], summary.server, tuple(_cells(summary, _runs_of(result, summary), names))
                    )
                    for summary in found
                    if summary.level == level
                ],
            )
            for level in levels(result)
        ],
        errors=[
            (in_words(summary.level), summary.server, kind, count)
            for summary in found
            for kind, count in sorted(summary.errors.items())
        ],
        figures=list(_figures(result, drawings)),
        footer=f"Made by surefoot bench serve on {result.date}. Format {result.format}.",
    )


def warnings(result: BenchResult, found: Sequence[Summary]) -> list[str]:
    """Those of the measurement, and what its numbers alone tell: failed requests and short answers."""
    told = list(result.warnings)
    for server in result.servers:
        of_server = [summary for summary in found if summary.server == server.name]
        sent = sum(summary.requests for summary in of_server)
        failed = sum(sum(summary.errors.values()) for summary in of_server)
        short = sum(summary.short for summary in of_server)
        if failed:
            told.append(f"{server.name}: {failed} of {sent} requests failed. Latencies are of those that succeeded.")
        if short:
            told.append(f"{server.name}: {short} of {sent} answers have fewer tokens than were asked for.")
    return told


def _facts(result: BenchResult) -> Iterator[tuple[str, str, bool]]:
    """Name, value, whether it is code."""
    workload = result.workload
    if workload.prompts == "fresh":
        prompts = "Fresh: each run has prompts of its own."
    else:
        prompts = "The same ones in every run: all runs but the first may find them in a server's cache."
    if workload.shared_tokens:
        prompts += f" Requests of one run share {workload.shared_tokens:,} prompt tokens on purpose, on average."
    yield "Prompts", prompts, False
    yield "Cache", "; ".join(_hit_rates(result)), False
    yield "Seed", str(workload.seed), True
    repeats = len({run.repeat for run in result.runs})
    turns = ", the servers in turns" if len(result.servers) > 1 else ""
    yield "Levels", f"{', '.join(map(in_words, levels(result)))}; {_count(repeats, 'run')} of each{turns}", False
    yield "Date", result.date, False
    yield "Machine of the client", result.machine, False
    yield "Versions", result.versions, False
    yield "Command", result.command, True


def _hit_rates(result: BenchResult) -> Iterator[str]:
    """Of each server, over all runs: how much of the prompts came from its prefix cache."""
    for server in result.servers:
        known = [run.hit_rate for run in result.runs if run.server == server.name and run.hit_rate >= 0]
        if known:
            low, high = _percent(min(known)), _percent(max(known))
            told = low if low == high else f"{low} to {high}"
            yield f"{server.name} took {told} of the prompt tokens from its cache"
        else:
            yield f"{server.name} does not tell how much of the prompts came from its cache"


def _summary_note(names: Sequence[str]) -> str:
    note = "Rates are medians of the runs, with the lowest and the highest; percentiles are over all runs."
    if len(names) > 1:
        note += (
            f" Ratio: output tokens per second of {names[0]} over those of the row's server, run by run in turns: the "
            f"median, with the lowest and the highest. Above 1, {names[0]} is faster."
        )
    return note


def _groups(has_ratio: bool) -> list[Group]:
    percentiles = ("p50", "p90", "p99")
    return [
        Group("Level", is_text=True),
        Group("Server", is_text=True),
        Group("Output tok/s"),
        *([Group("Ratio")] if has_ratio else []),
        Group("Requests/s"),
        Group("Time to first token, ms", percentiles),
        Group("Inter-token latency, ms", percentiles),
        Group("End to end, s", percentiles),
        Group("Requests"),
        Group("Failed"),
        Group("Short"),
        Group("Cache hits"),
        Group("Client busy"),
    ]


def _cells(summary: Summary, runs: Sequence[Run], names: Sequence[str]) -> Iterator[Cell]:
    """In the order of `_groups`, without level and server."""
    rates = [output_rate(run) for run in runs]
    yield Cell(_number(summary.output_rate), _spread(min(rates), max(rates)) if len(rates) > 1 else "")
    if len(names) > 1:
        is_first = summary.server == names[0]
        yield Cell("1") if is_first else _ratio(summary)
    yield Cell(_number(summary.request_rate))
    for latency, scale in ((summary.ttft, 1000.0), (summary.inter_token, 1000.0), (summary.end_to_end, 1.0)):
        yield from (Cell(_number(value * scale)) for value in _three(latency))
    failed = sum(summary.errors.values())
    busy = max(run.client_busy for run in runs)
    yield Cell(f"{summary.requests:,}")
    yield Cell(f"{failed:,}", is_bad=failed > 0)
    yield Cell(f"{summary.short:,}", is_bad=summary.short > 0)
    yield Cell(_percent(summary.hit_rate) if summary.hit_rate >= 0 else "unknown")
    yield Cell(_percent(busy), is_bad=busy >= BUSY_FROM)


def _ratio(summary: Summary) -> Cell:
    if math.isnan(summary.ratio):
        return Cell("-")
    return Cell(f"{summary.ratio:.2f}", f"{summary.ratio_low:.2f}–{summary.ratio_high:.2f}")


def _figures(result: BenchResult, drawings: Sequence[Drawing]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A heading, and its drawings as the template wants them."""
    for level in ("", *levels(result)):
        yield (
            in_words(level) if level else "Levels compared",
            [
                {"svg": inline_svg(drawing), "alt": drawing.alt, "caption": drawing.caption}
                for drawing in drawings
                if drawing.level == level
            ],
        )


def _runs_of(result: BenchResult, summary: Summary) -> list[Run]:
    return [run for run in result.runs if (run.server, run.level) == (summary.server, summary.level)]


def _three(latency: Percentiles) -> tuple[float, float, float]:
    return latency.p50, latency.p90, latency.p99


def _number(value: float) -> str:
    """Three digits, or all before the point; "-" if there is none."""
    if math.isnan(value):
        return "-"
    size = abs(value)
    return f"{value:,.0f}" if size >= 99.95 else f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"


def _spread(low: float, high: float) -> str:
    return f"{_number(low)}–{_number(high)}"


def _percent(share: float) -> str:
    return f"{100 * share:.1f}%"


def _count(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
