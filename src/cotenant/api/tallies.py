"""Counters and histograms that one event loop writes and reads.

``prometheus_client``'s own take a lock and several calls for each value, which at one value per streamed token costs as
much as writing the token. These are plain numbers until Prometheus asks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

_LABEL = "model_name"


class Tally(Collector):
    """A counter; ``value`` only grows."""

    def __init__(self, name: str, text: str, model_name: str) -> None:
        self.value = 0
        self._name = name
        self._text = text
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=[_LABEL])
        family.add_metric([self._model_name], self.value)
        yield family


class LabelledTally(Collector):
    """A counter for each combination of values of ``labels``; ``counts`` only grow."""

    def __init__(self, name: str, text: str, labels: Sequence[str], model_name: str) -> None:
        self.counts: Counter[tuple[str, ...]] = Counter()
        self._name = name
        self._text = text
        self._labels = tuple(labels)
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=[_LABEL, *self._labels])
        for values, count in self.counts.items():
            family.add_metric([self._model_name, *values], count)
        yield family


class LatencyTally(Collector):
    """A histogram of latencies in seconds. ``bounds_s``: the buckets' upper bounds, rising, without infinity."""

    def __init__(self, name: str, text: str, bounds_s: Sequence[float], model_name: str) -> None:
        self._name = name
        self._text = text
        self._bounds_s = tuple(bounds_s)
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0
        self._model_name = model_name

    def observe(self, latency_s: float, count: int = 1) -> None:
        """``count`` times this latency."""
        self._counts[bisect_left(self._bounds_s, latency_s)] += count
        self._sum_s += latency_s * count

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=[_LABEL])
        family.add_metric([self._model_name], cumulative(self._bounds_s, self._counts), self._sum_s)
        yield family


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Buckets as Prometheus has them: each holds those below it, too. ``counts``: one more than ``bounds``, for what is
    beyond the last."""
    return list(zip([*map(repr, bounds), "+Inf"], accumulate(counts), strict=True))
