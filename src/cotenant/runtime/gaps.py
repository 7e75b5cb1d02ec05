"""How long the device waits between two batches while requests are live: Valve's cool-down goes by the largest such
gap."""

from __future__ import annotations

# The host's work between two batches takes milliseconds. What took longer than this was no gap between batches: the
# process was stopped, or the machine stood still, which says nothing of when the next request comes.
_MOST_S = 1.0
# The largest of so many gaps counts, and of as many before them: one hiccup would else keep training waiting after each
# request for the rest of the worker's life. Where nobody asks nothing is forgotten.
_WINDOW = 1024


class BatchGaps:
    """Of the last ones, the largest. Times are by time.perf_counter."""

    def __init__(self) -> None:
        self._ended_s: float | None = None  # the last batch, if requests were live ever since
        self._current_s = self._before_s = 0.0  # the largest in this window, and in the one before
        self._num_gaps = 0  # in this window

    @property
    def largest_s(self) -> float:
        return max(self._current_s, self._before_s)

    def batch_ended(self, now_s: float) -> None:
        self._ended_s = now_s

    def interrupt(self) -> None:
        """What lies between the last batch and the next is no gap."""
        self._ended_s = None

    def batch_begins(self, now_s: float) -> None:
        """There is one that may begin now."""
        if self._ended_s is None or now_s - self._ended_s > _MOST_S:
            return
        self._current_s = max(self._current_s, now_s - self._ended_s)
        self._num_gaps += 1
        if self._num_gaps == _WINDOW:
            self._before_s, self._current_s, self._num_gaps = self._current_s, 0.0, 0
