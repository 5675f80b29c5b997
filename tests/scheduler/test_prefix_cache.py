"""Page pool and prefix tree by themselves."""

from __future__ import annotations

import pytest

from surefoot.config.bounds import KVGroup
from surefoot.scheduler.page_pool import PagePool
from surefoot.scheduler.prefix_cache import PrefixCache


def keys(text: str) -> list[bytes]:
    """One page per letter."""
    return [letter.encode() for letter in text]


class FullCache(PrefixCache):
    """Of one group without a window, with ten pages."""

    def __init__(self) -> None:
        self.pool = PagePool(10)
        super().__init__([self.pool], [KVGroup(window=0, num_pages=10)], page_size=1)

    @property
    def num_pages(self) -> int:
        return self.groups[0].num_pages


def cache_path(cache: FullCache, text: str) -> list[int]:
    """Computes what is missing of a path, caches it, and lets go of it."""
    (matched,) = cache.match(keys(text))
    pages = matched + cache.pool.allocate(len(text) - len(matched))
    cache.insert(keys(text), [pages])
    cache.release(0, pages)
    return pages


def test_released_pages_are_used_again_first() -> None:
    pool = PagePool(1000)
    first = pool.allocate(3)
    assert first == [0, 1, 2]
    pool.release(first[:1])
    assert pool.allocate(2) == [0, 3]


def test_a_page_is_free_when_its_last_holder_has_released_it() -> None:
    pool = PagePool(1)
    pages = pool.allocate(1)
    pool.retain(pages)
    pool.release(pages)
    assert pool.free == []
    pool.release(pages)
    assert pool.free == pages


def test_the_ledger_refuses_what_does_not_add_up() -> None:
    pool = PagePool(2)
    with pytest.raises(RuntimeError, match="3 pages asked for, 2 are free"):
        pool.allocate(3)
    with pytest.raises(RuntimeError, match="page 1 is released, but nobody holds it"):
        pool.release((1,))
    with pytest.raises(RuntimeError, match="page 0 is retained, but nobody holds it"):
        pool.retain((0,))


def test_the_longest_known_prefix_matches() -> None:
    cache = FullCache()
    abc = cache_path(cache, "abc")
    abd = cache_path(cache, "abd")
    assert abd[:2] == abc[:2]
    assert cache.num_pages == 4
    assert cache.count(keys("abdx")) == 3
    assert cache.match(keys("abdx")) == [abd]
    assert cache.match(keys("b")) == [[]]


def test_the_tree_keeps_its_own_page_for_a_duplicate() -> None:
    cache = FullCache()
    first = cache_path(cache, "a")
    other = cache.pool.allocate(1)
    cache.insert(keys("a"), [other])
    assert cache.match(keys("a")) == [first]
    assert cache.pool.holders[other[0]] == 1


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    cache = FullCache()
    for path in ("ab", "ac", "d"):
        cache_path(cache, path)
    cache.release(0, *cache.match(keys("ab")))
    evicted = []
    while cache.num_pages:
        before = {path for path in ("a", "ab", "ac", "d") if cache.count(keys(path)) == len(path)}
        cache.evict(0, 1)
        evicted += [path for path in before if cache.count(keys(path)) < len(path)]
    assert evicted == ["ac", "d", "ab", "a"]
    assert len(cache.pool.free) == 10


def test_a_held_page_is_not_evicted_until_it_is_released() -> None:
    cache = FullCache()
    cache_path(cache, "abc")
    (held,) = cache.match(keys("ab"))
    cache.evict(0, 10)
    assert cache.count(keys("abc")) == 2
    cache.release(0, held)
    cache.evict(0, 10)
    assert cache.num_pages == 0


def test_forgetting_drops_the_whole_subtree_of_the_first_page() -> None:
    cache = FullCache()
    for path in ("ab", "ac", "d"):
        cache_path(cache, path)
    cache.forget(keys("ab"))
    assert cache.num_pages == 1
    assert cache.count(keys("ac")) == 0
    assert cache.count(keys("d")) == 1
    assert len(cache.pool.free) == 9
    cache.evict(0, 10)  # entries of forgotten nodes are passed over
    assert len(cache.pool.free) == 10


def test_the_version_changes_with_what_can_be_matched() -> None:
    cache = FullCache()
    versions = [cache.version]
    cache_path(cache, "a")
    versions.append(cache.version)
    cache_path(cache, "a")
    assert cache.version == versions[-1]
    cache.evict(0, 1)
    versions.append(cache.version)
    assert len(set(versions)) == 3
