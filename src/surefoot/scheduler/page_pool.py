"""The only ledger of page ownership. Nobody frees a page: whoever holds it releases it, and the last holder's
release makes it free. Requests and the prefix tree are holders alike."""

from __future__ import annotations

from collections.abc import Sequence


class PagePool:
    """Reference counts of `num_pages` pages, and those that nobody holds."""

    def __init__(self, num_pages: int) -> None:
        self.holders = [0] * num_pages
        # A stack: pages that were just released are used again first, so a lightly loaded server touches few pages.
        self.free = list(range(num_pages - 1, -1, -1))
        self.kept = [False] * num_pages  # whether the prefix tree is one of a page's holders
        self.num_idle = 0  # pages that the prefix tree alone holds

    def allocate(self, count: int) -> list[int]:
        """`count` free pages, held once. Raises RuntimeError if there are not as many: the caller reserves first."""
        if count > len(self.free):
            raise RuntimeError(f"{count} pages asked for, {len(self.free)} are free")
        pages = [self.free.pop() for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        return pages

    def retain(self, pages: Sequence[int]) -> None:
        """One more holder for each of `pages`, which somebody holds already."""
        for page in pages:
            if self.holders[page] == 0:
                raise RuntimeError(f"page {page} is retained, but nobody holds it")
            if self.holders[page] == 1 and self.kept[page]:
                self.num_idle -= 1
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """One holder less for each of `pages`. Raises RuntimeError on a page that nobody holds."""
        for page in pages:
            if self.holders[page] == 0:
                raise RuntimeError(f"page {page} is released, but nobody holds it")
            self.holders[page] -= 1
            if self.holders[page] == 0:
                self.free.append(page)
            elif self.holders[page] == 1 and self.kept[page]:
                self.num_idle += 1

    def keep(self, page: int) -> None:
        """The prefix tree becomes one more holder of a page that a request holds."""
        self.retain((page,))
        self.kept[page] = True

    def drop(self, page: int) -> None:
        """The prefix tree is no longer one of its holders."""
        if self.holders[page] == 1:
            self.num_idle -= 1
        self.kept[page] = False
        self.release((page,))
