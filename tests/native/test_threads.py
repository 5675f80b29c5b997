"""The measurement by which the number of threads is chosen: what it measures, not how fast that is."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.native import threads
from tests.native_kernels import native_library


def test_each_number_of_threads_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MAX_WAITING", math.inf)  # whatever else runs
    speeds = threads.measure(native_library(), [1, 2, 3])
    assert len(speeds) == 3
    for read, flops in speeds:
        assert 1e7 < read < 1e13  # bytes and operations a second, of a toy or of a giant
        assert 1e7 < flops < 1e15


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_its_threads_end() -> None:
    before = len(os.listdir("/proc/self/task"))
    threads.measure(native_library(), [4])
    assert len(os.listdir("/proc/self/task")) <= before + 1  # /proc lags behind a join


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this system does not tell who waits")
def test_nothing_is_measured_on_busy_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two other programs want the CPU that the threads have: they wait for most of the time."""
    monkeypatch.setattr(threads, "SECONDS", 0.3)
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        assert threads.measure(native_library(), [1]) == []
    finally:
        os.sched_setaffinity(0, allowed)
        for other in others:
            other.kill()
            other.wait()
