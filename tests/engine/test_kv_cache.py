"""The KV cache keeps what lives in it while it grows and shrinks, whatever happens at whatever moment."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from cotenant.device import Device, create_device
from cotenant.device.arena import chunk_granularity
from cotenant.engine.kv_cache import KvCache, Resized
from cotenant.models.spec import ModelSpec
from engine.limited_memory import LimitedDevice

PAGE_TOKENS = 2
OWNERS = st.integers(0, 5)


def create_cache(
    num_pages: int, max_pages: int | None = None, *, pages_per_chunk: int = 8, device: Device | None = None
) -> KvCache:
    """Pages of 1/``pages_per_chunk`` of what the device maps at least, so that chunks have as many."""
    head_dim = chunk_granularity(torch.device("cpu")) // pages_per_chunk // (2 * 2 * PAGE_TOKENS * 2 * 4)
    spec = ModelSpec(
        family="llama", num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2, num_kv_heads=2,
        head_dim=head_dim, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    cache = KvCache(spec, torch.float32, device or create_device("cpu"), PAGE_TOKENS, num_pages, max_pages)
    assert cache.chunk_pages == pages_per_chunk
    return cache


class CacheMachine(RuleBasedStateMachine):
    """Against a model that remembers what each sequence wrote into each of its pages."""

    def __init__(self) -> None:
        super().__init__()
        self.written: dict[int, list[int]] = {}  # by owner, page by page
        self.tables: dict[int, list[int]] = {}  # by owner, its pages: what a block table would hold
        self.prefixes: list[list[int]] = []  # registered content
        self.num_written = 0

    @initialize(num_pages=st.integers(1, 36))
    def start(self, num_pages: int) -> None:
        self.cache = create_cache(num_pages, 36)  # 5 chunks, of which the last has 4 pages
        self.address = self.cache.tensor.data_ptr()
        self.target = -(-num_pages // 8)

    @rule(owner=OWNERS, count=st.integers(1, 9))
    def write(self, owner: int, count: int) -> None:
        for page in self.cache.pool.allocate(owner, min(count, self.cache.pool.num_free)):
            assert self.cache.tensor[page].isfinite().all()
            self.num_written += 1
            self.cache.tensor[page] = self.num_written
            self.written.setdefault(owner, []).append(self.num_written)
            self.tables.setdefault(owner, []).append(page)

    @rule(owner=OWNERS)
    def register(self, owner: int) -> None:
        values = self.written.get(owner, [])
        if not values or any(set(values) & set(prefix) for prefix in self.prefixes):
            return
        for index, value in enumerate(values):
            self.cache.pool.register(owner, index, b"%d" % value)
        self.prefixes.append(list(values))

    @rule(owner=OWNERS, data=st.data())
    def attach(self, owner: int, data: st.DataObject) -> None:
        if owner in self.written or not self.prefixes:
            return
        values = data.draw(st.sampled_from(self.prefixes))
        pages = self.cache.pool.match(b"%d" % value for value in values)
        self.cache.pool.attach(owner, pages)
        if pages:
            self.written[owner], self.tables[owner] = values[: len(pages)], list(pages)

    @rule(owner=OWNERS)
    def free(self, owner: int) -> None:
        self.cache.pool.free(owner)
        self.written.pop(owner, None)
        self.tables.pop(owner, None)

    @rule(num_pages=st.integers(1, 36))
    def resize(self, num_pages: int) -> None:
        self.cache.resize(num_pages)
        self.target = -(-num_pages // 8)

    @rule(max_chunks=st.integers(0, 5))
    def step(self, max_chunks: int) -> None:
        before, free_before = self.cache.num_pages, self.cache.pool.num_free
        result = self.cache.step(max_chunks * self.cache.chunk_bytes)
        self.follow(result)
        assert abs(self.cache.num_pages - before) <= 8 * max(1, max_chunks)
        assert result.done == (self.cache.num_pages == min(8 * self.target, 36))
        assert not (result.done and result.pages_short)
        if self.cache.num_pages == before and not result.done:
            assert result.pages_short > 0, "nothing happened, and nothing is in the way"
            assert free_before < 8

    def follow(self, result: Resized) -> None:
        """Rewrite the block tables, and nothing else."""
        in_use = {page for table in self.tables.values() for page in table}
        assert in_use.issuperset(result.moves)
        assert in_use.isdisjoint(result.moves.values())
        for table in self.tables.values():
            table[:] = [result.moves.get(page, page) for page in table]

    @rule(num_pages=st.integers(1, 36))
    def finish(self, num_pages: int) -> None:
        """Sequences give up as many pages as are short, then the target is reached in one step."""
        self.resize(num_pages)
        result = self.cache.step(1 << 30)
        self.follow(result)
        num_free = self.cache.pool.num_free
        while self.cache.pool.num_free < num_free + result.pages_short:
            self.free(next(iter(self.written)))
        result = self.cache.step(1 << 30)
        self.follow(result)
        assert result.done
        assert result.pages_short == 0

    @invariant()
    def agrees(self) -> None:
        self.cache.check_integrity()
        assert self.cache.tensor.data_ptr() == self.address
        for owner, values in self.written.items():
            assert list(self.cache.pool.pages(owner)) == self.tables[owner]
            pages = self.cache.tensor[self.tables[owner]].flatten(1)
            assert (pages == torch.tensor(values, dtype=pages.dtype).unsqueeze(1)).all()
        for prefix in self.prefixes:
            for page, value in zip(self.cache.pool.match(b"%d" % value for value in prefix), prefix, strict=False):
                assert (self.cache.tensor[page] == value).all()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


@settings(max_examples=40, deadline=None)
@given(num_pages=st.integers(1, 100))
def test_without_room_to_grow_the_cache_has_exactly_the_pages_asked_for(num_pages: int) -> None:
    cache = create_cache(num_pages)
    assert cache.num_pages == cache.max_pages == cache.tensor.shape[0] == num_pages
    cache.check_integrity()


def test_a_cache_that_grew_reads_as_zeros_where_it_is_new() -> None:
    cache = create_cache(8, 32)
    assert cache.tensor.shape == (32, 2, 2, PAGE_TOKENS, 2, cache.tensor.shape[-1])
    cache.tensor[:8] = 1
    for _ in range(2):
        cache.resize(32)
        assert cache.step(1 << 30) == Resized(done=True)
        assert not cache.tensor[8:].any()
        assert (cache.tensor[:8] == 1).all()
        cache.tensor[8:] = float("nan")
        cache.resize(8)
        assert cache.step(1 << 30) == Resized(done=True)


def test_the_emptiest_chunks_go_first() -> None:
    cache = create_cache(40)
    pages = cache.pool.allocate(1, 40)
    cache.pool.free(1)
    assert pages == tuple(range(40))
    for owner in range(24):  # chunks 0 to 2
        cache.pool.allocate(owner, 1)
    for owner in range(9, 16):  # chunk 1 keeps one page
        cache.pool.free(owner)
    cache.resize(24)
    assert cache.step(1 << 30) == Resized(done=True)  # chunks 3 and 4 had nobody in them
    cache.resize(17)
    result = cache.step(1 << 30)
    assert result == Resized(done=True), "17 pages are 3 chunks"
    cache.resize(16)
    result = cache.step(1 << 30)
    assert result == Resized(done=False, pages_short=1)
    cache.pool.free(0)
    result = cache.step(1 << 30)
    assert result == Resized(done=True, moves={8: 0})


def test_a_step_takes_at_least_one_chunk_and_at_most_what_it_may() -> None:
    cache = create_cache(8, 80)
    cache.resize(80)
    sizes = []
    for max_bytes in (1, 3 * cache.chunk_bytes + 1, 1 << 30):
        cache.step(max_bytes)
        sizes.append(cache.num_pages)
    assert sizes == [16, 40, 80]


def test_a_cache_that_the_device_has_no_memory_for_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    device = LimitedDevice(num_chunks=4)
    cache = create_cache(8, 64, device=device)
    (page,) = cache.pool.allocate(1, 1)
    cache.tensor[page] = 3
    cache.resize(64)
    assert cache.step(2 * cache.chunk_bytes) == Resized(done=False)
    for _ in range(3):  # chunks 3 and 4 together are one too many
        assert cache.step(2 * cache.chunk_bytes) == Resized(done=True)
        assert cache.num_pages == 24
        cache.check_integrity()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "stays at 24 pages and does not grow to 64: no memory for 2 chunks beside 3" in caplog.text
    cache.resize(32)
    assert cache.step(1 << 30) == Resized(done=True)
    device.num_chunks = 8
    cache.resize(64)
    assert cache.step(1 << 30) == Resized(done=True)
    assert cache.num_pages == 64
    assert (cache.tensor[page] == 3).all()
    assert not cache.tensor[8:].any()
    cache.check_integrity()


def test_no_memory_to_move_pages_with_costs_no_page(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = create_cache(32)
    for owner in range(32):
        cache.tensor[list(cache.pool.allocate(owner, 1))] = owner
    for owner in range(0, 32, 2):  # every chunk is half full
        cache.pool.free(owner)
    cache.resize(16)

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("nothing left")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_copy", fail)
        assert cache.step(1 << 30) == Resized(done=True), "the target is given up"
    assert (cache.num_pages, cache.pool.num_free) == (32, 16)
    assert "stays at 32 pages and does not shrink to 16: nothing left" in caplog.text
    cache.check_integrity()
    cache.resize(16)
    assert cache.step(1 << 30).done
    assert all((cache.tensor[list(cache.pool.pages(owner))] == owner).all() for owner in range(1, 32, 2))
    cache.check_integrity()


def test_what_does_not_fit_is_said_and_what_fits_is_done() -> None:
    cache = create_cache(32)
    cache.pool.allocate(1, 12)
    cache.resize(8)
    assert cache.step(1 << 30) == Resized(done=False, pages_short=4)
    assert cache.num_pages == 16
    cache.check_integrity()


def test_page_0_stays_where_it_is() -> None:
    cache = create_cache(32)
    (page,) = cache.pool.reserve(1)
    cache.pool.allocate(1, 31)
    cache.pool.free(1)
    cache.pool.allocate(2, 3)
    cache.resize(1)
    assert cache.step(1 << 30).done
    assert page == 0
    assert cache.num_pages == 8
    cache.check_integrity()


@pytest.mark.parametrize("num_pages", [0, 33])
def test_sizes_are_checked(num_pages: int) -> None:
    with pytest.raises(ValueError, match=f"a KV cache of {num_pages} pages"):
        create_cache(32).resize(num_pages)
    with pytest.raises(ValueError, match=f"a KV cache of {num_pages} pages"):
        create_cache(num_pages, 32)


def test_chunks_are_128_mib_in_a_large_cache_and_small_in_a_small_one() -> None:
    spec = ModelSpec(
        family="qwen3", num_layers=28, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8,
        head_dim=128, vocab_size=64, max_position_embeddings=64,
    )  # fmt: skip
    device, granularity = create_device("cpu"), chunk_granularity(torch.device("cpu"))
    sizes = {}
    for num_pages in (1, 20, 1000, 2000):
        cache = KvCache(spec, torch.bfloat16, device, 16, num_pages)
        assert cache.page_bytes == 28 << 16
        assert cache.chunk_bytes == cache.chunk_pages * cache.page_bytes
        assert cache.chunk_bytes % granularity == 0
        sizes[num_pages] = cache.chunk_pages
    assert sizes == {1: 1, 20: 1, 1000: 62, 2000: 73}


def test_integrity_check_notices_pages_without_memory() -> None:
    cache = create_cache(32)
    cache.pool.withdraw([31])
    with pytest.raises(AssertionError, match="32 pages have memory, the pool has 31"):
        cache.check_integrity()
