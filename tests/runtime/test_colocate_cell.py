"""Several runs of a cell of `cotenant bench colocate` as one."""

from __future__ import annotations

import time
from dataclasses import replace
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cotenant.cli.colocate_figures import cell_figures
from cotenant.core.plan import BatchShape, IterationRecord, Mode, Slo
from cotenant.runtime.colocate_cell import NUM_FARTHEST_OFF, Cell, Errors, Predicted, pooled
from cotenant.runtime.colocate_watch import Watch
from cotenant.runtime.load import Load
from cotenant.runtime.tenants import Tenants
from cotenant.runtime.timeline import Timeline


def run(train_tokens_per_s: float, duration_s: float = 1.0, **more: Any) -> Cell:
    return Cell(
        policy="adaptive",
        slo=Slo(500.0, 40.0),
        duration_s=duration_s,
        num_requests=2,
        num_failed=1,
        num_attained=1,
        ttft_ms=[train_tokens_per_s],
        tpot_ms=[1.0],
        itl_ms=[1.0, 2.0],
        output_tokens_per_s=10.0,
        train_tokens_per_s=train_tokens_per_s,
        timeline={"of": train_tokens_per_s},
        **more,
    )


def predicted(deviation_ratio: float, at_s: float = 1.0) -> Predicted:
    batch = BatchShape(num_decode=3, context_tokens=30)
    return Predicted(deviation_ratio, at_s, 9.0, IterationRecord(batch, Mode.NONE, 8.0, 8.0))


def errors(*each: Predicted) -> Errors:
    found = Errors()
    for one in each:
        found.add(one)
    return found


def test_a_single_run_is_what_it_is() -> None:
    only = run(7.0)
    assert pooled([only]) is only


def test_requests_are_of_all_runs_and_speeds_are_means() -> None:
    quarter, half, less = predicted(0.25), predicted(0.5), predicted(-0.3)
    cell = pooled(
        [
            run(4.0, modes={"none": 1}, errors={"alone": errors(quarter), "co_run": errors()}),
            run(1.0, 2.0, modes={"none": 2, "spatial": 5}, errors={"alone": errors(half), "co_run": errors(less)}),
            run(3.0, modes={}),
        ]
    )
    assert (cell.num_requests, cell.num_failed, cell.num_attained, cell.duration_s) == (6, 3, 3, 4.0)
    assert (cell.ttft_ms, cell.tpot_ms, cell.itl_ms) == ([4.0, 1.0, 3.0], [1.0] * 3, [1.0, 2.0] * 3)
    assert cell.train_tokens_per_s == pytest.approx((4.0 + 2 * 1.0 + 3.0) / 4), "all tokens in all of the time"
    assert cell.output_tokens_per_s == pytest.approx(10.0)
    assert cell.trained_in_runs == (4.0, 1.0, 3.0)
    assert cell.attained_in_runs == (0.5, 0.5, 0.5)
    assert cell.timeline == {"of": 3.0}, "the median run's"
    assert cell.modes == {"none": 3, "spatial": 5}
    assert {kind: (each.ratios, each.worst()) for kind, each in cell.errors.items()} == {
        "alone": ([0.25, 0.5], [half._replace(run=1), quarter._replace(run=0)]),
        "co_run": ([0.3], [less._replace(run=1)]),
    }


def test_what_was_predicted_worst_is_named() -> None:
    """Too little or too much is as wrong; the worst first, and no more of them than a few."""
    many = [predicted(0.001 * index, at_s=float(index)) for index in range(96)]
    parts = errors(*many[:50], predicted(-0.4, 7.5)), errors(*many[50:], *many[:3])
    runs = [run(1.0, errors={"alone": part, "co_run": errors()}) for part in parts]
    found = cell_figures({}, pooled(runs), 1.0)["prediction_error"]
    assert found["co_run"] is None
    alone = found["alone"]
    assert alone["iterations"] == 100
    assert alone["mean"] == pytest.approx((sum(range(96)) * 0.001 + 0.003 + 0.4) / 100, abs=1e-4)
    assert alone["p95"] == pytest.approx(0.09105, abs=6e-5), (
        "between 0.091 and 0.092, which five of a hundred are above"
    )
    assert alone["share_above_10_percent"] == 0.01
    assert [each["deviation"] for each in alone["farthest_off"]] == pytest.approx(
        [-0.4, *(0.001 * index for index in range(95, 95 - NUM_FARTHEST_OFF + 1, -1))]
    )
    assert [each["run"] for each in alone["farthest_off"]] == [0] + [1] * (NUM_FARTHEST_OFF - 1)
    (only,) = cell_figures({}, pooled([run(1.0, errors={"alone": errors(many[5])})]), 1.0)["prediction_error"].values()
    assert only["farthest_off"][0].keys().isdisjoint({"run", "behind_tasklets"})
    behind = many[5]._replace(record=replace(many[5].record, behind_tasklets=True))
    (only,) = cell_figures({}, run(1.0, errors={"alone": errors(behind)}), 1.0)["prediction_error"].values()
    assert only["farthest_off"][0]["behind_tasklets"]
    assert alone["farthest_off"][0] == {
        "deviation": -0.4,
        "run": 0,
        "at_s": 7.5,
        "apart_ms": 9.0,
        "online_ms": 8.0,
        "mode": "none",
        "num_tasklets": 0,
        "num_decode": 3,
        "context_tokens": 30,
    }


def test_iterations_are_apart_from_when_they_are_watched() -> None:
    """Also where the load had begun long before."""
    load, record = Load((), 16, seed=0), predicted(0.3).record
    time.sleep(0.05)
    tenants = SimpleNamespace(
        training=SimpleNamespace(job_id=None), predictor=SimpleNamespace(last_deviation_ratio=0.3)
    )
    watch = Watch(load, cast(Tenants, tenants), 16, Timeline())
    watch.note(record)
    time.sleep(0.02)
    watch.note(record)
    first, second = sorted(watch.errors["alone"].worst(), key=attrgetter("at_s"))
    assert 0 < first.apart_ms <= first.at_s * 1e3 - 50
    assert second.apart_ms == pytest.approx((second.at_s - first.at_s) * 1e3)
    assert second.apart_ms >= 20


def test_shares_are_means_over_the_time_where_all_runs_have_them() -> None:
    slow, fast = (
        {"rest": rest, "decode_steps_per_s": per_s, "decode_step_ms": step_ms}
        for rest, per_s, step_ms in ((0.4, 60.0, 8.0), (0.0, 100.0, 5.0))
    )
    runs = [run(1.0, 1.0, device_time=slow, utilisation={"sm": 0.2, "power_w": 100.0})]
    runs.append(run(2.0, 3.0, device_time=fast, utilisation={"sm": 0.6}))
    cell = pooled(runs)
    assert cell.device_time == {"rest": 0.1, "decode_steps_per_s": 90.0, "decode_step_ms": 5.5}, "60 steps and 300"
    assert cell.utilisation == {"sm": 0.5}
    assert pooled([*runs, run(3.0)]).device_time is None
