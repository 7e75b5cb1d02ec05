"""What a list of measured requests comes down to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestResult:
    """One request as its client saw it. Times in milliseconds; ``sent_s`` on the clock of the load generator.

    TPOT = (end − first token) / (tokens − 1); 0 with a single token. ``error`` is None when it was answered in full.
    """

    sent_s: float
    ttft_ms: float
    tpot_ms: float
    e2e_ms: float
    num_tokens: int
    lag_ms: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Targets:
    """Service-level objective of one request: both must hold."""

    ttft_ms: float
    tpot_ms: float


def percentile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of 100 percent lie at or below, interpolated; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    position = (len(ordered) - 1) * share / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def distribution(values: Sequence[float]) -> dict[str, float]:
    """p50, p90, p99 and mean, rounded to a microsecond."""
    mean = sum(values) / len(values) if values else math.nan
    figures = {
        "p50": percentile(values, 50),
        "p90": percentile(values, 90),
        "p99": percentile(values, 99),
        "mean": mean,
    }
    return {name: round(value, 3) for name, value in figures.items()}


def percentiles(values: Sequence[float]) -> list[float]:
    """The empirical distribution as 101 numbers, rounded to a microsecond: the least value, what 1 percent lie at or
    below, and so on to the greatest. Empty of nothing."""
    if not values:
        return []
    import numpy as np  # here and not above: the command line reads this file for every command

    return [round(float(value), 3) for value in np.percentile(values, range(101))]


def error_figures(ratios: Sequence[float]) -> dict[str, float]:
    """Of relative errors of prediction, of which there are some: the mean, the 95th ``percentile``, the share above
    0.1, and how many there are."""
    return {
        "mean": round(sum(ratios) / len(ratios), 4),
        "p95": round(percentile(ratios, 95), 4),
        "share_above_10_percent": round(sum(ratio > 0.1 for ratio in ratios) / len(ratios), 6),
        "iterations": len(ratios),
    }


def attained(result: RequestResult, targets: Targets) -> bool:
    """True if the request was answered and met both targets."""
    return result.error is None and result.ttft_ms <= targets.ttft_ms and result.tpot_ms <= targets.tpot_ms


def summarize(results: Sequence[RequestResult], targets: Targets, duration_s: float) -> dict[str, object]:
    """The figures of one phase under load, as they stand in ``report.json``. A request that failed counts as missed."""
    answered = [result for result in results if result.error is None]
    num_attained = sum(attained(result, targets) for result in results)
    return {
        "num_requests": len(results),
        "num_failed": len(results) - len(answered),
        "duration_s": round(duration_s, 2),
        "output_tokens_per_s": round(sum(result.num_tokens for result in answered) / max(duration_s, 1e-9), 2),
        "ttft_ms": distribution([result.ttft_ms for result in answered]),
        "tpot_ms": distribution([result.tpot_ms for result in answered if result.num_tokens > 1]),
        "e2e_ms": distribution([result.e2e_ms for result in answered]),
        "slo_attainment": round(num_attained / len(results), 4) if results else math.nan,
        "targets": {"ttft_ms": round(targets.ttft_ms, 3), "tpot_ms": round(targets.tpot_ms, 3)},
        "generator_lag_ms": distribution([result.lag_ms for result in results]),
    }
