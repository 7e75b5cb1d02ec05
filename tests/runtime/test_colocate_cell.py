"""Several runs of a cell of `cotenant bench colocate` as one."""

from __future__ import annotations

from typing import Any

import pytest

from cotenant.core.plan import Slo
from cotenant.runtime.colocate_cell import Cell, pooled


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


def test_a_single_run_is_what_it_is() -> None:
    only = run(7.0)
    assert pooled([only]) is only


def test_requests_are_of_all_runs_and_speeds_are_means() -> None:
    cell = pooled(
        [
            run(4.0, modes={"none": 1}, prediction_errors={"alone": [0.1], "co_run": []}),
            run(1.0, 2.0, modes={"none": 2, "spatial": 5}, prediction_errors={"alone": [0.2], "co_run": [0.3]}),
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
    assert cell.prediction_errors == {"alone": [0.1, 0.2], "co_run": [0.3]}


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
