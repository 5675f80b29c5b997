"""Which pages hold which prefix: a radix tree in which one node is one full page, so that nodes never split.

A path is a sequence of page keys (`Request.page_keys`); the first key carries the cache namespace. Only pages whose
writing step has committed may be inserted. The tree holds a reference on each of its pages; a page that it alone
holds can be evicted, least recently used leaf first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush

from surefoot.scheduler.page_pool import PagePool


class Node:
    __slots__ = ("children", "key", "last_used", "page", "parent", "queued")

    def __init__(self, key: bytes, page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent  # None: the root, or not in the tree any more
        self.children: dict[bytes, Node] = {}
        self.last_used = 0
        self.queued = False  # has an entry in the heap of eviction candidates


class PrefixCache:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.root = Node(b"", -1, None)
        self.num_pages = 0
        self.version = 0  # changes whenever what could be matched changes
        self._clock = 0  # counts uses, not time
        # (last use, serial, node). Every leaf that only the tree holds is queued. An entry may be out of date: it is
        # examined when it is popped, so a use of a node costs nothing here.
        self._candidates: list[tuple[int, int, Node]] = []
        self._serial = 0

    def count(self, keys: Sequence[bytes]) -> int:
        """How many pages `match` would return. Is not a use."""
        return sum(1 for _ in self._walk(keys))

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """The pages of the longest known prefix of `keys`, held once more for the caller."""
        self._clock += 1
        pages = []
        for node in self._walk(keys):
            node.last_used = self._clock
            pages.append(node.page)
        self.pool.retain(pages)
        return pages

    def insert(self, keys: Sequence[bytes], pages: Sequence[int]) -> None:
        """Makes `pages` matchable under `keys`. Where the tree has a page already, it keeps its own.

        The caller still holds `pages`, and calls `offer` when it no longer does.
        """
        self._clock += 1
        node = self.root
        for key, page in zip(keys, pages, strict=True):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page, node)
                self.pool.retain((page,))
                self.num_pages += 1
                self.version += 1
            child.last_used = self._clock
            node = child

    def offer(self, keys: Sequence[bytes]) -> None:
        """A holder of pages on this path has released them: what only the tree holds now may be evicted."""
        node = self.root
        for node in self._walk(keys):  # noqa: B007  the last one counts: only a leaf can be evicted
            pass
        self._queue(node)

    def evict(self, count: int) -> None:
        """Releases up to `count` pages that only the tree holds. Amortised O(log pages) for each."""
        while count > 0 and self._candidates:
            queued_use, _, node = heappop(self._candidates)
            node.queued = False
            if node.last_used > queued_use:
                self._queue(node)
            elif self._is_evictable(node):
                parent = self._detach(node)
                self._queue(parent)
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

    def _walk(self, keys: Sequence[bytes]) -> Iterator[Node]:
        node = self.root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                return
            yield child
            node = child

    def _is_evictable(self, node: Node) -> bool:
        return node.parent is not None and not node.children and self.pool.holders[node.page] == 1

    def _queue(self, node: Node) -> None:
        """Makes `node` a candidate. If a request holds it, that request's `offer` will."""
        if not node.queued and self._is_evictable(node):
            node.queued = True
            self._serial += 1
            heappush(self._candidates, (node.last_used, self._serial, node))

    def _detach(self, node: Node) -> Node:
        """Takes `node` out of the tree; returns its former parent."""
        parent = node.parent
        if parent is None:
            raise RuntimeError(f"the node of page {node.page} is not in the tree")
        del parent.children[node.key]
        node.parent = None
        self.pool.release((node.page,))
        self.num_pages -= 1
        self.version += 1
        return parent
