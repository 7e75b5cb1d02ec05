"""Every page is in one state, and its users and its key follow it, whatever is asked of the pool."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cotenant.memory.pages import PagePool

NUM_PAGES = 9
CAPACITY = 14
OWNERS = st.integers(0, 4)
TEXTS = st.text("ab", min_size=CAPACITY, max_size=CAPACITY)


def keys_of(text: str) -> list[bytes]:
    """A page per letter: its key is the text up to it."""
    return [text[: end + 1].encode() for end in range(len(text))]


class PoolMachine(RuleBasedStateMachine):
    """Against a model that keeps plain lists and looks through all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES, CAPACITY)
        self.held: dict[int, list[int]] = {}  # by owner
        self.texts: dict[int, str] = {}  # by owner: what its pages hold
        self.keys: dict[int, bytes] = {}  # by page
        self.free_pages = set(range(NUM_PAGES))
        self.cached: list[int] = []  # the least recently used first
        self.reserved: list[int] = []

    def users(self, page: int) -> int:
        return sum(page in pages for pages in self.held.values())

    def used(self) -> list[int]:
        return sorted({page for pages in self.held.values() for page in pages})

    def idle(self) -> set[int]:
        return self.free_pages | set(self.cached)

    def absent(self) -> list[int]:
        return sorted(set(range(CAPACITY)) - self.idle() - set(self.used()) - set(self.reserved))

    def take(self, pages: tuple[int, ...], among: set[int]) -> None:
        """``pages`` were given out: all free ones before the first cached one, and those from the oldest on."""
        assert len(set(pages)) == len(pages)
        num_free = min(len(pages), len(self.free_pages & among))
        assert set(pages[:num_free]) <= self.free_pages & among
        assert list(pages[num_free:]) == [page for page in self.cached if page in among][: len(pages) - num_free]
        for page in pages:
            self.free_pages.discard(page)
            self.keys.pop(page, None)
        self.cached = [page for page in self.cached if page not in pages]

    @rule(owner=OWNERS, count=st.integers(0, CAPACITY), text=TEXTS)
    def allocate(self, owner: int, count: int, text: str) -> None:
        if count > len(self.idle()):
            with pytest.raises(AssertionError):
                self.pool.allocate(owner, count)
            return
        pages = self.pool.allocate(owner, count)
        assert len(pages) == count
        self.take(pages, self.idle())
        if pages:
            self.texts.setdefault(owner, text)
            self.held.setdefault(owner, []).extend(pages)

    @rule(owner=OWNERS, text=TEXTS, most=st.integers(0, CAPACITY))
    def attach(self, owner: int, text: str, most: int) -> None:
        if owner in self.held:
            with pytest.raises(AssertionError):
                self.pool.attach(owner, ())
            return
        pages = self.pool.match(keys_of(text)[:most])
        expected = []
        for key in keys_of(text)[:most]:
            found = [page for page in self.keys if self.keys[page] == key]
            if not found:
                break
            expected += found
        assert list(pages) == expected
        num_free = self.pool.num_free
        num_idle = self.pool.num_idle(pages)
        self.pool.attach(owner, pages)
        assert self.pool.num_free == num_free - num_idle
        self.cached = [page for page in self.cached if page not in pages]
        if pages:
            self.held[owner], self.texts[owner] = expected, text

    @rule(owner=OWNERS)
    def free(self, owner: int) -> None:
        pages = self.held.pop(owner, [])
        self.texts.pop(owner, None)
        assert list(self.pool.free(owner)) == pages
        for page in reversed(pages):
            if self.users(page) == 0 and page in self.keys:
                self.cached.append(page)
            elif self.users(page) == 0:
                self.free_pages.add(page)

    @rule(owner=OWNERS, data=st.data())
    def register(self, owner: int, data: st.DataObject) -> None:
        for index, page in enumerate(self.held.get(owner, [])):
            key = keys_of(self.texts[owner])[index]
            if data.draw(st.booleans()):
                self.pool.register(owner, index, key)
                if key not in self.keys.values():
                    self.keys[page] = key

    @rule(owner=OWNERS)
    def forget(self, owner: int) -> None:
        self.pool.forget(owner)
        for page in self.held.get(owner, []):
            self.keys.pop(page, None)

    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        pages = [page for page in self.absent() if data.draw(st.booleans())]
        self.pool.add(pages)
        self.free_pages.update(pages)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        pages = [page for page in sorted(self.idle()) if data.draw(st.booleans())]
        num_free = self.pool.num_free
        assert self.pool.num_idle(pages) == len(pages)
        self.pool.withdraw(pages)
        assert self.pool.num_free == num_free - len(pages)
        self.free_pages.difference_update(pages)
        self.cached = [page for page in self.cached if page not in pages]
        for page in pages:
            self.keys.pop(page, None)

    @rule(count=st.integers(0, 6), avoid=st.frozensets(st.integers(0, CAPACITY - 1)))
    def reserve(self, count: int, avoid: frozenset[int]) -> None:
        if count > self.pool.num_free - self.pool.num_idle(avoid):
            with pytest.raises(AssertionError):
                self.pool.reserve(count, avoid)
            return
        pages = self.pool.reserve(count, avoid)
        assert len(pages) == count
        self.take(pages, self.idle() - avoid)
        self.reserved += pages

    @precondition(lambda self: self.reserved and self.held)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        old, new = data.draw(st.sampled_from(self.used())), data.draw(st.sampled_from(self.reserved))
        self.pool.move(old, new)
        self.held = {owner: [new if page == old else page for page in pages] for owner, pages in self.held.items()}
        if old in self.keys:
            self.keys[new] = self.keys.pop(old)
        self.reserved.remove(new)
        self.free_pages.add(old)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        pages = [page for page in self.reserved if data.draw(st.booleans())]
        self.pool.release(pages)
        self.reserved = [page for page in self.reserved if page not in pages]
        self.free_pages.update(pages)

    @rule(data=st.data())
    def misuse_is_noticed(self, data: st.DataObject) -> None:
        for page in self.used()[:1]:
            with pytest.raises(AssertionError):
                self.pool.withdraw([page])
            with pytest.raises(AssertionError):
                self.pool.add([page])
        for page in self.absent()[:1]:
            with pytest.raises(AssertionError):
                self.pool.withdraw([page])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        for owner in range(5):
            assert list(self.pool.pages(owner)) == self.held.get(owner, [])
            assert self.pool.count(owner) == len(self.held.get(owner, []))
        assert self.pool.owners() == set(self.held)
        for page in range(CAPACITY):
            assert self.pool.num_users(page) == self.users(page)
            assert self.pool.is_used(page) == (self.users(page) > 0)
            assert self.pool.num_idle([page]) == (page in self.idle())
        assert self.pool.num_used == len(self.used())
        assert self.pool.num_cached == len(self.cached)
        assert self.pool.num_free == len(self.idle())
        assert self.pool.num_pages == CAPACITY - len(self.absent())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def full(num_pages: int, *texts: str) -> PagePool:
    """A pool in which owner i has written and registered the i-th text."""
    pool = PagePool(num_pages)
    for owner, text in enumerate(texts):
        pool.allocate(owner, len(text))
        for index, key in enumerate(keys_of(text)):
            pool.register(owner, index, key)
    return pool


def test_what_was_freed_last_is_given_first() -> None:
    pool = PagePool(6)
    first, second = pool.allocate(0, 2), pool.allocate(1, 2)
    pool.free(0)
    pool.free(1)
    assert pool.allocate(2, 4) == (*second, *first)


def test_the_end_of_a_cached_text_is_evicted_before_its_beginning_and_old_texts_before_new_ones() -> None:
    pool = full(8, "aaa", "bbb")
    pool.free(0)
    pool.free(1)
    pool.allocate(2, 4)
    assert len(pool.match(keys_of("aaa"))) == 1
    assert len(pool.match(keys_of("bbb"))) == 3


def test_attaching_makes_a_cached_text_recently_used() -> None:
    pool = full(6, "aaa", "bbb")
    pool.free(0)
    pool.free(1)
    pool.attach(2, pool.match(keys_of("aaa")))
    pool.free(2)
    pool.allocate(3, 3)
    assert len(pool.match(keys_of("aaa"))) == 3
    assert pool.match(keys_of("bbb")) == ()


def test_a_shared_page_stays_until_its_last_user_goes() -> None:
    pool = full(4, "ab")
    pages = pool.match(keys_of("ab"))
    pool.attach(1, pages)
    pool.free(0)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (2, 0, 2)
    pool.free(1)
    assert (pool.num_used, pool.num_cached, pool.num_free) == (0, 2, 4)


def test_bad_content_is_not_found_again() -> None:
    pool = full(4, "ab")
    pool.attach(1, pool.match(keys_of("ab")))
    pool.forget(1)
    assert pool.match(keys_of("ab")) == ()
    pool.free(0)
    pool.free(1)
    assert pool.num_cached == 0


def test_a_page_can_be_attached_only_where_it_stood() -> None:
    pool = full(4, "ab")
    first, second = pool.match(keys_of("ab"))
    with pytest.raises(AssertionError, match="page 1 of its users"):
        pool.attach(1, (second, first))


@pytest.mark.parametrize("structure", ["_free", "_cached", "_reserved", "_user", "_keys", "_page_of", "_index"])
def test_integrity_check_notices_a_damaged_record(structure: str) -> None:
    pool = full(8, "ab", "ba")
    pool.attach(2, pool.match(keys_of("a")))
    pool.free(1)
    pool.reserve(1)
    pool.check_integrity()
    used, shared = pool.pages(0)[1], pool.pages(0)[0]
    damage = {
        "_free": lambda: pool._free.popitem(),
        "_cached": lambda: pool._cached.popitem(),
        "_reserved": lambda: pool._reserved.add(used),
        "_user": lambda: pool._user.__setitem__(shared, 0),
        "_keys": lambda: pool._keys.__setitem__(used, None),
        "_page_of": lambda: pool._page_of.__setitem__(b"x", used),
        "_index": lambda: pool._index.__setitem__(used, 7),
    }
    damage[structure]()
    with pytest.raises(AssertionError):
        pool.check_integrity()


@pytest.mark.parametrize(("num_pages", "capacity"), [(0, None), (0, 4), (5, 4)])
def test_a_pool_has_at_least_one_page_and_no_more_than_its_capacity(num_pages: int, capacity: int | None) -> None:
    with pytest.raises(ValueError, match="at least 1 page"):
        PagePool(num_pages, capacity)
