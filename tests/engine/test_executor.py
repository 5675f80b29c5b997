"""Launching: recorded before it runs, in order, failures as values."""

from __future__ import annotations

import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from surefoot.engine.executor import ThreadExecutor
from surefoot.engine.flight_recorder import FlightRecorder, PlanRecord, ResultRecord, read_records
from surefoot.protocol.step_plan import StepDone, StepFailed, StepPlan


def plan(step_id: int) -> StepPlan:
    return StepPlan(step_id, (), (), (3,), (step_id,), ())


def test_a_plan_is_on_disk_before_it_runs(tmp_path: Path) -> None:
    seen: list[list[object]] = []

    def run(step: StepPlan) -> StepDone:
        seen.append(list(read_records(tmp_path / "ring")))
        return StepDone(step.step_id, (1,), (True,), (), (), "path")

    executor = ThreadExecutor(lambda: Mock(run=run), FlightRecorder(tmp_path / "ring"))
    result = executor.launch(plan(1)).wait()
    executor.close()
    (record,) = seen[0]
    assert isinstance(record, PlanRecord)
    assert record.plan == plan(1)
    after = list(read_records(tmp_path / "ring"))[-1]
    assert isinstance(after, ResultRecord)
    assert after.result == result == StepDone(1, (1,), (True,), (), (), "path")


def test_launch_returns_before_the_step_ran_and_steps_run_in_order(tmp_path: Path) -> None:
    gate = threading.Event()
    ran: list[int] = []

    def run(step: StepPlan) -> StepDone:
        gate.wait(10)
        ran.append(step.step_id)
        return StepDone(step.step_id, (), (), (), (), "")

    executor = ThreadExecutor(lambda: Mock(run=run), FlightRecorder(tmp_path / "ring"))
    launched = [executor.launch(plan(step_id)) for step_id in (1, 2)]
    assert ran == []
    gate.set()
    assert [step.wait().step_id for step in launched] == [1, 2]
    assert ran == [1, 2]
    executor.close()


def test_a_step_that_raises_is_a_value_with_its_cause_and_is_recorded(tmp_path: Path) -> None:
    def run(step: StepPlan) -> StepDone:
        raise AttributeError("'PrefillMetadata' object has no attribute 'page_table_1_flattened'")

    executor = ThreadExecutor(lambda: Mock(run=run), FlightRecorder(tmp_path / "ring"))
    result = executor.launch(plan(7)).wait()
    executor.close()
    assert isinstance(result, StepFailed)
    assert result.step_id == 7
    assert result.error.startswith("AttributeError: 'PrefillMetadata' object has no attribute")
    assert "test_executor.py" in result.error
    last = list(read_records(tmp_path / "ring"))[-1]
    assert isinstance(last, ResultRecord)
    assert last.result == result


def test_a_plan_that_does_not_fit_the_ring_is_a_failed_step_and_not_launched(tmp_path: Path) -> None:
    ran: list[StepPlan] = []
    executor = ThreadExecutor(lambda: Mock(run=ran.append), FlightRecorder(tmp_path / "ring", capacity=1000))
    large = StepPlan(5, (), (), tuple(range(400)), tuple(range(400)), ())
    result = executor.launch(large).wait()
    executor.close()
    assert isinstance(result, StepFailed)
    assert "does not fit a ring of 1000" in result.error
    assert ran == []


def test_a_runner_that_does_not_fit_the_memory_says_what_needs_less(tmp_path: Path) -> None:
    with pytest.raises(MemoryError, match="--kv-cache-tokens"):
        ThreadExecutor(lambda: Mock(run=torch.empty(1 << 60)), FlightRecorder(tmp_path / "ring"))
    with pytest.raises(RuntimeError, match="size of tensor a"):
        ThreadExecutor(lambda: Mock(run=torch.ones(2) + torch.ones(3)), FlightRecorder(tmp_path / "ring"))
