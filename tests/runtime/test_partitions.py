"""Batches and tasklets side by side: what a plan with a partition runs where, and what the record says of it.

The lanes are those of a CPU that notes what it is asked for; a batch has not landed for as many looks as a test says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clocks import SteppedTime
from cotenant.core.plan import IterationRecord, Mode, Partition, Plan
from cotenant.core.tasklet import TaskletShape
from cotenant.device import readback
from cotenant.device.cpu import device as cpu_device
from cotenant.device.cpu.device import CpuDevice
from cotenant.device.readback import Interval
from cotenant.engine.engine import OnlineEngine
from cotenant.engine.flight import Flight, OnlineStep
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import executor as executor_module
from cotenant.runtime import tasklet_lanes
from runtime.cotenancy import request
from runtime.test_executor import Bench

FEW, MANY = Partition(48, 84), Partition(96, 36)
NUM_TOKENS = 24


class SplitDevice(CpuDevice):
    overlaps = True
    partitions = (FEW, MANY)

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[str] = []
        self.far_ahead: list[bool] = []
        self.for_s: list[float] = []
        self.trains = False
        self.absences_s: list[float] = []
        self.rooms: Iterator[bool] | None = None  # what it says of room; None: there is always some

    def host_was_away(self, seconds: float) -> None:
        self.absences_s.append(seconds)

    def is_training(self) -> bool:
        return self.trains

    def wait_for_room(
        self, interrupted: Callable[[], bool] | None = None, ask_every_s: float = 1e-3, *, far_ahead: bool = False
    ) -> None:
        self.far_ahead.append(far_ahead)

    def has_room(self, *, far_ahead: bool = False, for_s: float = 0.0) -> bool:
        self.far_ahead.append(far_ahead)
        self.for_s.append(for_s)
        return self.rooms is None or next(self.rooms, False)

    @contextmanager
    def online(self, partition: Partition | None = None) -> Iterator[None]:
        self._note("online", partition)
        yield

    def run_tasklet(
        self, launch: Callable[[], TaskletShape], *, behind_online: bool = False, partition: Partition | None = None
    ) -> None:
        self._note("behind" if behind_online else "tasklet", partition)
        super().run_tasklet(launch, behind_online=behind_online, partition=partition)

    def _note(self, what: str, partition: Partition | None) -> None:
        self.launched.append(what if partition is None else f"{what} {partition.online_sms}")


class SideBySide(Bench):
    def __init__(self, folder: Path) -> None:
        self.device = SplitDevice()
        super().__init__(folder, self.device)
        self.engine.add(request("r", [5, 6, 7], NUM_TOKENS))
        self.execute(Plan())  # its prompt
        self.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
        self.finish()  # nothing is in flight

    def finish(self) -> IterationRecord:
        plan = self.executor.begun
        assert plan is not None
        return self.execute(plan)

    def execute(self, plan: Plan, interrupted: Callable[[], bool] = lambda: False) -> IterationRecord:
        self.device.launched.clear()
        self.device.far_ahead.clear()
        return self.executor.execute(plan, self.emitted.extend, interrupted)


@pytest.fixture
def side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SideBySide]:
    looks = iter([])
    monkeypatch.setattr(OnlineEngine, "has_landed", property(lambda _: next(looks, True)))
    monkeypatch.setattr(tasklet_lanes, "_FILLING_S", 60.0)  # a CPU's tasklets are done when they are launched
    bench = SideBySide(tmp_path)

    def land_after(count: int) -> None:
        nonlocal looks
        looks = iter([False] * count)

    bench.land_after = land_after  # type: ignore[attr-defined]
    yield bench
    bench.pause()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedTime:
    """Of all that times batches and tasklets, from here on: ask for it before ``side_by_side``."""
    return SteppedTime(monkeypatch, executor_module, tasklet_lanes, readback, cpu_device)


def spatial(num_beside: int, num_behind: int = 0, partition: Partition = FEW) -> Plan:
    return Plan(num_tasklets=num_beside + num_behind, num_beside=num_beside, partition=partition, mode=Mode.SPATIAL)


def count(runs: tuple) -> int:  # type: ignore[type-arg]
    return sum(run.count for run, _ in runs)


def test_tasklets_run_beside_the_batch_until_it_lands_and_the_rest_on_all_sms(side_by_side: SideBySide) -> None:
    side_by_side.land_after(5)  # type: ignore[attr-defined]
    record = side_by_side.execute(spatial(10, 3))
    # The first one before the batch, whose launch takes a while. Then asked before and after it waits for room.
    launched = side_by_side.device.launched
    assert launched[:2] == ["tasklet 48", "online 48"]
    assert [each for each in launched if "online" not in each] == [
        "tasklet 48", "tasklet 48", "tasklet 48", "behind", "tasklet", "tasklet"
    ]  # fmt: skip
    assert (count(record.beside), count(record.tasklets)) == (3, 3)
    assert (record.partition, record.mode, record.batch.num_decode) == (FEW, Mode.SPATIAL, 1)


def test_no_more_tasklets_run_beside_a_batch_than_were_planned(side_by_side: SideBySide) -> None:
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    record = side_by_side.execute(spatial(3, 1))
    assert (count(record.beside), count(record.tasklets)) == (3, 1)


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_message_ends_the_tasklets_behind_a_batch_and_none_beside_it(
    side_by_side: SideBySide, is_begun: bool
) -> None:
    """Who has come waits for the batch in flight in any case."""
    if is_begun:
        side_by_side.execute(spatial(9))
        side_by_side.execute(spatial(9, 2))
    num_before = len(side_by_side.emitted)
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    plan = side_by_side.executor.begun or spatial(9, 2)
    record = side_by_side.execute(plan, lambda: True)
    assert (count(record.beside), count(record.tasklets)) == (9, 0)
    assert len(side_by_side.emitted) == num_before + 1


def test_for_who_has_come_no_tasklets_lie_ahead_beside_a_batch(side_by_side: SideBySide) -> None:
    """Those in flight as it lands are what the prompt would wait for."""
    side_by_side.execute(spatial(1))
    looks = iter([False] * 2)
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    side_by_side.device.rooms = iter([])
    side_by_side.execute(spatial(4), lambda: next(looks, True))
    assert side_by_side.device.far_ahead == [True, True, True, False, False]


def test_where_nothing_follows_the_next_batch_is_launched_before_one_lands(side_by_side: SideBySide) -> None:
    num_before = len(side_by_side.emitted)
    first = side_by_side.execute(spatial(4))
    assert first.batch.empty, "it is in flight, and nobody waits for it"
    assert side_by_side.engine.num_in_flight == 1
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    second = side_by_side.execute(spatial(4))
    assert (second.batch.num_decode, second.partition, count(second.beside)) == (1, FEW, 4)
    assert (len(side_by_side.emitted), side_by_side.engine.num_in_flight) == (num_before + 1, 1)
    # On other SMs as well: the one in flight goes on with what was planned for it.
    side_by_side.device.rooms = iter([True, False])
    third = side_by_side.execute(spatial(4, partition=MANY))
    assert [each for each in side_by_side.device.launched if each != "online 48"] == [
        "online 96", "tasklet 48", "online 96", *["tasklet 48"] * 3
    ]  # fmt: skip
    assert (third.batch.num_decode, third.partition, count(third.beside)) == (1, FEW, 4)
    assert (len(side_by_side.emitted), side_by_side.engine.num_in_flight) == (num_before + 2, 1)
    alone = side_by_side.execute(Plan())
    assert "online" in side_by_side.device.launched
    assert (alone.batch.num_decode, alone.partition, count(alone.beside)) == (1, MANY, 4)
    assert (len(side_by_side.emitted), side_by_side.engine.num_in_flight) == (num_before + 3, 1)


def test_behind_a_batch_on_all_sms_the_first_tasklet_beside_the_next_one_waits_for_its_end(
    side_by_side: SideBySide,
) -> None:
    side_by_side.execute(Plan())
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    landed = side_by_side.execute(spatial(4))
    assert [each for each in side_by_side.device.launched if each != "online"] == [
        "online 48", "behind 48", "online 48"
    ]  # fmt: skip
    assert (landed.batch.num_decode, landed.mode, landed.partition, landed.is_disturbed) == (1, Mode.NONE, None, False)
    assert side_by_side.engine.num_in_flight == 1


def test_behind_a_batch_on_all_sms_none_is_launched_where_some_are_in_flight(side_by_side: SideBySide) -> None:
    side_by_side.execute(Plan())
    side_by_side.device.trains = True
    side_by_side.execute(spatial(4))
    assert "behind 48" not in side_by_side.device.launched


def test_a_batch_is_launched_before_one_lands_and_tasklets_follow_it_then(side_by_side: SideBySide) -> None:
    assert side_by_side.execute(Plan()).batch.empty
    plan = Plan(num_tasklets=3, mode=Mode.TEMPORAL)
    landed = side_by_side.execute(plan)
    assert side_by_side.executor.begun is plan
    assert set(side_by_side.device.launched) == {"online"}
    assert (landed.batch.num_decode, landed.mode, landed.partition) == (1, Mode.NONE, None)
    record = side_by_side.finish()
    assert [each for each in side_by_side.device.launched if each != "online"] == ["behind", "tasklet", "tasklet"]
    assert (record.batch.num_decode, record.mode, count(record.tasklets)) == (1, Mode.TEMPORAL, 3)
    assert (side_by_side.executor.begun, side_by_side.engine.num_in_flight) == (None, 0)


def test_tasklets_that_were_to_follow_can_be_given_up(side_by_side: SideBySide) -> None:
    side_by_side.execute(spatial(2))
    side_by_side.execute(spatial(2, 3))
    in_flight = side_by_side.executor.in_flight
    assert in_flight is not None
    assert (in_flight.partition, in_flight.predicted_ms, in_flight.batch.num_decode) == (FEW, None, 1)
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    record = side_by_side.execute(spatial(2))
    assert side_by_side.executor.begun is None
    assert (record.batch.num_decode, record.mode, count(record.tasklets)) == (1, Mode.SPATIAL, 0)
    assert side_by_side.engine.num_in_flight == 1


def test_what_was_begun_is_timed_by_the_device(clock: SteppedTime, side_by_side: SideBySide) -> None:
    """Whatever keeps the host between the two iterations."""
    side_by_side.execute(Plan())
    side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    clock.sleep(1.0)
    record = side_by_side.finish()
    assert count(record.tasklets) == 1
    assert record.total_ms >= record.online_ms
    assert record.total_ms < 900


def test_tasklets_behind_what_was_begun_end_when_they_were_to(clock: SteppedTime, side_by_side: SideBySide) -> None:
    """The job was elsewhere in its step when they were counted."""
    side_by_side.execute(Plan())
    side_by_side.execute(Plan(num_tasklets=50, mode=Mode.TEMPORAL, predicted_ms=20.0))
    clock.sleep(0.05)
    record = side_by_side.finish()
    assert count(record.tasklets) == 1, "the one that was launched behind the batch"
    assert record.predicted_ms is None
    # Also where the time passes while the host waits for room.
    side_by_side.execute(Plan())
    plan = Plan(num_tasklets=50, mode=Mode.TEMPORAL, predicted_ms=400.0)
    side_by_side.execute(plan)
    side_by_side.device.wait_for_room = lambda *_, **__: clock.sleep(0.5)  # type: ignore[method-assign]
    assert count(side_by_side.execute(plan).tasklets) <= 1


def test_training_goes_on_where_each_batch_has_other_sms_than_the_one_before(side_by_side: SideBySide) -> None:
    """Its optimizer waits for tokens to be on their way."""
    plans = itertools.cycle([Plan(), spatial(4)])
    while side_by_side.engine.has_work:
        side_by_side.land_after(100)  # type: ignore[attr-defined]
        side_by_side.execute(next(plans))
    assert side_by_side.training.trained_tokens > 0


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


def test_what_cannot_go_on_lets_the_batch_in_flight_land(side_by_side: SideBySide) -> None:
    side_by_side.execute(Plan())
    landed = side_by_side.execute(Plan(num_tasklets=3, until_step_end=True, mode=Mode.TEMPORAL))
    assert [each for each in side_by_side.device.launched if each != "online"] == ["behind"]
    assert (landed.batch.num_decode, landed.mode, side_by_side.engine.num_in_flight) == (1, Mode.NONE, 0)


def test_what_waits_for_the_device_keeps_no_token_waiting(side_by_side: SideBySide) -> None:
    """An optimizer's launch reads a norm. It runs once the tokens are on their way, so that training goes on."""
    while side_by_side.engine.has_work:
        side_by_side.land_after(100)  # type: ignore[attr-defined]
        num_before, was_next = len(side_by_side.emitted), side_by_side.training.next_waits
        steps_before = side_by_side.training.trained_tokens

        def launch(before: int = num_before) -> TaskletShape:
            if side_by_side.training.next_waits:
                assert len(side_by_side.emitted) > before
            return type(side_by_side.training).run_tasklet(side_by_side.training)

        side_by_side.training.run_tasklet = launch  # type: ignore[method-assign]
        side_by_side.execute(spatial(4))
        if was_next and len(side_by_side.emitted) > num_before:
            assert side_by_side.training.trained_tokens > steps_before
    assert side_by_side.training.trained_tokens > 0


def test_training_can_keep_to_its_sms_while_there_is_no_batch(side_by_side: SideBySide) -> None:
    plan = Plan(run_online=False, num_tasklets=3, num_beside=3, partition=MANY, mode=Mode.SPATIAL)
    record = side_by_side.execute(plan)
    assert side_by_side.device.launched == ["tasklet 96"] * 3
    assert (count(record.beside), record.batch.empty) == (3, True)


def test_who_shares_how_changes_no_token(side_by_side: SideBySide, tmp_path: Path) -> None:
    plans = [Plan(), spatial(2), spatial(3, 2), spatial(1, partition=MANY), Plan(num_tasklets=2, mode=Mode.TEMPORAL)]
    turn = 0
    while side_by_side.engine.has_work:
        side_by_side.land_after(turn % 4)  # type: ignore[attr-defined]
        begun = side_by_side.executor.begun if turn % 3 else None
        side_by_side.execute(begun or plans[turn % len(plans)])
        turn += 1
    tokens = [token for output in side_by_side.emitted for token in output.token_ids]
    plain = Bench(tmp_path / "plain")
    plain.engine.add(request("r", [5, 6, 7], NUM_TOKENS))
    while plain.engine.has_work:
        plain.run(Plan())
    plain.pause()
    assert tokens == [token for output in plain.emitted for token in output.token_ids]
    assert len(tokens) == NUM_TOKENS


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


def test_it_is_known_how_long_a_batch_waits(clock: SteppedTime, side_by_side: SideBySide) -> None:
    device, executor = side_by_side.device, side_by_side.executor
    device.tasklets_left_ms = lambda: 400.0  # type: ignore[method-assign]
    assert executor.wait_ms == 400.0, "one that is launched now"
    side_by_side.execute(Plan())
    assert executor.wait_ms == 0.0, "the one in flight had nothing before it"
    side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    side_by_side.finish()
    device.tasklets_end = object  # type: ignore[method-assign, assignment]
    begin_s = clock.now_s
    side_by_side.execute(Plan())
    clock.sleep(0.1)
    wait_ms, passed_ms = executor.wait_ms, (clock.now_s - begin_s) * 1e3
    assert 400.0 - passed_ms <= wait_ms <= 300.0
    device.tasklets_end = lambda: None  # type: ignore[method-assign]
    side_by_side.execute(Plan(num_tasklets=1, mode=Mode.TEMPORAL))
    side_by_side.finish()
    side_by_side.execute(Plan())
    assert executor.wait_ms == 0.0, "whatever an earlier one has waited for"


def test_it_is_known_how_long_a_batch_with_prompts_takes_to_begin(
    clock: SteppedTime, side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is in flight: else the device has work meanwhile."""
    executor, schedule, waits_s = side_by_side.executor, OnlineEngine.schedule, 0.05

    def slow(engine: OnlineEngine) -> OnlineStep | None:
        clock.sleep(waits_s)
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


def test_tasklets_lie_ahead_where_the_host_is_away_and_nobody_waits_for_their_end(side_by_side: SideBySide) -> None:
    device = side_by_side.device
    side_by_side.execute(spatial(3))
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(3))  # beside the batch in flight
    assert device.far_ahead == [True, True, True]
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(3, 3))  # the batch in flight lands first, with what was planned for it
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    side_by_side.finish()
    assert device.far_ahead == [False, False, False, True, True], "beside the batch, which they end with, and behind it"
    side_by_side.execute(Plan(run_online=False, num_tasklets=2, mode=Mode.TEMPORAL))
    assert device.far_ahead == [True, True], "until a request that comes is a batch, they have ended"


def test_the_device_is_told_how_long_the_host_was_away(clock: SteppedTime, side_by_side: SideBySide) -> None:
    temporal, absences_s = Plan(num_tasklets=2, mode=Mode.TEMPORAL), side_by_side.device.absences_s
    begin_s = clock.now_s
    side_by_side.execute(temporal)
    absences_s.clear()
    clock.sleep(0.02)
    side_by_side.execute(temporal)
    assert len(absences_s) == 1
    assert 0.02 <= absences_s[0] < clock.now_s - begin_s, "since the last tasklet of the first"
    side_by_side.execute(Plan())
    side_by_side.execute(Plan())
    assert len(absences_s) == 2, "before the first of these alone tasklets were launched behind a batch"


def test_the_lane_is_given_a_tasklet_before_the_batch_also_while_it_has_one(side_by_side: SideBySide) -> None:
    """Which may end before the host has launched the batch: what runs on all SMs ends soon."""
    device = side_by_side.device
    device.trains = True
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(2, 1))
    assert device.launched[:2] == ["tasklet 48", "online 48"]
    assert device.far_ahead == [True, False], "asked before the first, and waited for the second alone"
    device.rooms = iter([False])
    side_by_side.land_after(0)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(2, 1))
    assert device.launched[:2] == ["online 48", "online 48"], "what lies ahead lasts for longer than that launch"


@pytest.mark.parametrize("trains", [True, False])
def test_the_lane_is_filled_before_the_host_launches_a_batch_behind_another(
    side_by_side: SideBySide, trains: bool
) -> None:
    """And again behind the launch, where there is nothing to wait for; also where it has become idle."""
    device = side_by_side.device
    device.rooms = iter([True, True, True, False])
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(8))
    assert device.launched[0] == "tasklet 48", "it has none, and gets one at once"
    assert [each for each in device.launched[1:] if each != "online 48"] == ["tasklet 48"] * 2
    device.trains = trains
    device.rooms = iter([True, True, False])
    side_by_side.land_after(3)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(8))
    assert device.launched[:4] == ["tasklet 48", "tasklet 48", "online 48", "online 48"]
    assert device.far_ahead[:2] == [True, True]
    # To go elsewhere, too, but for one alone: others wait for their end.
    device.rooms = iter([True, False])
    side_by_side.land_after(2)  # type: ignore[attr-defined]
    device.far_ahead.clear()
    side_by_side.execute(spatial(8, partition=MANY))
    assert device.launched[:3] == ["online 96", "tasklet 48", "online 96"], "once it is known what is to be launched"
    assert device.far_ahead == [False, False]


@pytest.mark.parametrize("step_ms", [100.0, 400.0])
def test_before_the_host_launches_prompts_the_lane_is_filled_for_as_long_as_that_takes(
    clock: SteppedTime, side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch, step_ms: float
) -> None:
    """Or until the batch in flight ends, by what the last one in that partition took."""
    launch, collect = OnlineEngine.launch, OnlineEngine.collect

    def slow(engine: OnlineEngine, step: OnlineStep, *others: Any) -> None:
        clock.sleep(0.2 if step.shape.prefill_tokens else 0.0)
        launch(engine, step, *others)

    monkeypatch.setattr(OnlineEngine, "launch", slow)
    monkeypatch.setattr(OnlineEngine, "collect", lambda engine: replace(collect(engine), device_ms=step_ms))
    for name in ("a", "b"):
        side_by_side.execute(spatial(8))
        side_by_side.execute(spatial(8))  # in flight, and one there has landed
        side_by_side.engine.add(request(name, [5, 6, 7], NUM_TOKENS))
        side_by_side.device.for_s.clear()
        side_by_side.land_after(2)  # type: ignore[attr-defined]
        side_by_side.execute(Plan())
    assert side_by_side.device.for_s[0] == pytest.approx(min(200.0, step_ms) / 1e3, abs=0.05)


@pytest.mark.parametrize("partition", [FEW, MANY])
def test_tokens_that_are_there_do_not_wait_until_the_lane_is_full(
    side_by_side: SideBySide, partition: Partition
) -> None:
    side_by_side.execute(spatial(8))
    side_by_side.device.trains = True
    side_by_side.execute(spatial(8, partition=partition))
    online = f"online {partition.online_sms}"
    assert side_by_side.device.launched[:2] == [online, online]


def test_the_lane_is_not_filled_where_a_launch_takes_as_long_as_a_tasklet(
    clock: SteppedTime, side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There would always be room."""
    device = side_by_side.device
    side_by_side.execute(spatial(8))
    run_tasklet = side_by_side.training.run_tasklet

    def slow() -> TaskletShape:
        clock.sleep(0.002)
        return run_tasklet()

    monkeypatch.setattr(tasklet_lanes, "_FILLING_S", 1e-3)
    side_by_side.training.run_tasklet = slow  # type: ignore[method-assign]
    side_by_side.land_after(3)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(8))
    assert device.launched[:2] == ["tasklet 48", "online 48"]


def test_no_more_tasklets_fill_the_lane_than_were_planned(side_by_side: SideBySide) -> None:
    side_by_side.device.trains = True
    for plan in (spatial(3), spatial(2)):
        side_by_side.land_after(100)  # type: ignore[attr-defined]
        side_by_side.execute(plan)
        assert side_by_side.device.launched.count("tasklet 48") == plan.num_beside


def test_no_tasklet_runs_beside_a_batch_that_is_not_there(
    side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that is live waits for an adapter; but the one that was to lie in the lane before the batch."""
    monkeypatch.setattr(OnlineEngine, "schedule", lambda engine: None)
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(8))
    assert side_by_side.device.launched.count("tasklet 48") == 1


def test_the_host_waits_for_no_optimizer_while_a_batch_is_in_flight_behind_nothing(side_by_side: SideBySide) -> None:
    """It has no token to hand on meanwhile, and the next batch to launch."""
    while not side_by_side.training.next_waits:
        side_by_side.device.run_tasklet(side_by_side.training.run_tasklet)
    side_by_side.land_after(100)  # type: ignore[attr-defined]
    side_by_side.execute(spatial(4))
    assert side_by_side.training.next_waits
    side_by_side.execute(spatial(4))
    assert not side_by_side.training.next_waits, "its tokens are on their way"
