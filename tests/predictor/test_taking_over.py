"""What one server has learned, in the hands of another."""

from __future__ import annotations

import json

import pytest

from cotenant.core.plan import IterationRecord, Mode
from cotenant.core.tasklet import TaskletRun
from cotenant.predictor.predictor import LatencyPredictor
from taught import BACKWARD, DECODE, taught_predictor


def test_what_was_measured_can_be_taken_over_and_is_soon_corrected() -> None:
    exported = taught_predictor(2.0, 1.0, 3.0).export()
    predictor = LatencyPredictor("test hardware", "test model")
    assert predictor.restore(exported) == predictor.num_records > 0
    assert predictor.batch_ms(DECODE) == pytest.approx(2.0)
    assert predictor.tasklet_ms(BACKWARD, with_batch=DECODE) == pytest.approx(3.0)
    for _ in range(30):  # the machine has become slower
        predictor.observe(IterationRecord(DECODE, Mode.TEMPORAL, 4.0, 10.0, tasklets=((TaskletRun(BACKWARD, 1), 6.0),)))
    assert predictor.tasklet_ms(BACKWARD, with_batch=DECODE) == pytest.approx(6.0, rel=0.15)


def test_own_measurements_win_over_those_taken_over() -> None:
    predictor = taught_predictor(5.0, 1.0, 3.0)
    predictor.restore(taught_predictor(2.0, 1.0, 3.0).export())
    assert predictor.batch_ms(DECODE) == pytest.approx(5.0)


@pytest.mark.parametrize("exported", [b"", b"[1]", b"{}", taught_predictor(2.0, 1.0, 3.0).export()[:-5]])
def test_what_is_no_export_is_refused(exported: bytes) -> None:
    with pytest.raises(ValueError, match=r"Input data was truncated|Expected `object`|missing required field"):
        LatencyPredictor("test hardware", "test model").restore(exported)


def test_another_machines_measurements_are_refused() -> None:
    with pytest.raises(ValueError, match="measured on"):
        LatencyPredictor("other hardware", "test model").restore(taught_predictor(2.0, 1.0, 3.0).export())


@pytest.mark.parametrize(
    ("key", "broken"),
    [
        ("records", [[[], ["tasklet", ["forward", 1, {"a": 1}]], 1.0, 0.0, 5]]),
        ("records", [[[{"a": 1}], ["batch", [1, 1, 1, 1]], 1.0, 0.0, 5]]),
        ("records", [[[[1]], ["batch", [1, 1, 1, 1]], 1.0, 0.0, 5]]),
        ("records", [[[], ["batch", [1, 1, 1, 1]], 1.0, 0.0, 10**30]]),
        ("records", [[[], ["tasklet", ["forward", 1, 1]], -1.0, 0.0, 5]]),
        ("records", [[[], ["tasklet", ["forward", 1, 1]], 1.0, 0.0, -1]]),
        ("batches", [[[1e308, 0, 0, 0, 0], [0.0] * 25, 5], [[0.0] * 9, [0.0] * 81, 0], {}, []]),
        ("batches", [[[0.0] * 5, [0.0] * 25, 0], [[0.0] * 9, [0.0] * 81, 0], {"8": {"mean": -1.0}}, []]),
        ("batches", [[[0.0] * 5, [0.0] * 25, 0], [[0.0] * 9, [0.0] * 81, 0], {}, [{"mean": -1.0}]]),
        ("partition_ratios", [[[84], {"mean": 1.0, "deviation": 0.0, "count": -1}]]),
    ],
)
def test_what_no_predictor_has_written_is_refused_whole(key: str, broken: object) -> None:
    content = json.loads(taught_predictor(2.0, 1.0, 3.0).export())
    predictor = LatencyPredictor("test hardware", "test model")
    with pytest.raises(ValueError, match=r"never measured|unhashable|Expected `int \| str`"):
        predictor.restore(json.dumps({**content, key: broken}).encode())
    assert predictor.num_records == 0
    assert predictor.batch_ms(DECODE) is None
