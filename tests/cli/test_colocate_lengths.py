"""How long the sequences of `cotenant bench colocate` are, and how long it runs a trace."""

from __future__ import annotations

import pytest

from cotenant.bench.traces import Trace, TraceRequest
from cotenant.cli.colocate_loads import plan_trace, steady_lengths


@pytest.mark.parametrize(
    ("context", "num_tokens", "batch_size", "limit", "chosen"),
    [
        (None, None, 32, 8192, (1024, 512)),
        (None, None, 4, 1560, (1024, 512)),
        (None, None, 4, 1559, (1023, 512)),
        (None, None, 32, 1024, (664, 47)),
        (None, 400, 4, 1400, (920, 400)),
        (700, None, 4, 1400, (700, 479)),
        (2, None, 4, 1000, (2, 79)),
        (5000, 512, 4, 100, (5000, 512)),
    ],
)
def test_lengths_that_are_not_given_fit(
    context: int | None, num_tokens: int | None, batch_size: int, limit: int, chosen: tuple[int, int]
) -> None:
    assert steady_lengths(context, num_tokens, batch_size, limit) == chosen


@pytest.mark.parametrize(
    ("min_requests", "time_scale", "window_s", "num_runs", "num_requests"),
    [
        (1, 1.0, (0.0, 1.0), 1, 2),
        (1, 0.5, (0.0, 0.5), 1, 1),
        (2, 0.5, (0.0, 0.6), 1, 2),
        (3, 0.5, None, 1, 3),
        (1, 2.0, None, 1, 3),
        (4, 1.0, None, 2, 6),
    ],
)
def test_a_cell_goes_on_until_enough_requests_have_come(
    min_requests: int, time_scale: float, window_s: tuple[float, float] | None, num_runs: int, num_requests: int
) -> None:
    trace = Trace("azure", [TraceRequest(at_s, 8, 8) for at_s in (0.0, 0.5, 1.5)])
    plan = plan_trace("trace", trace, time_scale, min_requests, seconds=1.0)
    assert (plan.parameters["window_s"], plan.parameters["num_runs"]) == (window_s, num_runs)
    assert len(plan.trace.requests) == num_requests
