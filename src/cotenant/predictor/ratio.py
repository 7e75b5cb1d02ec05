"""How many times an estimate the measurements were."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT_OF_NEWEST = 0.05
_OUTLIER_RATIO = 8.0
_ENOUGH = 3  # measurements, of any shapes


@dataclass(slots=True)
class Ratio:
    """A fading mean of measured / estimated, and the mean deviation from it."""

    mean: float = 1.0
    deviation: float = 0.0
    count: int = 0

    def add(self, measured: float, estimated: float, least_weight: float = _WEIGHT_OF_NEWEST) -> None:
        """Take one measurement in, which counts for ``least_weight`` at least; a wild outlier moves the mean no further
        than a bad one does."""
        if estimated <= 0:
            return
        ratio = measured / estimated
        if self.count == 0:
            self.mean = ratio
        elif self.count >= _ENOUGH:
            ratio = min(ratio, self.mean * _OUTLIER_RATIO)
        weight = max(least_weight, 1.0 / (self.count + 1))
        error = ratio - self.mean
        self.mean += weight * error
        self.deviation += weight * (abs(error) - self.deviation)
        self.count += 1

    def less_trusted(self, most_count: int) -> Ratio:
        """The same as if it rested on so many measurements at most: those that follow count more."""
        return Ratio(self.mean, self.deviation, min(self.count, most_count))

    @property
    def known(self) -> bool:
        return self.count >= _ENOUGH

    @property
    def cautious(self) -> float:
        """The mean plus one deviation."""
        return self.mean + self.deviation
