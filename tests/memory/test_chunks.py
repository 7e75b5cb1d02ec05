"""Every chunk is absent or has one owner, whatever is asked of the pool."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cotenant.memory.chunks import KV, ChunkPool

NUM_CHUNKS = 9
OWNERS = (KV, "job")


class ChunkPoolMachine(RuleBasedStateMachine):
    """Against a model that only remembers who was given what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = ChunkPool(NUM_CHUNKS)
        self.given: dict[str, set[int]] = {owner: set() for owner in OWNERS}

    def absent(self) -> list[int]:
        return sorted(set(range(NUM_CHUNKS)).difference(*self.given.values()))

    @rule(owner=st.sampled_from(OWNERS), count=st.integers(0, NUM_CHUNKS))
    def take(self, owner: str, count: int) -> None:
        absent = self.absent()
        if count > len(absent):
            with pytest.raises(AssertionError, match="are absent"):
                self.pool.take(owner, count)
            return
        assert self.pool.take(owner, count) == tuple(absent[:count])
        self.given[owner].update(absent[:count])

    @rule(owner=st.sampled_from(OWNERS), chunks=st.sets(st.integers(0, NUM_CHUNKS - 1), max_size=4))
    def give_back(self, owner: str, chunks: set[int]) -> None:
        if not chunks <= self.given[owner]:
            with pytest.raises(AssertionError, match="do not belong to"):
                self.pool.give_back(owner, chunks)
            return
        self.pool.give_back(owner, chunks)
        self.given[owner] -= chunks

    @rule(owner=st.sampled_from(OWNERS))
    def give_everything_back(self, owner: str) -> None:
        self.pool.give_back(owner, self.pool.owned(owner))
        self.given[owner].clear()

    @invariant()
    def agrees(self) -> None:
        self.pool.check_integrity()
        for owner in OWNERS:
            assert self.pool.owned(owner) == self.given[owner]
        assert self.pool.owners() == {owner for owner in OWNERS if self.given[owner]}
        assert self.pool.num_absent == len(self.absent())


TestPool = ChunkPoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_a_chunk_is_given_back_once() -> None:
    pool = ChunkPool(2)
    (chunk,) = pool.take(KV, 1)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(KV, [chunk, chunk])
    pool.check_integrity()


def test_integrity_check_notices_a_chunk_in_two_places() -> None:
    pool = ChunkPool(4)
    (chunk,) = pool.take(KV, 1)
    pool._absent.append(chunk)
    with pytest.raises(AssertionError, match="5 chunks are accounted for, not 4"):
        pool.check_integrity()


def test_integrity_check_notices_a_lost_chunk() -> None:
    pool = ChunkPool(4)
    pool._absent.pop()
    with pytest.raises(AssertionError, match="3 chunks are accounted for, not 4"):
        pool.check_integrity()


def test_a_pool_has_at_least_one_chunk() -> None:
    with pytest.raises(ValueError, match="at least 1 chunk"):
        ChunkPool(0)
