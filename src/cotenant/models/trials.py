"""Which of some ways to do the same is the fastest, found out while it is done, in few turns and in spite of noise."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

# Once a way has been timed so often, it is given up if its median is so many times the shortest median.
_GIVEN_UP = ((1, 1.25), (3, 1.06))
# So often those are timed that are left; the first one, which is otherwise the way that it is done, among them.
_TIMED = 7


class Trials:
    """Among ``ways``, at least one. Times come later than they are asked for, or never."""

    def __init__(self, ways: Iterable[int]) -> None:
        self._times_ms: dict[int, list[float]] = {way: [] for way in ways}
        self._num_asked = dict.fromkeys(self._times_ms, 0)
        self._default = next(iter(self._times_ms))
        self.settled: int | None = None

    @property
    def best(self) -> int:
        """The fastest so far, by its median: now and then what runs beside it makes any of them slower."""
        return min(self._times_ms, key=self._median_ms)

    def median_ms(self, way: int) -> float | None:
        """None: nothing is known of it."""
        times = self._times_ms.get(way)
        return statistics.median(times) if times else None

    def next(self) -> int | None:
        """What to time now. None: it is settled."""
        if self.settled is not None:
            return None
        shortest = self._median_ms(self.best)
        left = [way for way in self._times_ms if self._is_hopeful(way, shortest)]
        if all(len(self._times_ms[way]) >= _TIMED for way in left):
            self.settled = self.best
            return None
        # In turn, so that what changes meanwhile changes all.
        way = min(left, key=lambda each: self._num_asked[each])
        self._num_asked[way] += 1
        return way

    def note(self, way: int, elapsed_ms: float) -> None:
        if way in self._times_ms:
            self._times_ms[way].append(elapsed_ms)

    def drop(self, way: int) -> None:
        """It cannot be done so. The first one always can."""
        if way != self._default:
            self._times_ms.pop(way, None)

    def _median_ms(self, way: int) -> float:
        median = self.median_ms(way)
        return float("inf") if median is None else median

    def _is_hopeful(self, way: int, shortest_ms: float) -> bool:
        times = self._times_ms[way]
        limits = [factor * shortest_ms for count, factor in _GIVEN_UP if len(times) >= count]
        return not limits or statistics.median(times) <= limits[-1]
