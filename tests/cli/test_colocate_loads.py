"""What `cotenant bench colocate` runs before anything is measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from cotenant.bench.traces import Trace, TraceRequest
from cotenant.cli.colocate_loads import SteadyPlan, TracePlan, learn
from cotenant.core.plan import Slo
from cotenant.runtime.load import Arrival

POLICIES = ("inference-only", "adaptive", "llmstation", "harli", "static")
SLO = Slo(500.0, 10.0)


class Runs:
    """In the place of ``ColocateBench``: notes what it is asked for."""

    def __init__(self, num_sms: int | None) -> None:
        self.num_sms, self.asked = num_sms, list[tuple[Any, ...]]()

    def description(self) -> dict[str, Any]:
        return {"num_sms": self.num_sms}

    def learn(self, policy: str, slo: Slo, arrivals: Sequence[Arrival], duration_s: float) -> None:
        self.asked.append((policy, slo, len(arrivals), duration_s))

    def steady(self, policy: str, slo: Slo, batch_size: int, context: int, num_tokens: int, seed: int) -> None:
        self.asked.append((policy, slo, batch_size, context, num_tokens))


def trace_plan() -> TracePlan:
    return TracePlan({}, Trace("azure", [TraceRequest(0.0, 20, 5), TraceRequest(12.0, 9, 7)]), time_scale=2.0)


def missing(*indices: int, policies: Sequence[str] = POLICIES) -> list[tuple[int, Slo, str]]:
    return [(index, SLO, policy) for index in indices for policy in policies]


@pytest.mark.parametrize(("seconds", "served_s"), [(4.0, 4.0), (60.0, 6.0)])
def test_each_policy_serves_the_beginning_of_the_first_trace(seconds: float, served_s: float) -> None:
    bench = Runs(None)
    learn(bench, [SteadyPlan(8, 100, 10), trace_plan()], missing(0, 1), seconds)  # type: ignore[arg-type]
    assert bench.asked == [(policy, SLO, 2, served_s) for policy in POLICIES]


def test_nothing_is_served_where_there_is_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    bench = Runs(132)
    learn(bench, [trace_plan()], missing(0), 0.0)  # type: ignore[arg-type]
    assert not bench.asked
    assert "learning" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("num_sms", [None, 132])
def test_whoever_explores_partitions_has_a_steady_load_that_comes_first_once(
    num_sms: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, plans = Runs(num_sms), [SteadyPlan(8, 100, 10), SteadyPlan(32, 100, 10), trace_plan()]
    learn(bench, plans, missing(1, policies=POLICIES[:3]), 4.0)  # type: ignore[arg-type]
    explored = [(policy, SLO, 32, 100, 10) for policy in ("adaptive", "llmstation")] if num_sms else []
    assert bench.asked == explored, "of what is missing, nothing is of the trace"
    learn(bench, plans, missing(0, 2, policies=("harli",)), 4.0)  # type: ignore[arg-type]
    explored += [("harli", SLO, 8, 100, 10)] if num_sms else []
    assert bench.asked == [*explored, ("harli", SLO, 2, 4.0)]
    assert capsys.readouterr().err.count("learning how long things take") == (2 if num_sms else 1), "once for each"
