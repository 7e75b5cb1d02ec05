"""Who owns which page of the KV cache. Pure accounting: nothing here touches the memory itself."""

from __future__ import annotations


class PagePool:
    """Pages ``0 .. num_pages - 1``; each is free or belongs to exactly one owner.

    An owner is any integer that the caller keeps unique. Its pages keep the order in which it got them, so page i of an
    owner holds its tokens ``i * page_tokens`` and up. Pages that were freed last are given out first: they are the
    likeliest to be in a cache still.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"a page pool needs at least 1 page, not {num_pages}")
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # a stack, its top at the end
        self._pages: dict[int, list[int]] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - len(self._free)

    def allocate(self, owner: int, count: int) -> tuple[int, ...]:
        """Give ``count`` more pages to ``owner`` and return them. The caller has checked ``num_free``."""
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} are free"
        pages = tuple(self._free.pop() for _ in range(count))
        if pages:
            self._pages.setdefault(owner, []).extend(pages)
        return pages

    def free(self, owner: int) -> tuple[int, ...]:
        """Take all pages of ``owner`` back and return them; none if it has none."""
        pages = self._pages.pop(owner, [])
        self._free.extend(reversed(pages))
        return tuple(pages)

    def pages(self, owner: int) -> tuple[int, ...]:
        """The pages of ``owner``, in the order it got them."""
        return tuple(self._pages.get(owner, ()))

    def count(self, owner: int) -> int:
        """How many pages ``owner`` has."""
        return len(self._pages.get(owner, ()))

    def owners(self) -> frozenset[int]:
        """Everyone who has at least one page."""
        return frozenset(self._pages)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is in exactly one place."""
        seen = list(self._free)
        for owner, pages in self._pages.items():
            assert pages, f"owner {owner} is listed without a page"
            seen.extend(pages)
        assert len(seen) == self.num_pages, f"{len(seen)} pages are accounted for, not {self.num_pages}"
        assert set(seen) == set(range(self.num_pages)), "a page is in two places and another in none"
