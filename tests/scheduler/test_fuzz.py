"""Random scenarios, and planted faults that they must find."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import pytest

from surefoot.scheduler import invariants, kv_groups, page_pool, prefix_cache, request, scheduler, step, waiting_queue

from .faults import FAULTS
from .fuzz import run_scenarios
from .planting import Fault, plant

SHARDS = 8
SCENARIOS_PER_SHARD = 125
SLOW_SCENARIOS = 100_000
SLOW_PROCESSES = 2
SEEDS_PER_FAULT = 1000  # within which a planted fault must be found


@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_scenarios(shard: int) -> None:
    seen = run_scenarios(range(shard * SCENARIOS_PER_SHARD, (shard + 1) * SCENARIOS_PER_SHARD))
    assert_everything_happened(seen)


@pytest.mark.slow
def test_many_random_scenarios() -> None:
    size = 500
    first = SHARDS * SCENARIOS_PER_SHARD
    shards = [range(at, at + size) for at in range(first, first + SLOW_SCENARIOS, size)]
    with ProcessPoolExecutor(SLOW_PROCESSES) as pool:
        seen = sum(pool.map(run_scenarios, shards), Counter())
    assert seen["scenarios"] == SLOW_SCENARIOS
    assert_everything_happened(seen)


def assert_everything_happened(seen: Counter[str]) -> None:
    """The scenarios are worth nothing if what they are about does not come up."""
    for what in (
        *("preemptions", "cached tokens", "stop", "length", "aborted", "error", "stray rows"),
        *("waiting siblings", "penalised", "scored tokens", "pages before a window"),
    ):
        assert seen[what] >= 20, f"{what}: {seen[what]}"
    for what in ("refused queue_full", "refused too_long", "refused invalid"):
        assert seen[what] >= 10, f"{what}: {seen[what]}"
    for what in ("preempted while prefilling", "scored after a preemption"):
        assert seen[what] >= 1, f"{what}: {seen[what]}"


def assert_is_found() -> None:
    """By an assertion of the harness, the device or the scheduler itself."""
    with pytest.raises(AssertionError):
        run_scenarios(range(SEEDS_PER_FAULT))


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(fault, monkeypatch)
    assert_is_found()


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.shows_in_tokens], ids=lambda fault: fault.name)
def test_a_planted_fault_is_found_from_outside(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariants, "check", lambda scheduler: None)
    plant(fault, monkeypatch)
    assert_is_found()


def test_without_an_edit_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planting as such does no harm, so that what is found is the fault."""
    for module in (kv_groups, page_pool, prefix_cache, request, scheduler, step, waiting_queue):
        plant(Fault("none", module, ()), monkeypatch)
    run_scenarios(range(20))
