"""Every page is free or has one owner, whatever is asked of the pool."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cotenant.memory.pages import PagePool

NUM_PAGES = 12


class PoolMachine(RuleBasedStateMachine):
    """Against a model that only remembers who was given what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(NUM_PAGES)
        self.given: dict[int, list[int]] = {}

    @rule(owner=st.integers(0, 4), count=st.integers(0, NUM_PAGES))
    def allocate(self, owner: int, count: int) -> None:
        if count > self.pool.num_free:
            with pytest.raises(AssertionError):
                self.pool.allocate(owner, count)
            return
        pages = self.pool.allocate(owner, count)
        assert len(pages) == count
        taken = {page for held in self.given.values() for page in held}
        assert taken.isdisjoint(pages)
        if pages:
            self.given.setdefault(owner, []).extend(pages)

    @rule(owner=st.integers(0, 4))
    def free(self, owner: int) -> None:
        assert list(self.pool.free(owner)) == self.given.pop(owner, [])

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        for owner in range(5):
            assert list(self.pool.pages(owner)) == self.given.get(owner, [])
            assert self.pool.count(owner) == len(self.given.get(owner, []))
        assert self.pool.owners() == set(self.given)
        assert self.pool.num_used == sum(map(len, self.given.values()))
        assert self.pool.num_used + self.pool.num_free == NUM_PAGES


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_integrity_check_notices_a_page_in_two_places() -> None:
    pool = PagePool(4)
    (page,) = pool.allocate(1, 1)
    pool._free.append(page)
    with pytest.raises(AssertionError):
        pool.check_integrity()


def test_integrity_check_notices_a_lost_page() -> None:
    pool = PagePool(4)
    pool._free.pop()
    with pytest.raises(AssertionError, match="3 pages are accounted for, not 4"):
        pool.check_integrity()


def test_a_pool_has_at_least_one_page() -> None:
    with pytest.raises(ValueError, match="at least 1 page"):
        PagePool(0)
