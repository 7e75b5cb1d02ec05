"""Sequences in the order in which they are served: by priority, then by arrival."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import pairwise

from cotenant.engine.sequence import Sequence


def _key(sequence: Sequence) -> tuple[int, float, int]:
    return sequence.key


class SequenceQueue:
    """An ordered set. A sequence's key never changes, so one that is preempted returns to its old place."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        index = bisect_left(self._sequences, sequence.key, key=_key)
        return index < len(self._sequences) and self._sequences[index] is sequence

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_key)

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that is in the queue."""
        assert sequence in self, f"request {sequence.request.request_id} is not in this queue"
        del self._sequences[bisect_left(self._sequences, sequence.key, key=_key)]

    def check_integrity(self) -> None:
        """Raise AssertionError unless the order holds and nothing is twice in it."""
        keys = [sequence.key for sequence in self._sequences]
        assert all(first < second for first, second in pairwise(keys)), "the queue is out of order"
