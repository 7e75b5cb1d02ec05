"""What the iterations of a measured time did when, as a few hundred points."""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from cotenant.core.plan import IterationRecord, Mode

MOST_POINTS = 200

# (end in s, length in ms, shares of the device of requests alone, of both in one batch, and of training alone, whether
# there was a batch, mode)
_Entry = tuple[float, float, float, float, float, bool, str]


class Timeline:
    """Entries are tuples of plain values, which garbage collection does not walk through: to have noted many of them
    must not be seen in the latencies that are measured.

    ``num_sms``: of the device; None where there are none, and its time alone is shared.
    """

    def __init__(self, num_sms: int | None = None) -> None:
        self._num_sms = num_sms
        self._entries: list[_Entry] = []
        self._progress: list[tuple[float, float]] = []

    def note(self, end_s: float, record: IterationRecord) -> None:
        """An iteration that ended then."""
        if record.total_ms <= 0:
            return
        online_ms = min(record.online_ms, record.total_ms)
        after_ms = min(sum(elapsed_ms for _, elapsed_ms in record.tasklets), record.total_ms - online_ms)
        online, fused, best_effort = online_ms, 0.0, after_ms
        if record.fused is not None:
            online, fused = 0.0, online_ms
        if record.partition is not None:
            num_sms = self._num_sms or record.partition.num_sms
            beside_ms = min(sum(elapsed_ms for _, elapsed_ms in record.beside), online_ms)
            online *= record.partition.online_sms / num_sms
            fused *= record.partition.online_sms / num_sms
            best_effort += beside_ms * record.partition.best_effort_sms / num_sms
        total_ms = record.total_ms
        shares = (online / total_ms, fused / total_ms, best_effort / total_ms)
        self._entries.append((end_s, total_ms, *shares, not record.batch.empty, record.mode.value))

    def note_tokens(self, at_s: float, trained_tokens: float) -> None:
        """How far training had come then."""
        self._progress.append((at_s, trained_tokens))

    def tokens_per_s(self, start_s: float, end_s: float) -> float:
        """Of training in this time. ``start_s`` lies between two iterations."""
        return self._trained(start_s, end_s, 1)[-1] / (end_s - start_s)

    def _trained(self, start_s: float, end_s: float, num_points: int) -> list[float]:
        """Tokens since ``start_s`` at the end of each of so many intervals."""
        if not self._progress:
            return [0.0] * num_points
        # As noted last: from there to the beginning nothing was trained, however long that was.
        _, first = self._progress[max(0, self._num_notes(start_s) - 1)]
        ends_s = [start_s + (end_s - start_s) * point / num_points for point in range(1, num_points)]
        return [self._trained_by(at_s) - first for at_s in (*ends_s, end_s)]

    def _trained_by(self, at_s: float) -> float:
        """How far training had come then; of an iteration that ran, the share that was over."""
        num_before = self._num_notes(at_s)
        before_s, tokens = self._progress[max(0, num_before - 1)]
        if not 0 < num_before < len(self._progress):
            return tokens
        after_s, later_tokens = self._progress[num_before]
        return tokens + (later_tokens - tokens) * (at_s - before_s) / (after_s - before_s)

    def _num_notes(self, until_s: float) -> int:
        """How many of training's there are, the last then at the latest."""
        return bisect.bisect_right(self._progress, until_s, key=itemgetter(0))

    def figures(self, start_s: float, end_s: float) -> dict[str, Any]:
        """The time from ``start_s`` to ``end_s`` in equal intervals, at most ``MOST_POINTS``, as a list for each
        figure. ``step_ms``: how long iterations with a batch took on average, tasklets included, and
        ``longest_step_ms`` (None without one). Shares are of the device: of its SMs, averaged over the interval, or of
        its time. ``mode``: what most of the work's time went to. ``trained_tokens``: since ``start_s``, by its end."""
        inside = [entry for entry in self._entries if start_s < entry[0] and entry[0] - entry[1] / 1e3 < end_s]
        num_points = max(1, min(MOST_POINTS, len(inside)))
        interval_s = (end_s - start_s) / num_points
        points = [_Point() for _ in range(num_points)]
        for entry in inside:
            begin_s = entry[0] - entry[1] / 1e3
            first = min(num_points - 1, max(0, int((begin_s - start_s) / interval_s)))
            last = min(num_points - 1, max(first, math.ceil((entry[0] - start_s) / interval_s) - 1))
            for index in range(first, last + 1):
                low_s = max(begin_s, start_s + index * interval_s)
                high_s = min(entry[0], start_s + (index + 1) * interval_s)
                points[index].add(entry, max(0.0, high_s - low_s), ends_here=index == last and entry[0] <= end_s)
        return {
            "interval_s": round(interval_s, 6),
            "seconds": [round((index + 1) * interval_s, 4) for index in range(num_points)],
            "step_ms": [_rounded(point.mean_step_ms) for point in points],
            "longest_step_ms": [_rounded(max(point.steps_ms, default=None)) for point in points],
            "mode": [point.mode for point in points],
            "online_share": [round(min(1.0, point.online_s / interval_s), 3) for point in points],
            "fused_share": [round(min(1.0, point.fused_s / interval_s), 3) for point in points],
            "best_effort_share": [round(min(1.0, point.best_effort_s / interval_s), 3) for point in points],
            "trained_tokens": [round(tokens, 1) for tokens in self._trained(start_s, end_s, num_points)],
        }


@dataclass(slots=True)
class _Point:
    """One interval. Seconds are of the whole device."""

    online_s: float = 0.0
    fused_s: float = 0.0
    best_effort_s: float = 0.0
    steps_ms: list[float] = field(default_factory=list)
    mode_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, entry: _Entry, seconds: float, *, ends_here: bool) -> None:
        """So much of an iteration's time."""
        _, total_ms, online, fused, best_effort, has_batch, mode = entry
        self.online_s += online * seconds
        self.fused_s += fused * seconds
        self.best_effort_s += best_effort * seconds
        if has_batch and ends_here:
            self.steps_ms.append(total_ms)
        if has_batch or mode != Mode.NONE.value:
            self.mode_s[mode] += seconds

    @property
    def mean_step_ms(self) -> float | None:
        return sum(self.steps_ms) / len(self.steps_ms) if self.steps_ms else None

    @property
    def mode(self) -> str:
        return max(self.mode_s, key=lambda name: self.mode_s[name], default=Mode.NONE.value)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
