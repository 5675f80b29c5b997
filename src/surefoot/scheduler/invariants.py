"""What must hold between any two calls of the scheduler. Tests check it after every step."""

from __future__ import annotations

from collections import Counter

from surefoot.scheduler.prefix_cache import PrefixCache
from surefoot.scheduler.request import NO_SLOT, Request
from surefoot.scheduler.scheduler import MAX_OVERTAKES, Scheduler


class InvariantError(AssertionError):
    """The scheduler's state contradicts itself; the message says where."""


def check(scheduler: Scheduler) -> None:
    """Raises InvariantError. Takes time in proportion to pages, requests and tree nodes."""
    _check_ledger(scheduler)
    _check_tree(scheduler.cache)
    _check_places(scheduler)
    rows = Counter(request for step in scheduler.in_flight for request in step.decoding + step.prefilling)
    for request in scheduler.live.values():
        _require(
            request.rows_in_flight == rows[request],
            f"request {request.id} counts {request.rows_in_flight} rows in flight, the steps have {rows[request]}",
        )
        _check_request(request, scheduler)


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise InvariantError(otherwise)


def _check_ledger(scheduler: Scheduler) -> None:
    pool = scheduler.pool
    held = Counter(page for request in scheduler.live.values() for page in request.pages)
    held.update(node.page for node in scheduler.cache.nodes())
    for page, count in enumerate(pool.holders):
        _require(count == held[page], f"page {page} counts {count} holders, but {held[page]} hold it")
    free = sorted(pool.free)
    unheld = [page for page, count in enumerate(pool.holders) if count == 0]
    _require(free == unheld, f"the free pages are {free}, nobody holds {unheld}")


def _check_tree(cache: PrefixCache) -> None:
    nodes = list(cache.nodes())
    _require(len(nodes) == cache.num_pages, f"the tree has {len(nodes)} nodes, it counts {cache.num_pages}")
    pages = Counter(node.page for node in nodes)
    _require(all(count == 1 for count in pages.values()), f"pages are in the tree more than once: {pages}")
    for node in nodes:
        for key, child in node.children.items():
            _require(
                child.parent is node and child.key == key, f"page {child.page} hangs wrongly under page {node.page}"
            )
        evictable = not node.children and cache.pool.holders[node.page] == 1
        _require(node.queued or not evictable, f"page {node.page} can be evicted, but is no candidate")


def _check_places(scheduler: Scheduler) -> None:
    bounds = scheduler.bounds
    slots = sorted([*scheduler.running, *scheduler.free_slots])
    _require(slots == list(range(bounds.max_running_requests)), f"running and free slots are {slots}")
    running = {request.id: request for request in scheduler.running.values()}
    _require(
        {**running, **scheduler.waiting} == scheduler.live
        and len(running) + len(scheduler.waiting) == len(scheduler.live),
        f"running {list(running)} and waiting {list(scheduler.waiting)} are not the live {list(scheduler.live)}",
    )
    places = bounds.max_running_requests + bounds.max_queued_requests
    _require(len(scheduler.live) <= places, f"{len(scheduler.live)} requests live in {places} places")
    waiting = list(scheduler.waiting.values())
    preempted = [request.preempted for request in waiting]
    _require(preempted == sorted(preempted, reverse=True), "a preempted request waits behind a new one")
    overtaken = [request.overtaken for request in waiting if not request.preempted]
    _require(
        overtaken == sorted(overtaken, reverse=True) and max(overtaken, default=0) <= MAX_OVERTAKES,
        f"waiting requests were overtaken {overtaken} times, in order",
    )


def _check_request(request: Request, scheduler: Scheduler) -> None:
    name, page_size = f"request {request.id}", scheduler.bounds.page_size
    _require(not request.ended, f"{name} is alive and has ended")
    _require(len(request.tokens) < request.end, f"{name} has {len(request.tokens)} of {request.end} tokens and goes on")
    if request.slot == NO_SLOT:
        _require(
            not request.pages and not request.num_computed and not request.num_planned and not request.tail_on_device,
            f"{name} waits, but has pages {request.pages} and {request.num_planned} planned tokens",
        )
        return
    _require(scheduler.running.get(request.slot) is request, f"{name} is not the owner of its slot {request.slot}")
    _require(
        0 <= request.num_computed <= request.num_planned < request.end,
        f"{name} has {request.num_computed} computed and {request.num_planned} planned of {request.end} tokens",
    )
    places = len(request.pages) * page_size
    _require(request.num_planned <= places, f"{name} has {request.num_planned} planned tokens in {places} places")
    _require(
        len(request.pages) <= scheduler.bounds.page_table_columns,
        f"{name} has {len(request.pages)} pages, a page table {scheduler.bounds.page_table_columns} columns",
    )
