"""Who uses which page of the KV cache, and whose content is worth keeping. Pure accounting: no memory is touched."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Sequence

_CHECKED_AT_ONCE = 512  # pages


class PagePool:
    """Pages by number, ``0 .. capacity - 1``. Each is in one of five states:

    - absent: there is no memory behind it;
    - free: present, and its content means nothing;
    - used: at least one owner has it;
    - cached: nobody uses it, but its content has a key, so an owner may ``attach`` it again;
    - reserved: held for the content of a page that is about to move.

    An owner is any integer that the caller keeps unique. Its pages keep the order in which it got them, so page i of an
    owner holds its tokens ``i * page_tokens`` and up. Pages that were freed last are given out first: they are the
    likeliest to be in a processor's cache still. When no free one is left, cached ones are evicted, the least recently
    used first.

    A key names a page's content together with all that stands before it, so a shared page is page i of all its users.
    Only full pages are registered: a shared page is never written.

    Operations cost O(1) or O(pages named in the call); a wrong call breaks an assertion, for it is the caller's fault.
    """

    def __init__(self, num_pages: int, capacity: int | None = None) -> None:
        self.capacity = num_pages if capacity is None else capacity
        if not 1 <= num_pages <= self.capacity:
            raise ValueError(f"a page pool needs at least 1 page and no more than its capacity, not {num_pages}")
        self.num_pages = num_pages
        self._free = dict.fromkeys(range(num_pages - 1, -1, -1))  # a stack, its top at the end
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._reserved: set[int] = set()
        self._owned: dict[int, list[int]] = {}
        # By page. One user: in ``_user``; several: in ``_sharers``; never both.
        self._user: list[int | None] = [None] * self.capacity
        self._sharers: dict[int, set[int]] = {}
        self._index = [0] * self.capacity  # of a used page: its place in its users' lists
        self._keys: list[bytes | None] = [None] * self.capacity
        self._page_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can give now: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Pages that nobody uses and whose content is known."""
        return len(self._cached)

    @property
    def num_blank(self) -> int:
        """Pages whose content means nothing."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages that at least one owner has."""
        return self.num_pages - len(self._free) - len(self._cached) - len(self._reserved)

    def is_used(self, page: int) -> bool:
        """Whether an owner has this page."""
        return self._user[page] is not None or page in self._sharers

    def num_users(self, page: int) -> int:
        """How many owners have this page."""
        if self._user[page] is not None:
            return 1
        sharers = self._sharers.get(page)
        return 0 if sharers is None else len(sharers)

    def pages(self, owner: int) -> tuple[int, ...]:
        """The pages of ``owner``, in the order it got them."""
        return tuple(self._owned.get(owner, ()))

    def count(self, owner: int) -> int:
        """How many pages ``owner`` has."""
        return len(self._owned.get(owner, ()))

    def owners(self) -> frozenset[int]:
        """Everyone who has at least one page."""
        return frozenset(self._owned)

    # Owners come and go.

    def allocate(self, owner: int, count: int) -> tuple[int, ...]:
        """Give ``count`` more pages to ``owner`` and return them. The caller has checked ``num_free``."""
        assert 0 <= count <= self.num_free, f"{count} pages wanted, {self.num_free} are free"
        if count == 0:
            return ()
        owned = self._owned.setdefault(owner, [])
        start = len(owned)
        for index in range(start, start + count):
            page = self._free.popitem()[0] if self._free else self._evict()
            self._user[page] = owner
            self._index[page] = index
            owned.append(page)
        return tuple(owned[start:])

    def attach(self, owner: int, pages: Sequence[int]) -> None:
        """Let ``owner``, which has no pages yet, start with these registered pages, as ``match`` returned them."""
        assert owner not in self._owned, f"owner {owner} has pages"
        for index, page in enumerate(pages):
            assert self._keys[page] is not None, f"page {page} is not registered"
            assert self._index[page] == index, f"page {page} is page {self._index[page]} of its users, not {index}"
            if page in self._cached:
                del self._cached[page]
                self._user[page] = owner
            else:
                self._share(page, owner)
        if pages:
            self._owned[owner] = list(pages)

    def free(self, owner: int) -> tuple[int, ...]:
        """Let ``owner`` go and return the pages it had. Those nobody else uses become cached; without a key, free."""
        pages = self._owned.pop(owner, [])
        for page in reversed(pages):  # of what is cached, the last goes first: the first pages serve more prompts
            if not self._lose_user(page, owner):
                continue
            if self._keys[page] is None:
                self._free[page] = None
            else:
                self._cached[page] = None
        return tuple(pages)

    # What pages hold.

    def register(self, owner: int, index: int, key: bytes) -> None:
        """Page ``index`` of ``owner`` now holds the content that ``key`` names. The first page with a key keeps it."""
        if key in self._page_of:
            return
        page = self._owned[owner][index]
        assert self._keys[page] is None, f"page {page} has another key"
        self._keys[page] = key
        self._page_of[key] = page

    def forget(self, owner: int) -> None:
        """The content of all of the owner's pages is bad: nobody may attach them any more."""
        for page in self._owned.get(owner, ()):
            self._unregister(page)

    def holds(self, key: bytes) -> bool:
        """Whether a page with the content that ``key`` names is there."""
        return key in self._page_of

    def match(self, keys: Iterable[bytes]) -> tuple[int, ...]:
        """The pages of the longest prefix of ``keys`` that is registered. Changes nothing."""
        pages: list[int] = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return tuple(pages)

    def num_idle(self, pages: Iterable[int]) -> int:
        """How many of these are free or cached: so much less ``num_free`` is when they are attached or withdrawn."""
        return sum(page in self._cached or page in self._free for page in pages)

    # Pages come, go and move.

    def add(self, pages: Sequence[int]) -> None:
        """Absent pages become present and free."""
        for page in reversed(pages):
            assert 0 <= page < self.capacity, f"page {page} is beyond the capacity of {self.capacity}"
            assert not self._is_present(page), f"page {page} is present"
            self._free[page] = None
            self.num_pages += 1

    def withdraw(self, pages: Iterable[int]) -> None:
        """Present pages that nobody uses become absent; cached content is forgotten."""
        for page in pages:
            if page in self._cached:
                del self._cached[page]
                self._unregister(page)
            else:
                assert page in self._free, f"page {page} is in use or absent"
                del self._free[page]
            self.num_pages -= 1

    def reserve(self, count: int, avoid: Container[int] = ()) -> tuple[int, ...]:
        """Hold ``count`` pages outside ``avoid`` for ``move``: free ones, then cached ones, whose content is forgotten.

        There are ``num_free - num_idle(avoid)`` such pages; the caller has checked that they are enough. It costs
        O(count + idle pages in ``avoid``).
        """
        pages: list[int] = []
        for idle in (reversed(self._free), self._cached):
            for page in idle:
                if len(pages) == count:
                    break
                if page not in avoid:
                    pages.append(page)
        assert len(pages) == count, f"{count} pages wanted, {len(pages)} can be had"
        for page in pages:
            if page in self._cached:
                del self._cached[page]
                self._unregister(page)
            else:
                del self._free[page]
        self._reserved.update(pages)
        return tuple(pages)

    def move(self, old: int, new: int) -> None:
        """The content of the used page ``old`` was copied to the reserved page ``new``: all that is known follows it.

        ``old`` is free then, and the first that ``allocate`` gives out: withdraw it before, if it is to go.
        """
        assert self.is_used(old), f"page {old} is not used"
        self._reserved.remove(new)
        user, index, key = self._user[old], self._index[old], self._keys[old]
        sharers = self._sharers.pop(old, None)
        for owner in (user,) if sharers is None else sharers:
            assert owner is not None
            self._owned[owner][index] = new
        if sharers is not None:
            self._sharers[new] = sharers
        self._user[new], self._user[old] = user, None
        self._index[new] = index
        if key is not None:
            self._keys[new], self._keys[old] = key, None
            self._page_of[key] = new
        self._free[old] = None

    def release(self, pages: Iterable[int]) -> None:
        """Reserved pages that are not needed become free."""
        for page in pages:
            self._reserved.remove(page)
            self._free[page] = None

    # Steps that several operations share.

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._unregister(page)
        return page

    def _unregister(self, page: int) -> None:
        key, self._keys[page] = self._keys[page], None
        if key is not None:
            del self._page_of[key]

    def _share(self, page: int, owner: int) -> None:
        user, self._user[page] = self._user[page], None
        if user is None:
            self._sharers[page].add(owner)
        else:
            self._sharers[page] = {user, owner}

    def _lose_user(self, page: int, owner: int) -> bool:
        """Take the user off; whether it was the last."""
        if self._user[page] is not None:
            self._user[page] = None
            return True
        sharers = self._sharers[page]
        sharers.remove(owner)
        if len(sharers) == 1:
            self._user[page] = sharers.pop()
            del self._sharers[page]
        return False

    def _is_present(self, page: int) -> bool:
        return page in self._free or page in self._cached or page in self._reserved or self.is_used(page)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every page is in exactly one state and all records of it agree."""
        for _ in self.integrity_checks():
            pass

    def integrity_checks(self) -> Iterator[None]:
        """``check_integrity`` in parts of some hundred pages or an owner's; nothing may change until it has ended."""
        users: dict[int, set[int]] = {}
        for owner, pages in self._owned.items():
            assert pages, f"owner {owner} is listed without a page"
            for index, page in enumerate(pages):
                sharers = users.setdefault(page, set())
                assert owner not in sharers, f"owner {owner} has page {page} twice"
                sharers.add(owner)
                assert self._index[page] == index, f"page {page} is not page {self._index[page]} of owner {owner}"
            yield
        free, cached, reserved = self._free, self._cached, self._reserved
        num_accounted = len(free) + len(cached) + len(reserved) + len(users)
        assert num_accounted == self.num_pages, f"{num_accounted} pages are accounted for, not {self.num_pages}"
        assert self._sharers == {page: sharers for page, sharers in users.items() if len(sharers) > 1}
        num_present = num_keys = 0
        nobody: set[int] = set()
        for page in range(self.capacity):
            if page % _CHECKED_AT_ONCE == 0:
                yield
            num_states = (page in free) + (page in cached) + (page in reserved) + (page in users)
            assert num_states <= 1, f"page {page} is in two states"
            num_present += num_states
            sharers = users.get(page, nobody)
            alone = next(iter(sharers)) if len(sharers) == 1 else None
            assert self._user[page] == alone, f"page {page} has {len(sharers)} users and lists {self._user[page]}"
            key = self._keys[page]
            assert key is None or self._page_of.get(key) == page, f"page {page} and its key disagree"
            assert key is None or sharers or page in cached, f"page {page} has a key, no user, and is not cached"
            assert key is not None or page not in cached, f"cached page {page} has no key"
            num_keys += key is not None
        assert num_present == num_accounted, "a page is beyond the capacity"
        assert len(self._page_of) == num_keys, "a key names a page without it"
