"""Random traffic of 64 clients while the engine is killed: every request ends once, nothing leaks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import gauges
from tests.e2e.conftest import TIGHT
from tests.e2e.faulty import FaultyServer
from tests.e2e.server import wait_until
from tests.e2e.soak import DEATHS, FRONTEND, REFUSALS, RESULTS, Soak, open_files
from tests.tiny import TinyLlama

MAX_GROWTH_MIB = {"supervisor": 8, "frontend": 40, "engine": 80}
SPARE_FILES = 4


@pytest.fixture
def server(tiny_llama: TinyLlama, log: Path) -> Iterator[FaultyServer]:
    """Prefix cache, chunks of 16 tokens, lookahead 1, and a cache so small that requests are preempted."""
    settings = dict(TIGHT, chunked_prefill_size=16, lookahead=1, max_restarts=10_000)
    with FaultyServer(log, model=tiny_llama.path, **settings) as running:
        yield running


@pytest.mark.parametrize(
    "seconds, kill_every",
    [
        pytest.param(30, 10, id="short"),
        pytest.param(15 * 60, 60, id="long", marks=pytest.mark.slow),
    ],
)
def test_soak(server: FaultyServer, seconds: float, kill_every: float, capsys: pytest.CaptureFixture[str]) -> None:
    processes = {"supervisor": server.process.pid, "frontend": server.child(FRONTEND)}
    files = {role: open_files(pid) for role, pid in processes.items()}
    soak = Soak(server, seconds, kill_every)
    asyncio.run(soak.run())
    with capsys.disabled():
        print(f"\n{soak.summary()}")

    assert soak.kills == seconds // kill_every - 1
    assert set(soak.ends) <= RESULTS | REFUSALS | DEATHS | {"left"}, soak.ends
    assert min(soak.ends[end] for end in ("stop", "length", "left", "refused 400", "error event")) > 0, soak.ends
    gauges.check_pages(server)
    for role, pid in processes.items():
        wait_until(lambda pid=pid, role=role: open_files(pid) <= files[role] + SPARE_FILES)  # type: ignore[misc]
    for memory in soak.memory.values():
        assert memory.growth() <= MAX_GROWTH_MIB[memory.role], soak.summary()
    assert server.stop() == 0
