"""The figures of a result of `surefoot bench serve`, drawn by matplotlib: inline SVG for a page, PNG and SVG files.

A server has one colour, one marker and one dash pattern in all figures, so that colour is never the only sign.
matplotlib is optional: `require_matplotlib` belongs before a measurement whose figures are wanted. pyplot is not used,
so there is no window and no state between figures.
"""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from surefoot.bench.results import BenchResult, Percentiles, RequestRecord, Run, Summary, levels, output_rate, summaries

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[np.float64]

# Told apart by the colour-blind too, and dark enough on white. A page may replace them: see `inline_svg`.
COLOURS = ("#0072b2", "#c44e00", "#00805e", "#a8508a", "#8a6100", "#4d5560")
MARKERS = ("o", "s", "^", "D", "v", "P")
DASHES = ("-", "--", "-.", ":", (0, (6, 1, 1, 1, 1, 1)), (0, (1, 1)))
INK, GRID = "#24292f", "#d8dee4"

LOG_FROM = 20  # largest over smallest value, from which an axis is logarithmic
CURVE_POINTS = 400
TIME_SLICES = 150
NAME_LENGTH = 40


class MissingMatplotlib(Exception):
    """Figures were asked for and cannot be drawn; the message has the way out."""


def require_matplotlib() -> None:
    """Raises MissingMatplotlib. To be called before a measurement: after it, the error would come too late."""
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingMatplotlib("figures need matplotlib, which is not installed: pip install 'surefoot[bench]'")


@dataclass(frozen=True)
class Drawing:
    """name: of its files, without ending. level: "" if it compares levels. alt: what it shows, in words and numbers."""

    name: str
    level: str
    caption: str
    alt: str
    figure: Figure


@dataclass(frozen=True)
class Measure:
    """A latency."""

    key: str
    name: str
    of: str  # what has such a latency
    unit: str
    scale: float  # from seconds
    of_request: Callable[[RequestRecord], Iterable[float]]  # in seconds; of one that succeeded
    of_summary: Callable[[Summary], Percentiles]

    def of_runs(self, runs: Iterable[Run]) -> Array:
        """Of all requests that succeeded, in `unit`, sorted."""
        done = (request for run in runs for request in run.requests if not request.error)
        return self.scale * np.sort(
            np.fromiter((value for request in done for value in self.of_request(request)), np.float64)
        )


TTFT = Measure("ttft", "Time to first token", "requests", "ms", 1e3, lambda r: (r.ttft,), lambda s: s.ttft)
ITL = Measure(
    "itl", "Inter-token latency", "gaps between pieces of text", "ms", 1e3, lambda r: r.gaps, lambda s: s.inter_token
)
E2E = Measure("e2e", "End-to-end latency", "requests", "s", 1.0, lambda r: (r.total,), lambda s: s.end_to_end)
MEASURES = (TTFT, ITL, E2E)


def in_words(level: str) -> str:
    """ "c16" is "16 clients", "r4" is "4 requests/s"."""
    match level[:1], level[1:]:
        case "c", "1":
            return "1 client"
        case "c", count if count.isdecimal():
            return f"{count} clients"
        case "r", rate if re.fullmatch(r"\d+(\.\d+)?", rate):
            return f"{rate} requests/s"
    return level


def draw(result: BenchResult) -> list[Drawing]:
    """First those that compare the levels, then four of each level: TTFT over time, and three distributions."""
    servers = [server.name for server in result.servers]
    found = summaries(result)
    drawings = [_throughput(result, found), *(_latency_throughput(servers, found, measure) for measure in MEASURES)]
    for level in levels(result):
        runs = {name: [run for run in result.runs if (run.server, run.level) == (name, level)] for name in servers}
        drawings.append(_ttft_over_time(level, runs))
        drawings += [_distribution(level, runs, measure) for measure in MEASURES]
    return drawings


def export(drawings: Sequence[Drawing], folder: Path) -> list[Path]:
    """Writes each drawing as NAME.png and NAME.svg, whose text is outlines: it needs no font."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{drawing.name}.{kind}" for drawing in drawings for kind in ("png", "svg")]
    for drawing in drawings:
        for kind in ("png", "svg"):
            drawing.figure.savefig(folder / f"{drawing.name}.{kind}", dpi=200, facecolor="white")
    return paths


def inline_svg(drawing: Drawing) -> str:
    """An <svg> element for a page of HTML: text stays text, no background, ids that no other drawing has.

    Its colours are CSS variables, which the page defines: --ink, --grid, --series-0 to --series-5.
    """
    from matplotlib import rc_context

    out = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": drawing.name}):
        drawing.figure.savefig(out, format="svg", transparent=True)
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    referenced = set(re.findall(r'<[^<>]*(?:url\(|href=")#([\w.-]+)', svg))
    variables = {INK: "var(--ink)", GRID: "var(--grid)"}
    variables |= {colour: f"var(--series-{at})" for at, colour in enumerate(COLOURS)}

    def mend(match: re.Match[str]) -> str:
        tag = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in referenced else "", match[0])
        tag = re.sub(r"font-family: [^;\"]*", "font-family: inherit", tag)
        return re.sub(r"#[0-9a-f]{6}\b", lambda found: variables.get(found[0], found[0]), tag)

    svg = re.sub(r"<[^<>]*>", mend, svg)  # in tags alone: text may look like anything
    return re.sub(r'^<svg ([^>]*?)width="[^"]*" height="[^"]*"', r'<svg aria-hidden="true" \1', svg)


def _throughput(result: BenchResult, found: Sequence[Summary]) -> Drawing:
    servers = [server.name for server in result.servers]
    figure, axes = _axes("Output throughput by level", "", "Output tokens per second", servers)
    places = {level: place for place, level in enumerate(levels(result))}
    told = []
    for at, server in enumerate(servers):
        shift = 0.12 * (at - (len(servers) - 1) / 2)
        dots = [(places[run.level] + shift, output_rate(run)) for run in result.runs if run.server == server]
        medians = [(summary.level, summary.output_rate) for summary in found if summary.server == server]
        axes.plot(*_columns(dots), **_dots(at), alpha=0.6, markersize=4)
        axes.plot(*_columns([(places[level] + shift, rate) for level, rate in medians]), **_line(at))
        told.append(f"{server}: " + ", ".join(f"{rate:.1f} at {in_words(level)}" for level, rate in medians))
    axes.set_xticks(list(places.values()), [in_words(level) for level in places])
    axes.set_xlim(-0.5, len(places) - 0.5)
    axes.set_ylim(bottom=0)
    return Drawing(
        "throughput",
        "",
        "A mark is one run; the line joins the medians of the runs.",
        f"Output tokens per second by level, median of the runs. {'. '.join(told)}.",
        figure,
    )


def _latency_throughput(servers: Sequence[str], found: Sequence[Summary], measure: Measure) -> Drawing:
    points = {server: [summary for summary in found if summary.server == server] for server in servers}
    scale, unit = measure.scale, measure.unit
    title, label = f"{measure.name} against throughput", f"{measure.name} ({unit})"
    figure, axes = _axes(title, "Output tokens per second", label, servers)
    told = []
    for at, (server, of_server) in enumerate(points.items()):
        medians = [(summary.output_rate, measure.of_summary(summary).p50 * scale) for summary in of_server]
        tails = [(summary.output_rate, measure.of_summary(summary).p99 * scale) for summary in of_server]
        axes.plot(*_columns(medians), **_line(at), marker=MARKERS[at % len(MARKERS)], markersize=5)
        axes.plot(*_columns(tails), **_dots(at), markersize=5, markerfacecolor="none")
        words = []
        for summary, (rate, median) in zip(of_server, medians, strict=True):
            axes.annotate(summary.level, (rate, median), (3, -10), textcoords="offset points", fontsize=7, color=INK)
            words.append(f"{median:.3g} {unit} at {rate:.1f} tokens per second ({in_words(summary.level)})")
        told.append(f"{server}: {', '.join(words)}")
    shown = [measure.of_summary(summary) for summary in found]
    _latency_axis(axes, "y", [value * scale for of in shown for value in (of.p50, of.p99)])
    axes.set_xlim(left=0)
    return Drawing(
        f"latency-throughput-{measure.key}",
        "",
        "The line joins the medians at the levels; hollow marks are the 99th percentiles.",
        f"Median {measure.name.lower()} against output throughput. {'. '.join(told)}.",
        figure,
    )


def _ttft_over_time(level: str, runs: Mapping[str, list[Run]]) -> Drawing:
    points = {
        server: [(request.began, request.ttft) for run in of_server for request in run.requests if not request.error]
        for server, of_server in runs.items()
    }
    scale, unit = TTFT.scale, TTFT.unit
    title = f"{TTFT.name} over time, {in_words(level)}"
    figure, axes = _axes(title, "Sent, seconds after the run began", f"TTFT ({unit})", list(runs))
    told, is_thinned = [], False
    for at, (server, of_server) in enumerate(points.items()):
        shown = _thinned(of_server)
        is_thinned |= len(shown) < len(of_server)
        axes.plot(*_columns([(began, ttft * scale) for began, ttft in shown]), **_dots(at), alpha=0.7, markersize=3)
        if of_server:
            told.append(
                f"{server}: {len(of_server)} requests, longest {max(of_server, key=_second)[1] * scale:.3g} {unit}"
            )
    _latency_axis(axes, "y", [ttft * scale for of_server in points.values() for _, ttft in of_server])
    axes.set_xlim(left=0)
    caption = "A dot is one request; the runs lie over each other."
    if is_thinned:
        caption += (
            f" Of each 1/{TIME_SLICES} of the time, only the slowest and the middle request of a server are shown."
        )
    return Drawing(
        f"ttft-over-time-{_slug(level)}",
        level,
        caption,
        f"{TTFT.name} of each request over the time of the run, at {in_words(level)}. "
        f"{'. '.join(told) or 'No request succeeded'}.",
        figure,
    )


def _distribution(level: str, runs: Mapping[str, list[Run]], measure: Measure) -> Drawing:
    values = {server: measure.of_runs(of_server) for server, of_server in runs.items()}
    unit = measure.unit
    title, label = f"{measure.name}, {in_words(level)}", f"{measure.name} ({unit})"
    figure, axes = _axes(title, label, f"Share of {measure.of} (%)", list(runs))
    told = []
    for at, (server, of_server) in enumerate(values.items()):
        if not of_server.size:
            continue
        ranks = np.unique(np.linspace(0, of_server.size - 1, CURVE_POINTS).round().astype(int))
        axes.plot(of_server[ranks], 100 * (ranks + 1) / of_server.size, **_line(at), drawstyle="steps-post")
        p50, p90, p99 = np.percentile(of_server, (50, 90, 99))
        told.append(f"{server}: half within {p50:.3g} {unit}, 90% within {p90:.3g}, 99% within {p99:.3g}")
    axes.set_yticks((0, 25, 50, 75, 90, 100))
    axes.set_ylim(0, 102)
    _latency_axis(axes, "x", np.concatenate(list(values.values())))
    return Drawing(
        f"cdf-{measure.key}-{_slug(level)}",
        level,
        f"How many of the {measure.of} took at most so long (cumulative distribution, all runs).",
        f"Cumulative distribution of the {measure.name.lower()} at {in_words(level)}. "
        f"{'. '.join(told) or 'No request succeeded'}.",
        figure,
    )


def _axes(title: str, x_label: str, y_label: str, servers: Sequence[str]) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.8, 3.4), layout="constrained")
    axes = figure.add_subplot()
    pad = 8 + _add_legend(axes, servers)
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK, pad=pad)
    axes.set_xlabel(x_label, fontsize=9, color=INK)
    axes.set_ylabel(y_label, fontsize=9, color=INK)
    axes.tick_params(which="both", labelsize=8, color=GRID, labelcolor=INK)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID)
    return figure, axes


def _line(at: int) -> dict[str, Any]:
    return {"color": COLOURS[at % len(COLOURS)], "linestyle": DASHES[at % len(DASHES)], "linewidth": 1.6}


def _dots(at: int) -> dict[str, Any]:
    return {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)], "linestyle": "none"}


def _add_legend(axes: Axes, servers: Sequence[str]) -> float:
    """Above the axes, where it hides no data. Gives its height in points."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **_line(at), marker=MARKERS[at % len(MARKERS)]) for at in range(len(servers))]
    names = [_printable(server) for server in servers]
    columns = len(names) if sum(map(len, names)) <= 48 else 1
    legend = axes.legend(
        handles,
        ["-"] * len(names),
        ncols=columns,
        fontsize=8,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        borderpad=0,
        frameon=False,
    )
    # Set later and as they are: matplotlib leaves out a label with "_" in front, and reads "$" as mathematics.
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set(text=name, parse_math=False, color=INK)
    return 13.0 * len(names) / columns


def _latency_axis(axes: Axes, which: Literal["x", "y"], values: Iterable[float]) -> None:
    """From 0, or logarithmic if the values lie far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis = axes.xaxis if which == "x" else axes.yaxis
    positive = [value for value in values if value > 0]
    if positive and max(positive) > LOG_FROM * min(positive):
        axes.set(**{f"{which}scale": "log"})
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        axes.set(**{f"{which}lim": (0, None)})


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The slowest and the median of each slice of time, so that a page stays small and no outlier is lost."""
    if len(points) <= 2 * TIME_SLICES:
        return list(points)
    slices: dict[int, list[tuple[float, float]]] = {}
    width = max(began for began, _ in points) / TIME_SLICES
    for point in points:
        slices.setdefault(int(point[0] / width) if width else 0, []).append(point)
    shown: list[tuple[float, float]] = []
    for members in slices.values():
        members.sort(key=_second)
        shown += {members[len(members) // 2], members[-1]}
    return shown


def _second(point: tuple[float, float]) -> float:
    return point[1]


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _printable(text: str) -> str:
    """Control characters cannot stand in SVG."""
    shown = "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)
    return shown if len(shown) <= NAME_LENGTH else shown[: NAME_LENGTH - 1] + "…"


def _slug(level: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", level)
