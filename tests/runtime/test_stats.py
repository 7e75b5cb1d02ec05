"""What the loop counts and reports of its iterations."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cotenant.core.plan import BatchShape, IterationRecord, Mode, Partition
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import loop as loop_module
from cotenant.runtime.harvest import Harvest
from cotenant.wire.messages import ERROR_BOUNDS, AddRequest, StartJob, Stats, ToWorker
from finetune import support
from runtime.cotenancy import request
from runtime.driven_loop import Behind, Channel, small_loop

DECODE = BatchShape(num_decode=4, context_tokens=400)
FORWARD = TaskletShape(TaskletKind.FORWARD, 256, 64)
PARTITION = Partition(48, 84)
WAYS = {
    "behind": IterationRecord(DECODE, Mode.TEMPORAL, 3.0, 10.0, tasklets=((TaskletRun(FORWARD, 2), 6.0),)),
    "beside": IterationRecord(
        DECODE, Mode.SPATIAL, 9.0, 9.0, partition=PARTITION, beside=((TaskletRun(FORWARD, 2), 9.0),)
    ),
    "fused": IterationRecord(DECODE, Mode.FUSED, 9.0, 9.0, fused=TaskletRun(FORWARD, 2)),
    "late": IterationRecord(DECODE, Mode.NONE, 9.0, 9.0, untimed=(TaskletRun(FORWARD, 2),)),
}


@pytest.mark.parametrize("way", WAYS)
def test_harvest_is_what_tasklets_would_have_taken_alone(way: str) -> None:
    """Wherever they ran: two tasklets of 3 ms in each 10 ms."""
    predictor = LatencyPredictor("test", "test")
    for _ in range(5):
        predictor.observe(
            IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, 3.0, tasklets=((TaskletRun(FORWARD, 1), 3.0),))
        )
    harvest = Harvest(predictor)
    assert harvest.ratio is None
    for turn in range(100):
        harvest.note(WAYS[way], turn / 100, has_job=True)
    assert harvest.ratio == pytest.approx(0.6, rel=0.01)
    for turn in range(100, 10_000):  # requests take all
        harvest.note(IterationRecord(DECODE, Mode.NONE, 9.0, 9.0), turn / 100, has_job=True)
    assert harvest.ratio == pytest.approx(0.0, abs=1e-6)
    harvest.note(IterationRecord(DECODE, Mode.NONE, 9.0, 9.0), 101.0, has_job=False)
    assert harvest.ratio is None


def test_harvest_before_latencies_are_known_is_what_was_measured() -> None:
    harvest = Harvest(LatencyPredictor("test", "test"))
    harvest.note(WAYS["behind"], 1.0, has_job=True)
    harvest.note(WAYS["behind"], 1.01, has_job=True)
    assert harvest.ratio == pytest.approx(0.6)


def test_the_loop_tells_the_harvest_while_there_is_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stats = _stats_of_a_job(tmp_path, monkeypatch)
    with_job = [each.harvest_ratio for each in stats if each.job_id is not None]
    assert max(ratio for ratio in with_job if ratio is not None) > 0
    assert {each.harvest_ratio for each in stats if each.job_id is None} == {None}


def test_the_loop_counts_each_iteration_and_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That had anything, by mode; and of all that could be predicted, alone and together."""
    errors, did_anything = list[float](), list[bool]()
    observe = LatencyPredictor.observe

    def noted(self: LatencyPredictor, record: IterationRecord) -> None:
        observe(self, record)
        did_anything.append(not record.batch.empty or record.num_tasklets > 0)
        if self.last_error_ratio is not None:
            errors.append(self.last_error_ratio)

    monkeypatch.setattr(LatencyPredictor, "observe", noted)
    stats = _stats_of_a_job(tmp_path, monkeypatch)
    totals = [sum(each.num_iterations.values()) for each in stats]
    assert totals == list(itertools.accumulate(did_anything))
    assert {True, False} == set(did_anything)
    assert {"none", "temporal"} <= set(stats[-1].num_iterations)
    found = stats[-1].prediction_errors
    assert sum(sum(kind.counts) for kind in found.values()) == len(errors) > 0
    assert sum(kind.total for kind in found.values()) == pytest.approx(sum(errors))
    assert found["corun"].total > 0
    assert found["alone"].counts[-1] == sum(error > ERROR_BOUNDS[-1] for error in errors) - found["corun"].counts[-1]


def test_the_errors_of_before_the_loop_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What calibration did not foresee says nothing of a server that has done nothing yet."""
    monkeypatch.setattr(loop_module, "_STATS_EVERY_S", 0.0)
    predictor = LatencyPredictor("test", "test")
    for elapsed_ms in (1.0, 1.0, 1e6):
        predictor.observe(IterationRecord(DECODE, Mode.NONE, elapsed_ms, elapsed_ms))
    channel = Channel(AddRequest(request("r", [5, 6, 7], 30)))
    loop, _ = small_loop(tmp_path, channel, Behind(), predictor=predictor)
    loop.run()
    stats = [message for message in channel.sent if isinstance(message, Stats)]
    counted = [sum(sum(kind.counts) for kind in each.prediction_errors.values()) for each in stats]
    assert {each.prediction_error_ratio is None for each, num in zip(stats, counted, strict=True) if num == 0} <= {True}
    first = stats[counted.index(1)]
    assert first.prediction_error_ratio == pytest.approx(sum(each.total for each in first.prediction_errors.values()))


def test_the_loop_tells_the_slack_of_who_waits_and_who_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "_STATS_EVERY_S", 0.0)
    channel = Channel(AddRequest(request("first", [5, 6, 7], 40)))
    loop, _ = small_loop(tmp_path, channel, Behind())
    for _ in range(20):
        loop.iterate()
    channel.inbox.append(AddRequest(request("second", [5, 6, 7], 20)))
    loop.run()
    slacks = [message.slack_ms for message in channel.sent if isinstance(message, Stats)]
    assert slacks[0] == {}, "nobody knows yet how long a batch takes"
    assert "tpot" in slacks[19]
    assert "ttft" not in slacks[19]
    assert 0 < slacks[20]["ttft"] < 1000.0
    assert "ttft" not in slacks[22]


@pytest.mark.parametrize(("policy", "aims"), [("adaptive", True), ("chunked", True), ("multitask", False)])
def test_the_loop_tells_what_a_policy_aims_at_that_does(policy: str, aims: bool, tmp_path: Path) -> None:
    channel = Channel(AddRequest(request("r", [5, 6, 7], 8)))
    loop, _ = small_loop(tmp_path, channel, policy)
    loop.run()
    margins = [message.margin for message in channel.sent if isinstance(message, Stats)]
    assert {margin is not None for margin in margins} == {aims}


class InTurn(Channel):
    """When the loop waits for messages alone, and no more for a job to be prepared, ``later`` comes."""

    later: list[ToWorker]

    def wait(self, timeout_s: float) -> bool:
        if timeout_s < 0.05 or not self.later:
            return super().wait(timeout_s)
        self.inbox, self.later = self.later, []
        return True


def _stats_of_a_job(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Stats]:
    """One for each iteration: some without a job, and then a job with a request beside it."""
    monkeypatch.setattr(loop_module, "_STATS_EVERY_S", 0.0)
    channel = InTurn(AddRequest(request("alone", [5, 6, 7], 8)))
    channel.later = [AddRequest(request("r", [5, 6, 7], 60))]
    loop, _ = small_loop(folder, channel, Behind())
    for _ in range(3):
        loop.iterate()
    channel.inbox.append(StartJob(support.make_spec(folder / "job", n_epochs=1)))
    loop.run()
    return [message for message in channel.sent if isinstance(message, Stats)]
