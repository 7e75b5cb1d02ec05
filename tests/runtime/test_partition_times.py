"""What the record of a batch beside tasklets says of its time, and who learns from it."""

from __future__ import annotations

import pytest

from clocks import SteppedTime
from cotenant.core.plan import Mode, Plan
from cotenant.device.readback import Interval
from cotenant.engine.engine import OnlineEngine
from cotenant.engine.flight import Flight, OnlineStep
from cotenant.predictor.predictor import LatencyPredictor
from runtime.cotenancy import request
from runtime.side_by_side import MANY, NUM_TOKENS, SideBySide, count, spatial


def test_what_was_begun_is_timed_by_the_device(executor_clock: SteppedTime, side_by_side: SideBySide) -> None:
    """Whatever keeps the host between the two iterations."""
    side_by_side.execute(Plan())
    side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    executor_clock.sleep(1.0)
    record = side_by_side.finish()
    assert count(record.tasklets) == 1
    assert record.total_ms >= record.online_ms
    assert record.total_ms < 900


def test_tasklets_behind_what_was_begun_end_when_they_were_to(
    executor_clock: SteppedTime, side_by_side: SideBySide
) -> None:
    """The job was elsewhere in its step when they were counted."""
    side_by_side.execute(Plan())
    side_by_side.execute(Plan(num_tasklets=50, mode=Mode.TEMPORAL, predicted_ms=20.0))
    executor_clock.sleep(0.05)
    record = side_by_side.finish()
    assert count(record.tasklets) == 1, "the one that was launched behind the batch"
    assert record.predicted_ms is None
    # Also where the time passes while the host waits for room.
    side_by_side.execute(Plan())
    plan = Plan(num_tasklets=50, mode=Mode.TEMPORAL, predicted_ms=400.0)
    side_by_side.execute(plan)
    side_by_side.device.wait_for_room = lambda *_, **__: executor_clock.sleep(0.5)  # type: ignore[method-assign]
    assert count(side_by_side.execute(plan).tasklets) <= 1


@pytest.mark.parametrize("is_training", [False, True])
def test_a_batch_on_other_sms_is_disturbed_by_what_is_in_flight_as_it_begins(
    is_training: bool, side_by_side: SideBySide
) -> None:
    """Not as it is launched."""
    device = side_by_side.device
    side_by_side.execute(spatial(2))
    looks = iter([not is_training])
    device.is_training = lambda: next(looks, is_training)  # type: ignore[method-assign]
    side_by_side.execute(Plan())
    landed = side_by_side.execute(Plan())
    assert (landed.batch.num_decode, landed.partition, landed.is_disturbed) == (1, None, is_training)


@pytest.mark.parametrize("is_training", [False, True])
def test_so_is_one_that_tasklets_follow(is_training: bool, side_by_side: SideBySide) -> None:
    """It is compared with what was expected, and nothing is learned from it."""
    device = side_by_side.device
    side_by_side.execute(spatial(2))
    looks = iter([not is_training])
    device.is_training = lambda: next(looks, is_training)  # type: ignore[method-assign]
    side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    landed = side_by_side.finish()
    assert (landed.batch.num_decode, landed.partition, landed.mode) == (1, None, Mode.TEMPORAL)
    assert (landed.with_tasklet, landed.is_disturbed) == (is_training, False)
    predictor = LatencyPredictor("test", "test")
    for _ in range(3):
        predictor.observe(landed)
    assert (predictor.batch_ms(landed.batch) is None) == is_training


def test_what_ends_late_counts_and_teaches_nothing(side_by_side: SideBySide) -> None:
    """A tasklet that ends in a later iteration, of another partition."""
    side_by_side.device.run_tasklet(side_by_side.training.run_tasklet, partition=MANY)
    record = side_by_side.execute(spatial(0, 1))
    assert (count(record.beside), count(record.tasklets)) == (0, 1)
    assert [run.count for run in record.untimed] == [1]


def test_a_batch_beside_the_last_tasklets_of_the_iteration_before_is_not_measured_as_alone(
    side_by_side: SideBySide,
) -> None:
    for is_training in (True, False):
        side_by_side.device.trains = is_training
        side_by_side.execute(Plan())
        side_by_side.device.trains = False
        landed = side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
        assert (landed.batch.num_decode, landed.mode, landed.is_disturbed) == (1, Mode.NONE, is_training)
        side_by_side.finish()


def test_a_batch_that_is_timed_from_the_end_of_tasklets_is_measured_as_alone(side_by_side: SideBySide) -> None:
    side_by_side.device.trains = True
    side_by_side.device.tasklets_end = lambda: object()  # type: ignore[method-assign, assignment, return-value]
    side_by_side.execute(Plan())
    side_by_side.device.trains = False
    landed = side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    assert (landed.batch.num_decode, landed.mode, landed.is_disturbed) == (1, Mode.NONE, False)
    assert landed.behind_tasklets
    side_by_side.finish()
    # In a partition others run beside it.
    side_by_side.device.trains = True
    side_by_side.execute(spatial(0))
    side_by_side.device.trains = False
    landed = side_by_side.execute(spatial(0))
    assert (landed.batch.num_decode, landed.mode) == (1, Mode.SPATIAL)
    assert not landed.behind_tasklets


def test_a_batch_that_waits_for_no_tasklets_is_not_behind_any(
    side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is one with a batch before it that waits for them, or that began as they had ended."""
    device = side_by_side.device
    found = []
    for end in (None, object()):
        device.tasklets_end = lambda end=end: end  # type: ignore[method-assign, assignment, misc]
        side_by_side.execute(Plan())
        found += [side_by_side.execute(Plan()).behind_tasklets for _ in range(2)]
        side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
        side_by_side.finish()
    assert found == [False, False, True, False]
    with monkeypatch.context() as patched:
        patched.setattr(Interval, "waited", lambda *_: False)
        side_by_side.execute(Plan())
        assert not side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL)).behind_tasklets
        side_by_side.finish()
    # Prompts are timed from their launch.
    side_by_side.engine.add(request("late", [5, 6, 7], NUM_TOKENS))
    side_by_side.execute(Plan())
    landed = side_by_side.execute(Plan())
    assert (landed.batch.prefill_tokens, landed.behind_tasklets) == (3, False)


def test_a_batch_is_told_which_tasklets_in_flight_it_waits_for(
    side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it, not the one that is launched beside it, nor any where a batch is in flight before it."""
    device, ends, behind = side_by_side.device, [], []
    launch = OnlineEngine.launch

    def note(engine: OnlineEngine, step: OnlineStep, ran: object = None, after: object = None) -> None:
        behind.append(after)
        launch(engine, step)

    def tasklets_end() -> str:
        ends.append(len(device.launched))
        return "their end"

    monkeypatch.setattr(OnlineEngine, "launch", note)
    device.tasklets_end = tasklets_end  # type: ignore[method-assign, assignment]
    for plan in (Plan(num_tasklets=1, mode=Mode.TEMPORAL), spatial(2, 1)):
        side_by_side.execute(plan)
        assert (behind.pop(), ends.pop()) == ("their end", 0)
    side_by_side.execute(spatial(2))
    behind.clear()
    side_by_side.execute(spatial(2, 3))  # begun behind the one in flight
    assert behind.pop() is None
    side_by_side.finish()
    assert not behind
    # Prompts take the SMs of what is in flight.
    side_by_side.engine.add(request("late", [5, 6, 7], NUM_TOKENS))
    side_by_side.device.trains = True
    side_by_side.execute(Plan())
    assert behind.pop() is None
    assert side_by_side.executor.wait_ms == 0.0
    side_by_side.device.trains = False
    landed = side_by_side.execute(Plan())
    assert (landed.batch.prefill_tokens, landed.is_disturbed) == (3, True)


def test_it_is_known_how_long_a_batch_waits(executor_clock: SteppedTime, side_by_side: SideBySide) -> None:
    device, executor = side_by_side.device, side_by_side.executor
    device.tasklets_left_ms = lambda: 400.0  # type: ignore[method-assign]
    assert executor.wait_ms == 400.0, "one that is launched now"
    side_by_side.execute(Plan())
    assert executor.wait_ms == 0.0, "the one in flight had nothing before it"
    side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    side_by_side.finish()
    device.tasklets_end = object  # type: ignore[method-assign, assignment]
    begin_s = executor_clock.now_s
    side_by_side.execute(Plan())
    executor_clock.sleep(0.1)
    wait_ms, passed_ms = executor.wait_ms, (executor_clock.now_s - begin_s) * 1e3
    assert 400.0 - passed_ms <= wait_ms <= 300.0
    device.tasklets_end = lambda: None  # type: ignore[method-assign]
    side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    side_by_side.finish()
    side_by_side.execute(Plan())
    assert executor.wait_ms == 0.0, "whatever an earlier one has waited for"


def test_it_is_known_how_long_a_batch_with_prompts_takes_to_begin(
    executor_clock: SteppedTime, side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is in flight: else the device has work meanwhile."""
    executor, schedule, waits_s = side_by_side.executor, OnlineEngine.schedule, 0.05

    def slow(engine: OnlineEngine) -> OnlineStep | None:
        executor_clock.sleep(waits_s)
        return schedule(engine)

    monkeypatch.setattr(OnlineEngine, "schedule", slow)
    side_by_side.execute(Plan())  # a decode
    side_by_side.engine.add(request("behind one in flight", [5, 6, 7], 2))
    for _ in range(4):
        side_by_side.execute(Plan())
    assert executor.begins_after_ms < 50.0
    for index in range(2):
        side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
        side_by_side.finish()
        side_by_side.engine.add(request(f"new {index}", [5, 6, 7], 2))
        waits_s = 0.3 + 0.3 * index
        side_by_side.execute(Plan())
        side_by_side.execute(Plan())
    assert executor.begins_after_ms > 200.0


def test_the_time_of_a_batch_that_overtook_what_it_was_to_wait_for_tells_nothing(
    side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    for overtook in (True, False):
        monkeypatch.setattr(Flight, "overtook", overtook)
        for plan in (Plan(num_tasklets=1, mode=Mode.TEMPORAL), spatial(1, 1)):
            assert side_by_side.execute(plan).is_disturbed == overtook
        side_by_side.execute(Plan())
        assert side_by_side.execute(Plan()).is_disturbed == overtook
        side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
        side_by_side.finish()


def test_the_time_of_a_batch_is_the_devices_where_the_host_goes_on(
    side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes behind it, and beside it."""
    monkeypatch.setattr(Flight, "device_ms", lambda flight: 7.0)
    for plan in (Plan(num_tasklets=1, mode=Mode.TEMPORAL), spatial(1, 1)):
        record = side_by_side.execute(plan)
        assert (record.batch.num_decode, record.online_ms) == (1, 7.0)
