"""Random scenarios, and planted faults that they must find."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import ModuleType

import pytest

from surefoot.scheduler import invariants, page_pool, prefix_cache, request, scheduler

from .fuzz import run_scenario, run_scenarios

SHARDS = 8
SCENARIOS_PER_SHARD = 125
SLOW_SCENARIOS = 100_000
SLOW_PROCESSES = 2
SEEDS_PER_FAULT = 300  # within which a planted fault must be found


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
    for what in ("preemptions", "cached tokens", "stop", "length", "aborted", "error", "stray rows"):
        assert seen[what] >= 20, f"{what}: {seen[what]}"
    for what in ("refused queue_full", "refused too_long", "refused invalid"):
        assert seen[what] >= 10, f"{what}: {seen[what]}"


@dataclass(frozen=True)
class Fault:
    """A bug: each `old` text, which occurs once in the module's source, becomes `new`."""

    name: str
    module: ModuleType
    edits: tuple[tuple[str, str], ...]
    shows_in_tokens: bool = False  # found even if the scheduler's own state is never checked


FAULTS = (
    Fault(
        "match-leaves-no-token-to-compute",
        scheduler,
        (("self._full_page_keys(request, len(request.tokens) - 1)", "self._full_page_keys(request, len(request.tokens))"),),
        shows_in_tokens=True,
    ),
    Fault(
        "uncommitted-pages-are-matchable",
        scheduler,
        (("keys = self._full_page_keys(request, request.num_computed)",
          "keys = self._full_page_keys(request, min(request.num_planned, len(request.tokens)))"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-failed-step-is-kept",
        scheduler,
        (("finished.append(self._end(request, FinishReason.ERROR, result.error))",
          "request.num_computed = min(request.num_planned, len(request.tokens)); self._keep_prefix(request); "
          "finished.append(self._end(request, FinishReason.ERROR, result.error))"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-held-page-is-given-away",
        prefix_cache,
        ((" and self.pool.holders[node.page] == 1", ""),
         ("self.pool.release((node.page,))", "self.pool.holders[node.page] = 0; self.pool.free.append(node.page)")),
        shows_in_tokens=True,
    ),
    Fault(
        "a-match-is-not-held",
        prefix_cache,
        (("        self.pool.retain(pages)\n", ""),),
    ),
    Fault(
        "pages-are-released-twice",
        scheduler,
        (("        self._release(request, request.pages)\n", "        self._release(request, request.pages * 2)\n"),),
    ),
    Fault(
        "pages-are-not-released",
        scheduler,
        (("        self._release(request, request.pages)\n", ""),),
    ),
    Fault(
        "released-pages-are-not-offered-for-eviction",
        scheduler,
        (("        self.cache.offer(self._full_page_keys(request, len(request.tokens)))\n", ""),),
    ),
    Fault(
        "a-slot-is-not-given-back",
        scheduler,
        (("        self.free_slots.append(request.slot)\n", ""),),
    ),
    Fault(
        "a-row-of-an-ended-request-is-committed",
        scheduler,
        (("            if request.ended:\n", "            if False:\n"),),
    ),
    Fault(
        "a-row-is-committed-by-id",
        scheduler,
        (("            if request.ended:\n", "            if request.id not in self.live:\n"),),
        shows_in_tokens=True,
    ),
    Fault(
        "a-preempted-request-loses-the-token-in-flight",
        scheduler,
        (("            request.tokens.append(token)\n", "            if request.slot >= 0: request.tokens.append(token)\n"),),
        shows_in_tokens=True,
    ),
    Fault(
        "resumed-before-the-token-in-flight-is-known",
        scheduler,
        (("if request.rows_in_flight or not self._seat(request)", "if not self._seat(request)"),
         ("if self.preemptions == preemptions", "if True")),
        shows_in_tokens=True,
    ),
    Fault(
        "preemption-keeps-num-planned",
        request,
        (("self.num_computed = self.num_planned = 0", "self.num_computed = 0"),),
    ),
    Fault(
        "preemption-keeps-the-tail-flag",
        request,
        (("        self.pages = []\n        self.num_computed = self.num_planned = 0\n        self.tail_on_device = False\n",
          "        self.pages = []\n        self.num_computed = self.num_planned = 0\n"),),
    ),
    Fault(
        "the-oldest-request-is-preempted",
        scheduler,
        (("next(reversed(self.running.values()))", "next(iter(self.running.values()))"),),
        shows_in_tokens=True,
    ),
    Fault(
        "page-append-one-column-late",
        scheduler,
        (("len(request.pages), page))", "len(request.pages) + 1, page))"),),
        shows_in_tokens=True,
    ),
    Fault(
        "page-append-one-token-late",
        scheduler,
        (("if start == len(request.pages) * page_size", "if start == len(request.pages) * page_size + 1"),),
        shows_in_tokens=True,
    ),
    Fault(
        "too-few-pages-at-admission",
        scheduler,
        (("self._pages_for(len(request.tokens)) - len(matched)", "self._pages_for(len(request.tokens) - 1) - len(matched)"),),
        shows_in_tokens=True,
    ),
    Fault(
        "decodes-past-the-end",
        scheduler,
        (("start == request.end - 1", "start == request.end"),),
    ),
    Fault(
        "the-last-but-one-token-samples",
        scheduler,
        (("request.num_planned == len(request.tokens)", "request.num_planned >= len(request.tokens) - 1"),),
        shows_in_tokens=True,
    ),
    Fault(
        "the-namespace-is-ignored",
        request,
        (("self.asked.cache_namespace.encode() + ", ""),),
        shows_in_tokens=True,
    ),
    Fault(
        "pages-of-equal-tokens-are-one-whatever-came-before",
        prefix_cache,
        (("            node = child\n\n    def offer", "            node = self.root\n\n    def offer"),
         ("            yield child\n            node = child\n", "            yield child\n")),
        shows_in_tokens=True,
    ),
    Fault(
        "a-stop-id-does-not-stop",
        scheduler,
        (("if token in request.stop_ids or len", "if len"),),
        shows_in_tokens=True,
    ),
    Fault(
        "min-tokens-without-the-prompt",
        scheduler,
        (("min_tokens = len(asked.prompt_ids) + asked.min_new_tokens", "min_tokens = asked.min_new_tokens"),),
        shows_in_tokens=True,
    ),
    Fault(
        "the-queue-has-one-place-more",
        scheduler,
        (("if len(self.live) >= slots + places", "if len(self.live) > slots + places"),),
        shows_in_tokens=True,
    ),
    Fault(
        "cached-tokens-of-the-last-admission",
        scheduler,
        (("        if not request.preempted:\n", "        if True:\n"),),
        shows_in_tokens=True,
    ),
)  # fmt: skip


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the module's classes the methods of its edited source."""
    source = inspect.getsource(fault.module)
    for old, new in fault.edits:
        assert source.count(old) == 1, f"{fault.name}: {old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    spec = importlib.util.spec_from_loader(fault.module.__name__, loader=None)
    assert spec is not None
    edited = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, fault.module.__name__, fault.module)
    exec(compile(source, fault.name, "exec"), edited.__dict__)
    for name, edited_class in inspect.getmembers(edited, inspect.isclass):
        if edited_class.__module__ == fault.module.__name__:
            original = getattr(fault.module, name)
            for attribute, value in vars(edited_class).items():
                if inspect.isfunction(value):
                    monkeypatch.setattr(original, attribute, value)


def assert_is_found() -> None:
    with pytest.raises(Exception):  # noqa: B017  an assertion of the harness, the device or the scheduler itself
        for seed in range(SEEDS_PER_FAULT):
            run_scenario(seed)


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
    for module in (page_pool, prefix_cache, request, scheduler):
        plant(Fault("none", module, ()), monkeypatch)
    run_scenarios(range(20))
