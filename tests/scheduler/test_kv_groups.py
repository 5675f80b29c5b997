"""Layers with windows: pages come and go with them, and a match is what the next token sees."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from surefoot.config.bounds import KVGroup, held_pages
from surefoot.protocol.messages import RefusalCause, Refused
from surefoot.protocol.step_plan import NO_PAGE, PageRun
from surefoot.scheduler.page_pool import PagePool
from surefoot.scheduler.prefix_cache import PrefixCache

from .fake_device import continuation
from .rig import Rig, bounds, make_request

PROMPT = tuple(range(1, 23))  # five pages of four tokens, and two tokens


# Requests


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("windows", [(1,), (3,), (4,), (0, 6), (100,), (2, 9), (0, 0), (0, 5, 8)], ids=str)
def test_windows_of_any_size_give_the_same_tokens(windows: tuple[int, ...], chunk: int, lookahead: int) -> None:
    rig = Rig(bounds(windows=windows, chunked_prefill_size=chunk))
    requests = [make_request(i, PROMPT[: 22 - i], new=20) for i in range(3)]
    for request in requests:
        rig.submit(request)
    rig.run(lookahead)
    assert rig.tokens == {request.id: continuation(request) for request in requests}


@pytest.mark.parametrize("window, chunk", [(1, 1), (5, 3), (8, 4), (8, 16), (13, 7)])
def test_a_long_request_fits_a_pool_of_the_pages_it_may_hold(window: int, chunk: int) -> None:
    most = held_pages(63, window, page_size=4, chunk=chunk)
    assert most < 16
    rig = Rig(bounds(num_pages=most, windows=(window,), chunked_prefill_size=chunk))
    request = make_request(0, PROMPT + PROMPT[:18], new=24)
    for _ in range(2):
        rig.submit(request)
        rig.run(lookahead=1)
        assert rig.tokens.pop(0) == continuation(request)
    assert rig.scheduler.preemptions == 0


def test_pages_before_the_window_are_released_with_the_next_row() -> None:
    rig = Rig(bounds(windows=(8,), chunked_prefill_size=4), prefix_cache=False)
    rig.add(0, PROMPT, new=11)
    held = []
    for _ in range(9):
        rig.step()
        (table,) = next(iter(rig.scheduler.running.values())).pages
        held.append([column for column, page in enumerate(table) if page != NO_PAGE])
    # Four pages: those of the window, which begins anywhere in one, and of the chunk.
    assert held[:6] == [[0, 1, 2, 3]] * 2 + [[0, 1, 2, 3], [1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5]]
    # Then at each page edge: token 24 sees 17 to 24.
    assert held[6:9] == [[3, 4, 5], [3, 4, 5], [4, 5, 6]]


def test_a_first_row_has_its_cached_prefix_and_no_pages_before_the_window() -> None:
    rig = Rig(bounds(windows=(0, 6)))
    rig.add(0, PROMPT, new=1)
    rig.run()
    rig.add(1, PROMPT, new=1)
    (row,) = rig.step().prefill
    assert row.start == 20
    assert row.pages == (
        PageRun(group=0, column=0, pages=(0, 1, 2, 3, 4, 5)),
        PageRun(group=1, column=0, pages=(NO_PAGE, NO_PAGE, NO_PAGE, 3, 4, 5)),
    )


def test_a_decode_row_gets_a_page_of_every_group_at_a_page_edge() -> None:
    rig = Rig(bounds(windows=(0, 6)))
    rig.add(0, PROMPT[:7], new=4)
    assert [rig.step().page_appends for _ in range(3)] == [(), (), ((0, 0, 2, 2), (1, 0, 2, 2))]


def test_a_prefix_without_the_pages_of_its_window_is_not_matched() -> None:
    rig = Rig(bounds(windows=(0, 8)))
    rig.add(0, PROMPT)
    rig.run()
    stats = rig.scheduler.stats().pages
    assert (stats[0].cached, stats[1].cached) == (6, 6)
    rig.scheduler.kv.cache.evict(1, 4)  # pages 0 to 3: the least recently used, and of equals the first
    rig.add(1, PROMPT)
    rig.run()
    assert rig.finished[1].cached_tokens == 0
    rig.add(2, PROMPT)
    rig.run()
    assert rig.finished[2].cached_tokens == 20


def test_a_prompt_that_shares_what_it_releases_preempts_itself() -> None:
    rig = Rig(bounds(num_pages=8, windows=(16,), chunked_prefill_size=8))
    first = make_request(0, PROMPT[:17], new=30)
    second = make_request(1, PROMPT[:17] + PROMPT, new=3)
    rig.submit(first)
    for _ in range(4):
        rig.step()
    rig.submit(second)
    rig.step()
    assert rig.running() == [0, 1]
    assert rig.plan().prefill == ()
    assert (rig.running(), rig.waiting()) == ([0], [1])
    rig.commit()
    rig.run()
    assert rig.tokens == {request.id: continuation(request) for request in (first, second)}


def test_a_group_that_is_too_small_is_named() -> None:
    rig = Rig(bounds(num_pages=5, windows=(20,)))
    assert held_pages(22, 20, page_size=4, chunk=64) == 6
    refused = rig.add(0, PROMPT, new=1)
    assert isinstance(refused, Refused)
    assert refused.cause == RefusalCause.TOO_LONG
    assert "need 6 pages of the KV cache for layers with a window of 20 tokens, which has 5" in refused.detail


# The prefix tree


def cache_of(windows: tuple[int, ...], page_size: int = 1) -> PrefixCache:
    groups = [KVGroup(window, num_pages=10) for window in windows]
    return PrefixCache([PagePool(10) for _ in groups], groups, page_size)


def insert(cache: PrefixCache, text: str, held: tuple[str, ...]) -> list[list[int]]:
    """A path with one page per letter. held: per group, which letters' pages there are. The tree alone holds them."""
    tables = []
    for group, letters in zip(cache.groups, held, strict=True):
        tables.append([group.pool.allocate(1)[0] if letter in letters else NO_PAGE for letter in text])
    cache.insert(keys(text), tables)
    for g, table in enumerate(tables):
        cache.release(g, [page for page in table if page != NO_PAGE])
    return tables


def keys(text: str) -> list[bytes]:
    return [letter.encode() for letter in text]


def subsets(text: str) -> list[str]:
    return ["".join(chosen) for size in range(len(text) + 1) for chosen in combinations(text, size)]


def naive_match(text: str, windows: tuple[int, ...], held: tuple[str, ...], page_size: int) -> int:
    """By the definition: the most pages after which the next token finds every token that it sees."""
    known = max((text.index(letter) + 1 for letters in held for letter in letters), default=0)
    for pages in range(known, 0, -1):
        position = pages * page_size
        seen_by_all = True
        for window, letters in zip(windows, held, strict=True):
            seen = range(max(0, position - window + 1) if window else 0, position)
            seen_by_all &= all(text[token // page_size] in letters for token in seen)
        if seen_by_all:
            return pages
    return 0


@pytest.mark.parametrize("page_size", [1, 2, 3])
@pytest.mark.parametrize("has_full_group", [False, True])
def test_a_match_is_what_the_definition_says(has_full_group: bool, page_size: int) -> None:
    text = "abcd"
    for windows, held in product(product((1, 2, 3, 5, 7, 20), (1, 4, 6)), product(subsets(text), subsets(text))):
        if has_full_group:
            windows, held = (0, *windows), (text, *held)
        cache = cache_of(windows, page_size)
        tables = insert(cache, text, held)
        expected = naive_match(text, windows, held, page_size)
        assert cache.count(keys(text)) == expected, (windows, held)
        matched = cache.match(keys(text))
        for window, table, found, group in zip(windows, tables, matched, cache.groups, strict=True):
            seen = max(0, expected * page_size - window + 1) // page_size if window else 0
            assert found == [NO_PAGE] * seen + table[seen:expected]
            assert [group.pool.holders[page] for page in table[seen:expected]] == [2] * (expected - seen)


def test_what_a_node_lacks_is_added_and_what_it_has_is_kept() -> None:
    cache = cache_of((0, 3))
    first = insert(cache, "abc", ("abc", "c"))
    second = insert(cache, "abc", ("abc", "bc"))
    assert cache.match(keys("abc")) == [first[0], [NO_PAGE, second[1][1], first[1][2]]]
    assert (cache.groups[0].num_pages, cache.groups[1].num_pages) == (3, 2)


def test_a_windowed_page_goes_from_the_middle_and_a_full_one_with_its_leaf() -> None:
    cache = cache_of((0, 3))
    tables = insert(cache, "abc", ("abc", "abc"))
    cache.groups[1].pool.retain(tables[1][:1])  # page a
    cache.evict(1, 1)
    assert [node.pages[1] == NO_PAGE for node in cache.nodes()] == [False, True, False]
    assert cache.count(keys("abc")) == 1
    cache.evict(0, 1)
    assert cache.groups[1].pool.holders == [1 + 1] + [0] * 9
    assert [len(list(cache.nodes())), cache.groups[0].num_pages, cache.groups[1].num_pages] == [2, 2, 1]


def test_nodes_without_pages_stay_only_for_their_children() -> None:
    cache = cache_of((2, 3))
    tables = insert(cache, "abc", ("abc", "bc"))
    cache.groups[0].pool.retain(tables[0][1:2])  # page b
    cache.evict(0, 10)
    cache.evict(1, 10)
    assert [node.key for node in cache.nodes()] == [b"a", b"b"]
    cache.release(0, tables[0][1:2])
    cache.evict(0, 10)
    assert not cache.root.children


def test_forgetting_drops_the_pages_of_all_groups() -> None:
    cache = cache_of((0, 3))
    insert(cache, "abc", ("abc", "c"))
    insert(cache, "d", ("d", "d"))
    cache.forget(keys("ab"))
    assert [len(group.pool.free) for group in cache.groups] == [9, 9]
    assert cache.count(keys("d")) == 1
