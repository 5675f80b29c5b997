"""The team of threads, with tasks in Python: who does what, who sleeps, who is left."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tests.native_kernels import native_library

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int, ctypes.c_int)
ASLEEP = 0.02  # seconds after which idle threads have long gone to sleep
WAIT = 30.0  # for threads of a busy machine


class Pool:
    def __init__(self, threads: int) -> None:
        self.lib = ctypes.CDLL(str(native_library()))
        self.lib.pool_create.restype = ctypes.c_void_p
        self.lib.pool_scratch.restype = ctypes.c_void_p
        self.lib.pool_scratch.argtypes = (ctypes.c_void_p, ctypes.c_int64)
        self.lib.parallel_for.argtypes = (ctypes.c_void_p, ctypes.c_int, TASK, ctypes.c_void_p)
        self._pool = ctypes.c_void_p(self.lib.pool_create(threads))

    def run(self, tasks: int, function: Callable[[int, int], None], args: int = 0) -> None:
        """function: of task and thread. Its errors are raised here."""
        errors: list[BaseException] = []

        def called(given: int | None, task: int, thread: int) -> None:
            try:
                assert (given or 0) == args
                function(task, thread)
            except BaseException as error:
                errors.append(error)

        self.lib.parallel_for(self._pool, tasks, TASK(called), args)
        if errors:
            raise errors[0]

    @property
    def threads(self) -> int:
        return int(self.lib.pool_threads(self._pool))

    def scratch(self, size: int) -> int:
        return int(self.lib.pool_scratch(self._pool, size))

    def destroy(self) -> None:
        self.lib.pool_destroy(self._pool)


@pytest.fixture(params=[1, 2, 3, 4])
def pool(request: pytest.FixtureRequest) -> Iterator[Pool]:
    made = Pool(request.param)
    assert made.threads == request.param
    yield made
    made.destroy()


@pytest.mark.parametrize("tasks", [0, 1, 2, 3, 5, 64, 1000])
def test_each_task_runs_once(pool: Pool, tasks: int) -> None:
    done: list[int] = []
    threads: set[int] = set()

    def task(number: int, thread: int) -> None:
        done.append(number)
        threads.add(thread)

    pool.run(tasks, task, args=7)
    assert sorted(done) == list(range(tasks))
    assert threads <= set(range(pool.threads))


@pytest.mark.parametrize("pause", [0.0, ASLEEP], ids=["awake", "asleep"])
def test_all_threads_take_part(pool: Pool, pause: float) -> None:
    """No task ends before each thread has one. Those that sleep are woken, again and again."""
    for _ in range(5):
        time.sleep(pause)
        meeting = threading.Barrier(pool.threads)
        threads: list[int] = []

        def task(_: int, thread: int, meeting: threading.Barrier = meeting, threads: list[int] = threads) -> None:
            meeting.wait(WAIT)
            threads.append(thread)

        pool.run(pool.threads, task)
        assert sorted(threads) == list(range(pool.threads))


def test_the_caller_waits_for_the_last_task(pool: Pool) -> None:
    ended: list[int] = []

    def task(number: int, thread: int) -> None:
        if thread > 0 or pool.threads == 1:
            time.sleep(0.01)
        ended.append(number)

    for _ in range(5):
        ended.clear()
        pool.run(2 * pool.threads, task)
        assert len(ended) == 2 * pool.threads


def test_ten_thousand_loops(pool: Pool) -> None:
    done: Counter[int] = Counter()
    for loop in range(10_000):
        pool.run(3, lambda task, _: done.update((task,)))
        if loop % 2500 == 0:
            time.sleep(ASLEEP)
    assert done == {0: 10_000, 1: 10_000, 2: 10_000}


def test_scratch_memory_grows(pool: Pool) -> None:
    for size in (1, 100, 64, 1 << 20):
        place = pool.scratch(size)
        assert place % 64 == 0
        ctypes.memset(place, 1, size)
    assert pool.scratch(10) == place


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_no_thread_is_left() -> None:
    def num_threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = num_threads()
    for pause in (0.0, ASLEEP):  # destroyed while it looks for work, and while it sleeps
        pool = Pool(4)
        assert num_threads() == before + 3
        time.sleep(pause)
        pool.destroy()
        until = time.monotonic() + WAIT
        while num_threads() > before and time.monotonic() < until:  # /proc lags behind a join
            time.sleep(0.001)
        assert num_threads() == before
