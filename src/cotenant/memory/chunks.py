"""Who owns which chunk of physical memory. Pure accounting: nothing here touches the memory itself."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

KV = "kv"  # the owner of the chunks under the KV cache


class ChunkPool:
    """Chunks ``0 .. num_chunks - 1`` of an address range; each belongs to one owner or is absent (not mapped).

    An owner is a tenant's name. The pool records; mapping and unmapping is the caller's, in the same breath.
    """

    def __init__(self, num_chunks: int) -> None:
        if num_chunks < 1:
            raise ValueError(f"a chunk pool needs at least 1 chunk, not {num_chunks}")
        self.num_chunks = num_chunks
        self._absent = list(range(num_chunks))  # a heap, its lowest number first
        self._owned: dict[str, set[int]] = {}

    @property
    def num_absent(self) -> int:
        return len(self._absent)

    def take(self, owner: str, count: int) -> tuple[int, ...]:
        """Give the ``count`` lowest absent chunks to ``owner`` and return them, lowest first. The caller has checked
        ``num_absent``."""
        assert 0 <= count <= self.num_absent, f"{count} chunks wanted, {self.num_absent} are absent"
        chunks = tuple(heapq.heappop(self._absent) for _ in range(count))
        if chunks:
            self._owned.setdefault(owner, set()).update(chunks)
        return chunks

    def give_back(self, owner: str, chunks: Iterable[int]) -> None:
        """These chunks of ``owner`` are absent from now on."""
        returned, owned = tuple(chunks), self._owned.get(owner, set())
        assert len(set(returned)) == len(returned), f"a chunk is given back twice: {returned}"
        assert owned.issuperset(returned), f"chunks {sorted(set(returned) - owned)} do not belong to '{owner}'"
        owned.difference_update(returned)
        if not owned:
            self._owned.pop(owner, None)
        for chunk in returned:
            heapq.heappush(self._absent, chunk)

    def owned(self, owner: str) -> frozenset[int]:
        """The chunks of ``owner``."""
        return frozenset(self._owned.get(owner, ()))

    def owners(self) -> frozenset[str]:
        """Everyone who has at least one chunk."""
        return frozenset(self._owned)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every chunk is in exactly one place."""
        seen = list(self._absent)
        for owner, chunks in self._owned.items():
            assert chunks, f"owner '{owner}' is listed without a chunk"
            seen.extend(chunks)
        assert len(seen) == self.num_chunks, f"{len(seen)} chunks are accounted for, not {self.num_chunks}"
        assert set(seen) == set(range(self.num_chunks)), "a chunk is in two places and another in none"
