"""How fast the kernels are with some numbers of threads.

Hyper-threads, a cgroup's quota or a full memory bus make some threads useless or worse, and no figure of the system
tells how many.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

from surefoot.native.kernels import FORMATS, Kernels, Linear, zeros_in_huge_pages

SECONDS = 0.1  # for all rounds, of which at least MIN_ROUNDS are made
MIN_ROUNDS = 3  # in the first one threads wake up and caches fill
INPUTS = 1024
READ_OUTPUTS = 1 << 15  # of fp16: 64 MiB, of which no core's cache holds its share
MANY_ROWS, MANY_OUTPUTS = 64, 2048  # 4 MiB, and enough rows that arithmetic takes the time
# Share of the time of the largest team in which it was ready and had no CPU. Alone it is below 0.005; with one other
# program on two CPUs 0.1, and then one thread may look as fast as two.
MAX_WAITING = 0.02


def measure(library: Path, counts: Sequence[int]) -> list[tuple[float, float]]:
    """For each number of threads, which ascend: bytes a second of the weights that a product of one row reads, and
    floating-point operations a second of a product of many rows. Nothing if other programs had the CPUs meanwhile.

    The numbers take turns, and the best round of each counts.
    """
    teams = [Kernels(library, threads) for threads in counts]
    whole = Linear(FORMATS["w16"], INPUTS, READ_OUTPUTS, None, None)
    read_bytes: int = teams[0].lib.linear_bytes(whole)
    weights = zeros_in_huge_pages(read_bytes)
    weights.fill(0)  # pages that nobody has written are one and the same, and stay in the cache
    whole.panels = weights.ctypes.data
    part = Linear(FORMATS["w16"], INPUTS, MANY_OUTPUTS, whole.panels, None)
    x = np.ones((MANY_ROWS, INPUTS), np.float32)
    y = np.empty(max(READ_OUTPUTS, MANY_ROWS * MANY_OUTPUTS), np.float32)

    def seconds(team: Kernels, weight: Linear, rows: int) -> float:
        start = time.perf_counter()
        team.lib.linear(team.pool, weight, x.ctypes.data, rows, y.ctypes.data, 0)
        return time.perf_counter() - start

    best = [(math.inf, math.inf)] * len(teams)
    start, waited, rounds = time.perf_counter(), _seconds_without_cpu(), 0
    while rounds < MIN_ROUNDS or time.perf_counter() < start + SECONDS:
        for i, team in enumerate(teams):
            best[i] = min(best[i][0], seconds(team, whole, 1)), min(best[i][1], seconds(team, part, MANY_ROWS))
        rounds += 1
    waited = _seconds_without_cpu() - waited
    if waited > MAX_WAITING * counts[-1] * (time.perf_counter() - start):
        return []
    operations = 2 * MANY_ROWS * INPUTS * MANY_OUTPUTS
    return [(read_bytes / of_read, operations / of_many) for of_read, of_many in best]


def _seconds_without_cpu() -> float:
    """Of the threads of this process: how long they were ready to run and had to wait. 0 where no system tells."""
    nanoseconds = 0
    for thread in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # it has ended
            nanoseconds += int(thread.read_text().split()[1])
    return nanoseconds * 1e-9
