"""The KV cache: one tensor over an arena of physical chunks, which grows and shrinks while sequences live in it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import torch

from cotenant.device import Device
from cotenant.device.arena import CHUNK_BYTES, chunk_granularity
from cotenant.memory.chunks import KV, ChunkPool
from cotenant.memory.pages import PagePool
from cotenant.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_CHUNKS_AT_LEAST = 16  # so that a small cache has something to give too
_STAGING_BYTES = 64 << 20  # what a move needs beside the cache, when memory is short
_CANDIDATES = 64  # chunks that are looked at when a few are to be given up


@dataclass(frozen=True, slots=True)
class Resized:
    """What one step of a resize came to.

    ``done``: the target is reached, or was given up for want of memory. ``moves``: old page to new page, for pages in
    use that were moved; block tables name the old ones until the caller rewrites them. ``pages_short``: so many more
    pages must be freed before all of the step that was asked for can happen.
    """

    done: bool
    moves: dict[int, int] = field(default_factory=dict)
    pages_short: int = 0


class KvCache:
    """Pages of keys and values. ``pool`` knows each page's sequence, a chunk pool each chunk's tenant.

    ``tensor`` [max_pages, layers, 2, page_tokens, kv_heads, width] never moves; a head may lie in more room than it
    needs. Pages that are absent in ``pool`` have no memory and must not be touched. Memory that comes in reads as
    zeros: rows nobody wrote are finite, and what nobody writes behind heads stays zero.

    Chunk i holds the ``chunk_pages`` pages from ``i * chunk_pages`` up. Chunk 0 is never given up, so page 0 is always
    there and never moves. The last chunk alone may hold fewer pages: it comes last and goes first, so that
    ``num_pages`` follows from the number of chunks.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: Device,
        page_tokens: int,
        num_pages: int,
        max_pages: int | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        head_dim: int | None = None,
    ) -> None:
        """``head_dim``: the width; None: the model's. Starts with ``num_pages`` pages, rounded up to whole chunks where
        ``max_pages`` (default: ``num_pages``) leaves room. A chunk comes as near to ``chunk_bytes`` as whole
        pages and the device allow, and smaller in a small cache. Raises torch.OutOfMemoryError when the device has not
        that much."""
        max_pages = num_pages if max_pages is None else max_pages
        if not 1 <= num_pages <= max_pages:
            raise ValueError(f"a KV cache of {num_pages} pages: must be from 1 to max_pages, {max_pages}")
        shape = (max_pages, spec.num_layers, 2, page_tokens, spec.num_kv_heads, head_dim or spec.head_dim)
        self.max_pages = max_pages
        self.page_bytes = math.prod(shape[1:]) * dtype.itemsize
        granularity = chunk_granularity(device.torch_device)
        self.chunk_pages = _pages_per_chunk(self.page_bytes, max_pages, chunk_bytes, granularity)
        self._device = device
        self._arena = device.create_arena(max_pages * self.page_bytes, self.chunk_pages * self.page_bytes)
        self._chunks = ChunkPool(self._arena.num_chunks)
        self._target = self._chunks_for(num_pages)
        self._arena.map(self._chunks.take(KV, self._target))
        self.pool = PagePool(self._pages_in(self._target), max_pages)
        self.tensor = self._arena.tensor(dtype)[: math.prod(shape)].view(shape)
        # Pages as rows of the widest numbers that fit, for copying: a kernel moves one number per thread.
        word = torch.int64 if self.page_bytes % 8 == 0 else torch.uint8
        words = self._arena.tensor(word)[: max_pages * self.page_bytes // word.itemsize]
        self._words = words.view(max_pages, -1)  # [max_pages, page_bytes / itemsize]
        self._copy({0: 0})  # loads the kernels, so that the first move does not wait for them

    @property
    def num_pages(self) -> int:
        """Pages that exist now, used or free."""
        return self.pool.num_pages

    @property
    def chunk_bytes(self) -> int:
        return self._arena.chunk_bytes

    def resize(self, num_pages: int) -> None:
        """Set the target that ``step`` moves towards: ``num_pages``, rounded up to whole chunks.

        A target that the device has no memory for is given up at that step: the cache keeps what it has by then, says
        so in the log, and does not try again until this is called again.
        """
        if not 1 <= num_pages <= self.max_pages:
            raise ValueError(f"a KV cache of {num_pages} pages: must be from 1 to max_pages, {self.max_pages}")
        self._target = self._chunks_for(num_pages)

    def step(self, max_bytes: int) -> Resized:
        """Move towards the target by whole chunks of together at most ``max_bytes``, but at least one.

        Called on the stream that reads the cache. No launched work may still use the cache on another stream. When
        ``pages_short`` is not 0, sequences must give up so many pages first; what fits has been done.
        """
        num_chunks = len(self._chunks.owned(KV))
        most = max(1, max_bytes // self.chunk_bytes)
        if num_chunks < self._target:
            self._grow(min(self._target - num_chunks, most))
            return Resized(done=len(self._chunks.owned(KV)) == self._target)
        wanted = max(self._target, num_chunks - most)
        num_held = self.pool.num_pages - self.pool.num_free
        kept = max(wanted, self._chunks_for(num_held))
        moves = self._shrink(num_chunks - kept) if kept < num_chunks else {}
        if moves is None:
            return Resized(done=True)
        return Resized(kept == self._target, moves, max(0, num_held - self._pages_in(wanted)))

    def _grow(self, count: int) -> None:
        chunks = self._chunks.take(KV, count)
        try:
            self._insist(partial(self._arena.map, chunks))
        except torch.OutOfMemoryError as error:
            self._chunks.give_back(KV, chunks)
            self._give_up("grow", error)
            return
        self.pool.add(self._pages_of(chunks))

    def _insist(self, run: Callable[[], None]) -> None:
        """``run``; if there is no memory for it, once more with what others have kept. Raises torch.OutOfMemoryError if
        there is none even so."""
        with suppress(torch.OutOfMemoryError):
            run()
            return
        self._device.release_kept_memory()  # what the attempt held is freed with its frames
        run()

    def _give_up(self, wanted: str, error: torch.OutOfMemoryError) -> None:
        target, self._target = self._target, len(self._chunks.owned(KV))
        logger.warning(
            "the KV cache stays at %d pages and does not %s to %d: %s",
            self.num_pages,
            wanted,
            self._pages_in(target),
            error,
        )

    def _shrink(self, count: int) -> dict[int, int] | None:
        """Give ``count`` chunks back; the free pages elsewhere are enough for the pages in use that must move. None if
        there is no memory to copy those with."""
        chunks = self._cheapest(count)
        pages = self._pages_of(chunks)
        old = [page for page in pages if self.pool.is_used(page)]
        moves = dict(zip(old, self.pool.reserve(len(old), frozenset(pages)), strict=True))
        try:
            self._copy(moves)
        except torch.OutOfMemoryError as error:
            self.pool.release(moves.values())
            self._give_up("shrink", error)
            return None
        for source, target in moves.items():
            self.pool.move(source, target)
        self.pool.withdraw(pages)
        self._arena.unmap(chunks, keep=True)  # to give them back to the driver would take longer than all the rest
        self._chunks.give_back(KV, chunks)
        return moves

    def _cheapest(self, count: int) -> list[int]:
        """The chunks with the fewest pages in use, among the highest: what this takes does not grow with the cache."""
        highest = sorted(self._chunks.owned(KV) - {0})[-max(_CANDIDATES, 4 * count) :]

        def cost(chunk: int) -> tuple[bool, int, int]:
            pages = self._pages_of([chunk])
            return len(pages) == self.chunk_pages, sum(map(self.pool.is_used, pages)), -chunk

        return sorted(highest, key=cost)[:count]

    def _copy(self, moves: dict[int, int]) -> None:
        """Copy pages. Raises torch.OutOfMemoryError if there is no memory for that."""
        if moves:
            self._insist(partial(self._copy_staged, moves))

    def _copy_staged(self, moves: dict[int, int]) -> None:
        pages = torch.tensor([list(moves), list(moves.values())], device=self._words.device)  # [2, pages]
        # No page is both a source and a target, so the order does not matter.
        for sources, targets in pages.split(max(1, _STAGING_BYTES // self.page_bytes), dim=1):
            self._words.index_copy_(0, targets, self._words.index_select(0, sources))

    def _chunks_for(self, num_pages: int) -> int:
        return -(-num_pages // self.chunk_pages)

    def _pages_in(self, num_chunks: int) -> int:
        return min(num_chunks * self.chunk_pages, self.max_pages)

    def _pages_of(self, chunks: Iterable[int]) -> list[int]:
        return [page for chunk in chunks for page in self._pages_of_one(chunk)]

    def _pages_of_one(self, chunk: int) -> range:
        start = chunk * self.chunk_pages
        return range(start, min(start + self.chunk_pages, self.max_pages))

    def check_integrity(self) -> None:
        """Raise AssertionError unless pages, chunks and mapped memory agree."""
        for _ in self.integrity_checks():
            pass

    def integrity_checks(self) -> Iterator[None]:
        """``check_integrity`` in parts of some hundred pages; nothing may change until it has ended."""
        self._chunks.check_integrity()
        owned = self._chunks.owned(KV)
        assert owned == self._arena.mapped, f"chunks {sorted(owned ^ self._arena.mapped)} are owned or mapped, not both"
        num_pages = sum(len(self._pages_of_one(chunk)) for chunk in owned)
        assert 0 in owned, "chunk 0 was given up"
        assert num_pages == self._pages_in(len(owned)), "the last, smaller chunk is mapped before another"
        assert num_pages == self.pool.num_pages, f"{num_pages} pages have memory, the pool has {self.pool.num_pages}"
        yield from self.pool.integrity_checks()


def _pages_per_chunk(page_bytes: int, max_pages: int, chunk_bytes: int, granularity: int) -> int:
    """How many pages a chunk holds: the device maps only multiples of ``granularity`` bytes."""
    unit = granularity // math.gcd(granularity, page_bytes)  # the fewest whole pages that it maps
    wanted = min(chunk_bytes, max_pages * page_bytes // _CHUNKS_AT_LEAST)
    return unit * max(1, wanted // (unit * page_bytes))
