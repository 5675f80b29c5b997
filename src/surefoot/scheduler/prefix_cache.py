"""Which pages hold which prefix: a radix tree in which one node is one full page of tokens, so that nodes never split.

A path is a sequence of page keys (`Request.page_keys`); the first key carries the cache namespace. A node has at most
one page of each KV group. In a full group every node has one; in a group with a window any may lack it, since the next
token sees the last few alone. Only pages whose writing step has committed may be inserted.

The tree holds a reference on each of its pages; a page that it alone holds can be evicted, least recently used first.
A full group gives only leaves, with their pages in other groups; a windowed one gives pages from anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from surefoot.config.bounds import KVGroup, pages_for
from surefoot.protocol.step_plan import NO_PAGE
from surefoot.scheduler.page_pool import PagePool


class Node:
    __slots__ = ("children", "key", "pages", "parent")

    def __init__(self, key: bytes, num_groups: int, parent: Node | None) -> None:
        self.key = key
        self.pages = [NO_PAGE] * num_groups
        self.parent = parent  # None: the root, or not in the tree any more
        self.children: dict[bytes, Node] = {}


class CachedPages:
    """The pages of one KV group that are in the tree, and in what order they may be evicted."""

    def __init__(self, pool: PagePool, group: KVGroup, page_size: int) -> None:
        self.pool = pool
        self.is_windowed = group.window > 0
        # Pages before a page edge that the token behind it sees: the `window - 1` tokens before it.
        self.visible = pages_for(group.window - 1, page_size) if self.is_windowed else group.num_pages
        self.num_pages = 0
        # By page:
        self.node_of: list[Node | None] = [None] * group.num_pages
        self.last_used = [0] * group.num_pages
        self.queued = [False] * group.num_pages  # has an entry among the candidates
        # (last use, serial, page). Every page that can be evicted is queued. An entry may be out of date: it is
        # examined when it is popped, so a use of a page costs nothing here.
        self._candidates: list[tuple[int, int, int]] = []
        self._serial = 0

    def add(self, page: int, node: Node) -> None:
        self.pool.keep(page)
        self.node_of[page] = node
        self.num_pages += 1

    def remove(self, page: int) -> None:
        self.node_of[page] = None
        self.num_pages -= 1
        self.pool.drop(page)

    def is_evictable(self, page: int) -> bool:
        node = self.node_of[page]
        return node is not None and self.pool.holders[page] == 1 and (self.is_windowed or not node.children)

    def queue(self, page: int) -> None:
        """Makes `page` a candidate. If a request holds it, that request's release will."""
        if not self.queued[page] and self.is_evictable(page):
            self.queued[page] = True
            self._serial += 1
            heappush(self._candidates, (self.last_used[page], self._serial, page))

    def pop(self) -> Node | None:
        """The node whose page is to be evicted next, no longer queued; None if none can be."""
        while self._candidates:
            queued_use, _, page = heappop(self._candidates)
            self.queued[page] = False
            if self.last_used[page] > queued_use:
                self.queue(page)
            elif self.is_evictable(page):
                return self.node_of[page]
        return None


class PrefixCache:
    def __init__(self, pools: Sequence[PagePool], kv_groups: Sequence[KVGroup], page_size: int) -> None:
        self.groups = [CachedPages(pool, group, page_size) for pool, group in zip(pools, kv_groups, strict=True)]
        self._windowed = [g for g, group in enumerate(self.groups) if group.is_windowed]
        self.root = Node(b"", len(self.groups), None)
        self.version = 0  # changes whenever what could be matched changes
        self._clock = 0  # counts uses, not time

    def count(self, keys: Sequence[bytes]) -> int:
        """How many pages `match` would find. Is not a use."""
        return len(self._longest(keys))

    def match(self, keys: Sequence[bytes]) -> list[list[int]]:
        """The longest known prefix of `keys` after which a next token finds all that it sees.

        Returns each group's pages by column, as many for each group. They are held once more for the caller; those
        before the next token's window are left out as NO_PAGE.
        """
        self._clock += 1
        path = self._longest(keys)
        tables = []
        for g, group in enumerate(self.groups):
            unseen = max(0, len(path) - group.visible)
            pages = [node.pages[g] for node in path[unseen:]]
            group.pool.retain(pages)
            for page in pages:
                group.last_used[page] = self._clock
            tables.append([NO_PAGE] * unseen + pages)
        return tables

    def insert(self, keys: Sequence[bytes], tables: Sequence[Sequence[int]]) -> None:
        """Makes pages matchable under `keys`; tables: each group's pages by column, NO_PAGE where there is none.

        Where the tree has a page already, it keeps its own. The caller still holds its pages, and calls `release`.
        """
        self._clock += 1
        node = self.root
        for column, key in enumerate(keys):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, len(self.groups), node)
                self.version += 1
            node = child
            for g, group in enumerate(self.groups):
                page = tables[g][column]
                if page == NO_PAGE:
                    continue
                if node.pages[g] == NO_PAGE:
                    node.pages[g] = page
                    group.add(page, node)
                    self.version += 1
                group.last_used[node.pages[g]] = self._clock
        self._prune(node)

    def release(self, group: int, pages: Sequence[int]) -> None:
        """One holder less for each of `pages`; those that only the tree still holds may be evicted."""
        cached = self.groups[group]
        cached.pool.release(pages)
        for page in pages:
            if cached.node_of[page] is not None:
                cached.queue(page)

    def evict(self, group: int, count: int) -> None:
        """Releases up to `count` pages of `group` that only the tree holds. Amortised O(log pages) for each."""
        cached = self.groups[group]
        while count > 0 and (node := cached.pop()) is not None:
            if cached.is_windowed:
                self._remove_page(node, group)
                self._prune(node)
            else:
                parent = self._detach(node)
                for full, of_parent in zip(self.groups, parent.pages, strict=True):
                    if of_parent != NO_PAGE:
                        full.queue(of_parent)
            count -= 1

    def forget(self, keys: Sequence[bytes]) -> None:
        """Drops everything that begins with the first page of `keys`: some page of this path may hold bad values."""
        doomed = [self.root.children[key] for key in keys[:1] if key in self.root.children]
        while doomed:
            node = doomed.pop()
            doomed += node.children.values()
            self._detach(node)

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        todo = [self.root]
        while todo:
            children = todo.pop().children.values()
            yield from children
            todo += children

    def _longest(self, keys: Sequence[bytes]) -> list[Node]:
        """The path of the prefix that `match` finds."""
        path = []
        node = self.root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        if not self._windowed:
            return path
        length = 0
        # Per windowed group: how many pages in a row end at this depth.
        runs = [0] * len(self._windowed)
        for depth, node in enumerate(path, start=1):
            runs = [run + 1 if node.pages[g] != NO_PAGE else 0 for g, run in zip(self._windowed, runs, strict=True)]
            if all(run >= min(depth, self.groups[g].visible) for g, run in zip(self._windowed, runs, strict=True)):
                length = depth
        return path[:length]

    def _remove_page(self, node: Node, group: int) -> None:
        page, node.pages[group] = node.pages[group], NO_PAGE
        self.groups[group].remove(page)
        self.version += 1

    def _prune(self, node: Node) -> None:
        """Takes out `node` and those above it that have neither a page nor children."""
        while node.parent is not None and not node.children and all(page == NO_PAGE for page in node.pages):
            node = self._detach(node)

    def _detach(self, node: Node) -> Node:
        """Takes `node` out of the tree, and its pages; returns its former parent."""
        parent = node.parent
        if parent is None:
            raise RuntimeError("the root, or a node that is not in the tree, was to be taken out of it")
        for group, page in enumerate(node.pages):
            if page != NO_PAGE:
                self._remove_page(node, group)
        del parent.children[node.key]
        node.parent = None
        self.version += 1
        return parent
