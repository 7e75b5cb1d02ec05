"""Figures of `cotenant bench serve`, from what became of its requests."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cotenant.bench.figures import Run, figures
from cotenant.bench.generator import Outcome, ShareResult
from cotenant.bench.summary import Targets


def measured(*chunk_times_s: list[float]) -> dict[str, Any]:
    """Requests that are sent at once, each with two tokens in a chunk."""
    outcomes = [
        Outcome(index, 0.0, 0.0, 5, np.array(times).tobytes(), 2 * len(times), finished=True)
        for index, times in enumerate(chunk_times_s)
    ]
    run = Run(len(outcomes), [ShareResult(outcomes, cpu_s=0.1, num_chunks=10)], was_interrupted=False)
    return figures(run, Targets(math.inf, math.inf))


def test_the_peak_is_the_fullest_second_and_of_less_there_is_none() -> None:
    report = measured([0.2, 1.1, 1.2, 2.5], [0.3, 1.9])
    assert report["max_output_tokens_per_s"] == 6.0
    assert report["max_concurrent_requests"] == 2
    short = measured([0.1, 0.2, 0.5], [0.4])
    assert short["output_throughput"] == pytest.approx(16.0)
    assert short["max_output_tokens_per_s"] is None
    assert short["max_concurrent_requests"] == 2
