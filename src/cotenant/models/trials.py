"""Which of some ways to do the same is the fastest, found out while it is done, in few turns and in spite of noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable

# A way is given up that is so many times slower than the fastest: the faster of two turns, or the median of more. One
# alone says little: what runs beside it, or is loaded for it, may make any turn much longer.
_FAR, _NEAR = 1.2, 1.06
_TIMED, _MOST_ASKED = 5, 20  # so often those are timed that are left, if they can be at all


class Trials:
    """Among ``ways``, at least one, the first of which is how it is done otherwise. Times come later than they are
    asked for, or never."""

    def __init__(self, ways: Iterable[int]) -> None:
        self._times_ms: dict[int, list[float]] = {way: [] for way in ways}
        self._num_asked = dict.fromkeys(self._times_ms, 0)
        self._default = next(iter(self._times_ms))
        self.settled: int | None = None

    @property
    def best(self) -> int:
        """The fastest so far, by its median: now and then what runs beside it makes any of them slower."""
        return min(self._times_ms, key=self.median_ms)

    def median_ms(self, way: int) -> float:
        """Infinite where nothing is known of it."""
        times = self._times_ms.get(way)
        return statistics.median(times) if times else math.inf

    def is_ordinary(self, way: int) -> bool:
        """Whether it takes no longer, as far as is known, than the way that will be settled on or the first one."""
        return way == self._default or self.median_ms(way) <= _NEAR * self.median_ms(self.best) < math.inf

    def next(self) -> int | None:
        """What to time now. None: it is settled."""
        if self.settled is not None:
            return None
        shortest = self.median_ms(self.best)
        left = [way for way in self._times_ms if self._is_hopeful(way, shortest) and not self._is_done(way)]
        if not left:
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

    def _is_done(self, way: int) -> bool:
        return len(self._times_ms[way]) >= _TIMED or self._num_asked[way] >= _MOST_ASKED

    def _is_hopeful(self, way: int, shortest_ms: float) -> bool:
        times = self._times_ms[way]
        if len(times) > 2:
            return statistics.median(times) <= _NEAR * shortest_ms
        return len(times) < 2 or min(times) <= _FAR * shortest_ms
