"""What `surefoot bench serve` prints and writes."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from surefoot.bench.results import BenchResult, Summary, summaries


class Bar:
    """The progress of each run."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, transient=True)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def begin(self, server: str, level: str, repeat: int, requests: int) -> None:
        description = f"{server} {level}" + (f" #{repeat + 1}" if repeat else "")
        self._progress.reset(self._task, total=requests, description=description)

    def ended(self, requests: int) -> None:
        self._progress.advance(self._task, requests)


def show(result: BenchResult, rates: dict[str, tuple[float, bool]]) -> None:
    """On stdout. rates: what was found by server, and whether a higher one broke the limits."""
    out = Console(file=sys.stdout, highlight=False)
    for line in _head(result):
        out.print(line, soft_wrap=True, markup=False)
    found = summaries(result)
    out.print(_table(result, found))
    for summary in found:
        for kind, count in {**summary.errors, "answer with too few tokens": summary.short}.items():
            if count:
                _warn(out, f"{summary.server} {summary.level}: {count} x {kind}")
    for name, (rate, is_highest) in rates.items():
        at_least = "" if is_highest else "at least "
        out.print(f"{name}: {at_least}{rate:.2f} requests a second keep the limits", soft_wrap=True, markup=False)
    for warning in result.warnings:
        _warn(out, warning)


def _warn(out: Console, text: str) -> None:
    out.print(f"[yellow]{escape(text)}[/yellow]", soft_wrap=True)


def _head(result: BenchResult) -> list[str]:
    fresh = result.workload.prompts == "fresh"
    seen = "each run has prompts of its own" if fresh else "every run sends the same ones"
    return [
        f"{result.workload.description}; seed {result.workload.seed}",
        f"prompts: {result.workload.prompts}, {seen}",
        *(f"{one.name}: {one.software}, model {one.model}, plan {one.plan_hash}" for one in result.servers),
    ]


def _table(result: BenchResult, found: list[Summary]) -> Table:
    first, several = result.servers[0].name, len(result.servers) > 1
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("level", *(["server"] if several else [])):
        table.add_column(column, overflow="fold")
    for column in ("tok/s", "TTFT\nms p50", "\np99", "gap\nms p50", "\np99", "whole\ns p50", "hits", "failed"):
        table.add_column(column, justify="right", no_wrap=True)
    if several:
        table.add_column(f"{escape(first)}\n/ this", justify="right", no_wrap=True)
    for summary in found:
        table.add_row(*_cells(summary, first, several))
    return table


def _cells(summary: Summary, first: str, several: bool) -> list[str]:
    cells = [
        summary.level,
        *([escape(summary.server)] if several else []),
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


def write(result: BenchResult, json: Path | None, html: Path | None, figures: Path | None, console: Console) -> None:
    """html and figures need matplotlib."""
    if json:
        content = {**msgspec.to_builtins(result), "summaries": summaries(result)}
        json.write_bytes(msgspec.json.format(msgspec.json.encode(content)))
        console.print(f"written: {json}", markup=False)
    if html:
        from surefoot.bench.report import write_html

        write_html(result, html)
        console.print(f"written: {html}", markup=False)
    if figures:
        from surefoot.bench.figures import draw, export

        paths = export(draw(result), figures)
        console.print(f"written: {len(paths)} files in {figures}", markup=False)
