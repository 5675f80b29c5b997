"""Who holds which pages: a pool for each KV group, the prefix tree over all of them, and the requests' page tables.

A group without a window holds every token of a request. It gets the pages of all known tokens at admission, and one
more at each page edge from then on. In a group with a window, the token at position p sees p - window + 1 to p: pages
that no later token sees are released as soon as the next row is planned (all steps run on one stream, so a page's next
owner writes later), and a request never holds more than `Bounds.most_pages`. It holds as many from its admission on:
what a prompt releases while it advances is what it needs next.
"""

from __future__ import annotations

from surefoot.config.bounds import Bounds, pages_for
from surefoot.protocol.messages import PageStats
from surefoot.protocol.step_plan import NO_PAGE
from surefoot.scheduler.page_pool import PagePool
from surefoot.scheduler.prefix_cache import PrefixCache
from surefoot.scheduler.request import Request


class KVGroups:
    def __init__(self, bounds: Bounds, prefix_cache: bool) -> None:
        self.bounds = bounds
        self.prefix_cache = prefix_cache
        self.pools = [PagePool(group.num_pages) for group in bounds.kv_groups]
        self.cache = PrefixCache(self.pools, bounds.kv_groups, bounds.page_size)
        self._windows = [(g, group.window) for g, group in enumerate(bounds.kv_groups) if group.window]
        self._one_each = [1] * len(self.pools)

    def stats(self) -> tuple[PageStats, ...]:
        return tuple([PageStats(len(pool.holders), len(pool.free), pool.num_idle) for pool in self.pools])

    def seat(self, request: Request) -> bool:
        """Gives a waiting request its cached prefix and the pages to begin with; False, and nothing, if they are short.

        If nobody else holds pages, every request that was accepted fits.
        """
        request.pages = self.cache.match(self._matchable_keys(request))
        request.num_computed = request.num_planned = len(request.pages[0]) * self.bounds.page_size
        if self.extend_prompt(request):
            return True
        self.release(request)
        return False

    def extend_prompt(self, request: Request) -> bool:
        """Gives a request the pages for its next chunk, and more of its known tokens if it may hold them.

        False, and no page, if a group is short. Releases what its next token does not see in any case.
        """
        self._slide(request)
        columns = pages_for(len(request.tokens), self.bounds.page_size)
        missing = []
        for group, pages in zip(self.bounds.kv_groups, request.pages, strict=True):
            first = first_column(request.num_planned, group.window, self.bounds.page_size)
            end = min(columns, first + self.bounds.most_pages(group, len(request.tokens)))
            missing.append(end - len(pages))
        return self._allocate(request, missing)

    def extend_output(self, request: Request) -> bool:
        """Gives a request that decodes one page of each group, at a page edge. False as above."""
        self._slide(request)
        return self._allocate(request, self._one_each)

    def release(self, request: Request) -> None:
        """Takes all pages from a request. Rows in flight may still write there, but the next owner writes later."""
        for g, pages in enumerate(request.pages):
            self.cache.release(g, [page for page in pages if page != NO_PAGE])
        request.leave_slot()

    def keep_prefix(self, request: Request) -> None:
        """Makes the pages that are full and computed matchable. Without a slot, a request has none."""
        self.cache.insert(self._full_page_keys(request, request.num_computed), request.pages)

    def forget(self, request: Request) -> None:
        """Makes nothing matchable any more that begins as the request does."""
        self.cache.forget(self._full_page_keys(request, len(request.tokens)))

    def may_match(self, request: Request) -> bool:
        """Whether a waiting request may share pages of its prompt. One with a prompt to be scored must compute it."""
        return self.prefix_cache and request.is_scored

    def count_cached(self, request: Request) -> int:
        """Pages that the prefix tree has for a waiting request."""
        if request.cached_pages_version != self.cache.version:
            request.cached_pages_version = self.cache.version
            request.cached_pages = self.cache.count(self._matchable_keys(request))
        return request.cached_pages

    def _slide(self, request: Request) -> None:
        """Releases the pages that no token from `num_planned` on sees. There is none before one released earlier."""
        for g, window in self._windows:
            pages = request.pages[g]
            first = end = first_column(request.num_planned, window, self.bounds.page_size)
            while first > 0 and pages[first - 1] != NO_PAGE:
                first -= 1
            if first < end:
                self.cache.release(g, pages[first:end])
                pages[first:end] = [NO_PAGE] * (end - first)

    def _allocate(self, request: Request, counts: list[int]) -> bool:
        """So many pages of each group, after evicting cached ones if need be; False, and none, if a group is short."""
        for g, pool in enumerate(self.pools):
            if counts[g] > len(pool.free):
                self.cache.evict(g, counts[g] - len(pool.free))
                if counts[g] > len(pool.free):
                    return False
        for g, pool in enumerate(self.pools):
            request.pages[g] += pool.allocate(counts[g])
        return True

    def _matchable_keys(self, request: Request) -> list[bytes]:
        """At least one token is left to compute: its logits are needed."""
        return self._full_page_keys(request, len(request.tokens) - 1 if self.may_match(request) else 0)

    def _full_page_keys(self, request: Request, num_tokens: int) -> list[bytes]:
        """Keys of the pages that the request's first `num_tokens` tokens fill; none without a prefix cache."""
        page_size = self.bounds.page_size
        return request.page_keys(page_size, num_tokens // page_size) if self.prefix_cache else []


def first_column(position: int, window: int, page_size: int) -> int:
    """The first page that the token at `position` sees."""
    return max(0, position - window + 1) // page_size if window else 0
