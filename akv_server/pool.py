"""Page ids: which are free, who holds each, and how far each is written. Knows no tensor, no token and no tree.

A page is held by running sequences (`leases`) and by edges of the tree (`edges`), and freed when neither is left:

    free        nobody holds it
    leased      a running sequence reads or writes it; never evicted
    evictable   only the tree holds it
      dead      ... and no history that ends in the tree sees any of its tokens: it goes first

Slots of a page are written in order. `filled[page]` says how many are, so the one holder whose tokens end exactly
there may go on writing in place; everybody else copies the page first.
"""

from __future__ import annotations

from collections.abc import Iterable


class Pool:
    """Reference counts of `num_pages` pages of `page_size` slots. All methods mutate; none looks at page contents."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 0 and page_size > 0
        self.num_pages = num_pages
        self.page_size = page_size
        self.leases = [0] * num_pages
        self.edges = [0] * num_pages
        self.views = [0] * num_pages
        self.filled = [0] * num_pages
        self.dead: dict[int, None] = {}  # ordered: the longest dead first
        self.num_evictable = 0
        self.num_shared = 0  # pages that several running sequences or histories hold or see
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num_pages: int) -> list[int] | None:
        """That many fresh pages, each leased once; None, and nothing taken, where fewer are free."""
        if num_pages > len(self._free):
            return None
        pages = [self._free.pop() for _ in range(num_pages)]
        for page in pages:
            self.leases[page] = 1
            self.filled[page] = 0
        return pages

    def lease(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._count(self.leases, page, +1)

    def unlease(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._count(self.leases, page, -1)

    def hold(self, page: int) -> None:
        """An edge of the tree holds the page."""
        self._count(self.edges, page, +1)

    def unhold(self, page: int) -> None:
        self._count(self.edges, page, -1)

    def view(self, pages: Iterable[int]) -> None:
        """A history that ends in the tree sees tokens of these pages."""
        for page in pages:
            self._count(self.views, page, +1)

    def unview(self, pages: Iterable[int]) -> None:
        for page in pages:
            self._count(self.views, page, -1)

    def _count(self, counts: list[int], page: int, by: int) -> None:
        was_held = self.leases[page] or self.edges[page]
        was_evictable = self.edges[page] and not self.leases[page]
        self.num_shared -= self.leases[page] + self.views[page] > 1
        counts[page] += by
        self.num_shared += self.leases[page] + self.views[page] > 1
        assert counts[page] >= 0, f"page {page} given back more often than taken"
        is_evictable = self.edges[page] and not self.leases[page]
        if bool(is_evictable) != bool(was_evictable):
            self.num_evictable += 1 if is_evictable else -1
        if is_evictable and not self.views[page]:
            self.dead.setdefault(page)
        else:
            self.dead.pop(page, None)
        if was_held and not (self.leases[page] or self.edges[page]):
            assert not self.views[page], f"page {page} freed while a history sees it"
            self._free.append(page)

    def check(self) -> None:
        """Asserts what must hold between any two calls."""
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        evictable = 0
        for page in range(self.num_pages):
            held = self.leases[page] or self.edges[page]
            assert (page in free) == (not held), f"page {page} is leaked or free while held"
            assert not self.views[page] or self.edges[page], f"page {page} is seen, but not in the tree"
            assert 0 <= self.filled[page] <= self.page_size
            only_tree = bool(self.edges[page]) and not self.leases[page]
            evictable += only_tree
            assert (page in self.dead) == (only_tree and not self.views[page]), f"page {page} wrongly dead or not"
        assert evictable == self.num_evictable
        assert self.num_shared == sum(leased + seen > 1 for leased, seen in zip(self.leases, self.views, strict=True))
