"""What must hold between any two calls of the scheduler. Tests check it after every step."""

from __future__ import annotations

from collections import Counter

from surefoot.config.bounds import Bounds, KVGroup
from surefoot.protocol.step_plan import NO_COUNT_ROW, NO_PAGE
from surefoot.scheduler.kv_groups import first_column
from surefoot.scheduler.prefix_cache import Node, PrefixCache
from surefoot.scheduler.request import NO_SLOT, Request
from surefoot.scheduler.scheduler import Scheduler
from surefoot.scheduler.waiting_queue import MAX_OVERTAKES


class InvariantError(AssertionError):
    """The scheduler's state contradicts itself; the message says where."""


def check(scheduler: Scheduler) -> None:
    """Raises InvariantError. Takes time in proportion to pages, requests and tree nodes."""
    nodes = list(scheduler.kv.cache.nodes())
    _check_nodes(nodes)
    for group in range(len(scheduler.bounds.kv_groups)):
        _check_ledger(scheduler, group, nodes)
        _check_cached(scheduler.kv.cache, group, nodes)
    _check_places(scheduler)
    _check_queue(scheduler)
    rows = Counter(request for step in scheduler.in_flight for request in step.decoding + step.prefilling)
    for request in scheduler.live.values():
        count = request.rows_in_flight
        _require(
            count == rows[request], "request {} counts {} rows in flight, not {}", request.id, count, rows[request]
        )
        _check_request(request, scheduler)


def _require(holds: bool, otherwise: str, *values: object) -> None:
    if not holds:
        raise InvariantError(otherwise.format(*values))


def _check_nodes(nodes: list[Node]) -> None:
    for node in nodes:
        for key, child in node.children.items():
            _require(child.parent is node and child.key == key, "{} hangs wrongly under {}", child.pages, node.pages)
        has_page = any(page != NO_PAGE for page in node.pages)
        _require(has_page or bool(node.children), "a node has neither pages nor children")


def _check_ledger(scheduler: Scheduler, group: int, nodes: list[Node]) -> None:
    pool = scheduler.kv.pools[group]
    held = Counter(page for request in scheduler.running.values() for page in request.pages[group])
    held.update(node.pages[group] for node in nodes)
    holders = [held[page] for page in range(len(pool.holders))]
    _require(pool.holders == holders, "group {} counts holders {}, not {}", group, pool.holders, holders)
    in_tree = {node.pages[group] for node in nodes}
    kept = [page in in_tree for page in range(len(holders))]
    _require(pool.kept == kept, "group {} says that the tree keeps {}, not {}", group, pool.kept, kept)
    idle = sum(is_kept and count == 1 for is_kept, count in zip(kept, holders, strict=True))
    _require(pool.num_idle == idle, "group {} counts {} idle pages, not {}", group, pool.num_idle, idle)
    free, unheld = sorted(pool.free), [page for page, count in enumerate(holders) if count == 0]
    _require(free == unheld, "the free pages of group {} are {}, nobody holds {}", group, free, unheld)


def _check_cached(cache: PrefixCache, group: int, nodes: list[Node]) -> None:
    cached = cache.groups[group]
    owners = {node.pages[group]: node for node in nodes if node.pages[group] != NO_PAGE}
    count = sum(node.pages[group] != NO_PAGE for node in nodes)
    _require(count == len(owners) == cached.num_pages, "{} nodes hold {} pages of group {}", count, owners, group)
    _require(cached.is_windowed or count == len(nodes), "{} nodes lack a page of group {}", len(nodes) - count, group)
    for page, node in enumerate(cached.node_of):
        _require(owners.get(page) is node, "page {} of group {} is taken for another node's", page, group)
        queued = node is None or cached.queued[page] or not cached.is_evictable(page)
        _require(queued, "page {} of group {} can be evicted, but is no candidate", page, group)


def _check_places(scheduler: Scheduler) -> None:
    bounds = scheduler.bounds
    slots = sorted([*scheduler.running, *scheduler.free_slots])
    _require(slots == list(range(bounds.max_running_requests)), "running and free slots are {}", slots)
    running, waiting = list(scheduler.running.values()), list(scheduler.waiting)
    count_rows = [request.count_row for request in running if request.penalises]
    all_rows = sorted(count_rows + scheduler.free_count_rows)
    _require(all_rows == list(range(bounds.count_rows)), "used and free count rows are {}", all_rows)
    known = {request.id: request for request in running + waiting}
    _require(known == scheduler.live, "running and waiting are {}, live are {}", known, scheduler.live)
    _require(len(known) == len(running) + len(waiting), "{} running and {} waiting overlap", running, waiting)
    places = bounds.max_running_requests + bounds.max_queued_requests
    _require(len(known) <= places, "{} requests live in {} places", len(known), places)
    priorities = [request.priority for request in running]
    _require(priorities == sorted(priorities), "the priorities of running requests are {}, in order", priorities)


def _check_queue(scheduler: Scheduler) -> None:
    places = [(not request.preempted, request.priority, request.arrival) for request in scheduler.waiting]
    _require(places == sorted(places), "(not preempted, priority, arrival) in the queue are {}", places)
    most = max((request.overtaken for request in scheduler.waiting), default=0)
    _require(most <= MAX_OVERTAKES, "a waiting request was overtaken {} times", most)


def _check_request(request: Request, scheduler: Scheduler) -> None:
    name, tokens, end = f"request {request.id}", len(request.tokens), request.end
    computed, planned, scored = request.num_computed, request.num_planned, request.num_scored
    _require(not request.ended, "{} is alive and has ended", name)
    _require(tokens < end, "{} has {} of {} tokens and goes on", name, tokens, end)
    _require(1 <= scored <= len(request.asked.prompt_ids), "{} has {} prompt tokens scored", name, scored)
    if request.slot == NO_SLOT:
        is_void = not (request.pages or computed or planned or request.tail_on_device)
        _require(is_void, "{} waits, but has pages {} and {} planned tokens", name, request.pages, planned)
        _require(request.count_row == NO_COUNT_ROW, "{} waits, but has count row {}", name, request.count_row)
        return
    _require(scheduler.running.get(request.slot) is request, "{} is not the owner of its slot {}", name, request.slot)
    _require(request.penalises == (request.count_row != NO_COUNT_ROW), "{} has count row {}", name, request.count_row)
    _require(
        0 <= computed <= planned < end, "{} has computed {}, planned {} of {} tokens", name, computed, planned, end
    )
    for group, pages in zip(scheduler.bounds.kv_groups, request.pages, strict=True):
        _check_table(request, pages, group, scheduler.bounds)


def _check_table(request: Request, pages: list[int], group: KVGroup, bounds: Bounds) -> None:
    """`pages`: of `group`. Held are those that the next token sees, and no more than a request may hold."""
    columns, planned = len(pages), request.num_planned
    _require(columns <= bounds.page_table_columns, "request {} has {} columns of pages", request.id, columns)
    _require(planned <= columns * bounds.page_size, "request {}: {} tokens in {} pages", request.id, planned, columns)
    first = next((column for column, page in enumerate(pages) if page != NO_PAGE), columns)
    _require(NO_PAGE not in pages[first:], "request {} has pages with a hole: {}", request.id, pages)
    seen = first_column(planned, group.window, bounds.page_size)
    _require(first <= seen, "the next token of request {} sees column {}, pages are {}", request.id, seen, pages)
    held, most = columns - first, bounds.most_pages(group, request.end - 1)
    _require(held <= most, "request {} holds {} pages of a group, {} are allowed", request.id, held, most)
