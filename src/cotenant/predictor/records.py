"""Measured latencies in a nested cache: LLMStation section 4.2.

The outer key is what the machine runs (hardware, model, adapters), the inner one is the shape of the work. A record
that exists wins over any model, but for batches with prompts (``BatchTimes``). Old measurements fade, so that a changed
machine is noticed. They fade where new ones come; what is planned no more, because it once took too long, would stay
known as that, so records go stale as well.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

Group = tuple[Hashable, ...]
"""Hardware, model, and for work with a batch how many adapters it has, and whether it has prompts."""

MIN_COUNT = 3  # measurements that a record has to rest on
_WEIGHT_OF_NEWEST = 0.1
_MOST_AT_ONCE = 8  # that a mean of several counts as, at most
_WEIGHTS_OF_NEWEST = [1.0 - (1.0 - _WEIGHT_OF_NEWEST) ** num for num in range(_MOST_AT_ONCE + 1)]
_MAX_SHAPES = 4096
_OUTLIER_RATIO = 8.0
_FEW = 5  # measurements, after which a mean is not doubted for one
STALE_AFTER = 10_000  # iterations: minutes
_CONTRADICTION = 0.25


@dataclass(slots=True)
class Record:
    """A fading mean and mean deviation of one shape's latency, in milliseconds. ``iteration``: of the last one."""

    mean_ms: float
    deviation_ms: float = 0.0
    count: int = 1
    iteration: int = 0

    def add(self, latency_ms: float, num: int = 1) -> None:
        """Take one measurement in, the mean of ``num`` in a row, which weighs as much as they would: what many take
        together is to be right. A wild outlier (a paused process) moves the mean no further than a bad one does; if
        the first one was it, the record begins anew."""
        if self.count < _FEW and latency_ms * _OUTLIER_RATIO < self.mean_ms:
            self.mean_ms, self.deviation_ms, self.count = latency_ms, 0.0, 1
            return
        weight = max(_WEIGHTS_OF_NEWEST[min(num, _MOST_AT_ONCE)], 1.0 / (self.count + 1))
        error = self.bounded(latency_ms) - self.mean_ms
        self.mean_ms += weight * error
        self.deviation_ms += weight * (abs(error) - self.deviation_ms)
        self.count += 1

    def bounded(self, latency_ms: float) -> float:
        """A measurement of this shape as it is believed: once it was measured twice, not many times the mean. Nothing
        is many times 0, which what runs inside a batch may have seemed to take."""
        is_known = self.count >= 2 and self.mean_ms > 0
        return min(latency_ms, self.mean_ms * _OUTLIER_RATIO) if is_known else latency_ms

    def contradicts(self, latency_ms: float) -> bool:
        return abs(latency_ms - self.mean_ms) > _CONTRADICTION * self.mean_ms

    def latency_ms(self, *, cautious: bool) -> float:
        """The mean; ``cautious``: plus one deviation, what a planner that must not be late should count with."""
        return self.mean_ms + self.deviation_ms if cautious else self.mean_ms


class RecordCache:
    """``shape`` any hashable description of the work. ``iteration``: how many there were, which its owner counts."""

    def __init__(self) -> None:
        self._groups: dict[Group, OrderedDict[Hashable, Record]] = {}
        self.iteration = 0

    def find(self, group: Group, shape: Hashable) -> Record | None:
        """The record of this shape if it rests on at least ``MIN_COUNT`` measurements."""
        shapes = self._groups.get(group)
        record = shapes.get(shape) if shapes is not None else None
        return record if record is not None and record.count >= MIN_COUNT else None

    def fresh_ms(self, group: Group, shape: Hashable, *, cautious: bool) -> float | None:
        """What ``find`` finds, if it is not stale: asked for dozens of times at each iteration, so in one call."""
        shapes = self._groups.get(group)
        record = shapes.get(shape) if shapes is not None else None
        if record is None or record.count < MIN_COUNT or self.iteration - record.iteration > STALE_AFTER:
            return None
        return record.mean_ms + record.deviation_ms if cautious else record.mean_ms

    def add(self, group: Group, shape: Hashable, latency_ms: float, num: int = 1) -> Record:
        """Take one measurement in (see ``Record.add``); the shape unused for longest goes when there are too many.
        Returns its record, a new one where a stale one is contradicted."""
        shapes = self._groups.setdefault(group, OrderedDict())
        record = shapes.get(shape)
        if record is None or (self.is_stale(record) and record.contradicts(latency_ms)):
            record = shapes[shape] = Record(latency_ms)
            if len(shapes) > _MAX_SHAPES:
                shapes.popitem(last=False)
        else:
            record.add(latency_ms, num)
        shapes.move_to_end(shape)
        record.iteration = self.iteration
        return record

    def is_due(self, group: Group, shape: Hashable) -> bool:
        """Whether this shape was measured, and for long not again."""
        shapes = self._groups.get(group)
        record = shapes.get(shape) if shapes is not None else None
        return record is not None and self.is_stale(record)

    def is_stale(self, record: Record) -> bool:
        """Whether it was not measured for long: what else is known may then be newer."""
        return self.iteration - record.iteration > STALE_AFTER

    def export(self, most: int) -> Iterator[list[tuple[Group, tuple[Hashable, float, float, int]]]]:
        """All records, ``most`` at a time: group, and shape, mean, deviation, count. Between two parts measurements may
        be added; those of new shapes are left out."""
        for group, shapes in list(self._groups.items()):
            names = list(shapes)
            for start in range(0, len(names), most):
                found = [(name, shapes.get(name)) for name in names[start : start + most]]
                yield [
                    (group, (name, each.mean_ms, each.deviation_ms, each.count))
                    for name, each in found
                    if each is not None
                ]

    def restore(self, group: Group, shape: Hashable, record: Record) -> None:
        """Put a record back, if there is none of this shape, and room."""
        shapes = self._groups.setdefault(group, OrderedDict())
        if len(shapes) < _MAX_SHAPES:
            shapes.setdefault(shape, record)

    def __len__(self) -> int:
        return sum(len(shapes) for shapes in self._groups.values())
