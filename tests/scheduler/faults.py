"""Bugs to plant in the scheduler: the fuzz test must find each of them."""

from __future__ import annotations

import importlib.util
import inspect
from dataclasses import dataclass
from types import ModuleType

import pytest

from surefoot.scheduler import prefix_cache, request, scheduler


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
        (
            (
                "self._full_page_keys(request, len(request.tokens) - 1)",
                "self._full_page_keys(request, len(request.tokens))",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "uncommitted-pages-are-matchable",
        scheduler,
        (
            (
                "keys = self._full_page_keys(request, request.num_computed)",
                "keys = self._full_page_keys(request, min(request.num_planned, len(request.tokens)))",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "a-failed-step-is-kept",
        scheduler,
        (
            (
                "finished.append(self._end(request, FinishReason.ERROR, result",
                "request.num_computed = min(request.num_planned, len(request.tokens)); self._keep_prefix(request); "
                "finished.append(self._end(request, FinishReason.ERROR, result",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "a-held-page-is-given-away",
        prefix_cache,
        (
            (" and self.pool.holders[node.page] == 1", ""),
            ("self.pool.release((node.page,))", "self.pool.holders[node.page] = 0; self.pool.free.append(node.page)"),
        ),
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
        (
            (
                "            request.tokens.append(token)\n",
                "            if request.slot >= 0: request.tokens.append(token)\n",
            ),
        ),
        shows_in_tokens=True,
    ),
    Fault(
        "resumed-before-the-token-in-flight-is-known",
        scheduler,
        (
            ("if request.rows_in_flight or not self._seat(request)", "if not self._seat(request)"),
            ("if self.preemptions == preemptions", "if True"),
        ),
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
        (("self.num_planned = 0\n        self.tail_on_device = False\n", "self.num_planned = 0\n"),),
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
        (
            (
                "self._pages_for(len(request.tokens)) - len(matched)",
                "self._pages_for(len(request.tokens) - 1) - len(matched)",
            ),
        ),
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
        (
            ("            node = child\n\n    def offer", "            node = self.root\n\n    def offer"),
            ("            yield child\n            node = child\n", "            yield child\n"),
        ),
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
)


def plant(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the module's classes the methods of its edited source."""
    source = inspect.getsource(fault.module)
    for old, new in fault.edits:
        assert source.count(old) == 1, f"{fault.name}: {old!r} occurs {source.count(old)} times"
        source = source.replace(old, new)
    spec = importlib.util.spec_from_loader(fault.module.__name__, loader=None)
    assert spec is not None
    edited = importlib.util.module_from_spec(spec)
    exec(compile(source, fault.name, "exec"), edited.__dict__)
    for name, edited_class in inspect.getmembers(edited, inspect.isclass):
        if edited_class.__module__ == fault.module.__name__:
            original = getattr(fault.module, name)
            for attribute, value in vars(edited_class).items():
                if inspect.isfunction(value):
                    monkeypatch.setattr(original, attribute, value)
