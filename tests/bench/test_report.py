"""The report of a benchmark: self-contained, complete, and safe against what servers say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surefoot.bench import figures
from surefoot.bench.figures import MissingMatplotlib, draw, export, require_matplotlib
from surefoot.bench.report import write_html
from surefoot.bench.results import FORMAT, BenchResult, RequestRecord, Run, ServerInfo, Workload

EVIL = '<script>alert("&")</script>'


def request(at: int, rate: float, error: str = "") -> RequestRecord:
    gaps = tuple((1 + (at + i) % 3) / rate for i in range(20))
    return RequestRecord(at * 0.1, 0.05 + 0.01 * (at % 5), 0.05 + sum(gaps), gaps, 128, 0, 21, 21, error)


def run(server: str, level: str, repeat: int, rate: float, errors: int = 0) -> Run:
    requests = tuple(request(at, rate, f"HTTP 503 {EVIL}" if at < errors else "") for at in range(30))
    return Run(server, level, repeat, 3.0, requests, 0.0, 0.2)


@pytest.fixture
def result() -> BenchResult:
    names = ("ours", f"theirs $x_1$ {EVIL}")
    runs = [
        run(name, level, repeat, 100 / (at + 1), errors=3 if at else 0)
        for level in ("c1", "c16", "r2.5")
        for repeat in range(2)
        for at, name in enumerate(names)
    ]
    return BenchResult(
        format=FORMAT,
        date="2026-12-01T00:00:00+00:00",
        machine="2 x a CPU",
        versions="Python 3.11",
        command="surefoot bench serve",
        workload=Workload("random", f"random prompts {EVIL}", 7, "fresh", 0),
        servers=tuple(ServerInfo(name, "http://127.0.0.1", f"x {EVIL}", f"m {EVIL}", "abc123") for name in names),
        runs=tuple(runs),
        warnings=(f"the client was slow {EVIL}",),
    )


def test_a_page_that_needs_nothing_else(result: BenchResult, tmp_path: Path) -> None:
    write_html(result, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert EVIL not in page
    assert "&lt;script&gt;" in page
    assert not re.search(r"""(?:src|href)=["']?(?!#)(?:https?:|//|[\w./-]+\.(?:js|css|png|svg))""", page)
    assert "<script" not in page
    assert page.count("<svg") == len(draw(result)) == 4 + 3 * 4
    for said in ("abc123", "Seed", "HTTP 503", "the client was slow", "16 clients", "2.5 requests/s"):
        assert said in page, said


def test_figures_as_files(result: BenchResult, tmp_path: Path) -> None:
    paths = export(draw(result), tmp_path / "figures")
    assert len(paths) == len(set(paths)) == 2 * len(draw(result))
    for path in paths:
        assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")


def test_every_drawing_says_what_it_shows(result: BenchResult) -> None:
    drawings = draw(result)
    assert all(drawing.alt and drawing.caption for drawing in drawings)
    throughput = drawings[0].alt
    # 27 of 30 requests with 21 tokens in 3 s, and 30 of 30.
    assert "210.0 at 1 client" in throughput
    assert "189.0 at 1 client" in throughput


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(MissingMatplotlib, match=r"pip install 'surefoot\[bench\]'"):
        require_matplotlib()
