"""Launches steps. On a CPU the "device stream" is one worker thread: steps run in order, one at a time.

The runner is made in that thread too, and no other thread may compute with torch: OpenMP gives each calling thread a
team of its own, and as soon as all teams have more threads than the machine has CPUs, libgomp stops spinning between
parallel regions, which makes a decode step a tenth slower (docs/log.md).
"""

from __future__ import annotations

import logging
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from surefoot.engine.flight_recorder import FlightRecorder, PlanRecord, ResultRecord
from surefoot.protocol.step_plan import StepDone, StepFailed, StepPlan, StepResult

INNERMOST_FRAMES = 3
OUT_OF_MEMORY = "out of memory: a smaller --mem-fraction or --kv-cache-tokens needs less of it"

log = logging.getLogger("surefoot.engine")


class LaunchedStep:
    def __init__(self, plan: StepPlan, future: Future[StepDone], recorder: FlightRecorder) -> None:
        self.plan = plan
        self._future = future
        self._recorder = recorder

    def wait(self) -> StepResult:
        result: StepResult
        try:
            result = self._future.result()
        except Exception as error:
            frames = "".join(traceback.format_tb(error.__traceback__)[-INNERMOST_FRAMES:])
            result = StepFailed(self.plan.step_id, f"{type(error).__name__}: {error}\n{frames}")
            log.error("step %d failed: %s", self.plan.step_id, result.error)
        self._recorder.record(ResultRecord(time.time(), result))
        return result


class StepRunner(Protocol):
    def run(self, plan: StepPlan) -> StepDone: ...


class ThreadExecutor:
    def __init__(self, make_runner: Callable[[], StepRunner], recorder: FlightRecorder) -> None:
        """Raises what `make_runner` raises, and MemoryError with the way out if that ran out of memory."""
        self._recorder = recorder
        self._stream = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        try:
            self.runner = self._stream.submit(make_runner).result()
        except Exception as error:
            self._stream.shutdown()
            if is_out_of_memory(error):
                raise MemoryError(OUT_OF_MEMORY) from error
            raise

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Records the plan, then queues it."""
        future: Future[StepDone] = Future()
        try:
            self._recorder.record(PlanRecord(time.time(), plan))
            future = self._stream.submit(self.runner.run, plan)
        except ValueError as error:  # larger than the ring: it is not launched unrecorded
            future.set_exception(error)
        return LaunchedStep(plan, future, self._recorder)

    def close(self) -> None:
        self._stream.shutdown()


def is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or "allocate memory" in str(error)  # torch's own is a RuntimeError
