"""How many tasklets lie in the lane beside a batch, and when the host launches them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clocks import SteppedTime
from cotenant.core.plan import Mode, Partition, Plan
from cotenant.core.tasklet import TaskletShape
from cotenant.engine.engine import OnlineEngine
from cotenant.engine.flight import OnlineStep
from cotenant.runtime import tasklet_lanes
from runtime.cotenancy import request
from runtime.side_by_side import FEW, MANY, NUM_TOKENS, SideBySide, spatial


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


def test_the_device_is_told_how_long_the_host_was_away(executor_clock: SteppedTime, side_by_side: SideBySide) -> None:
    temporal, absences_s = Plan(num_tasklets=2, mode=Mode.TEMPORAL), side_by_side.device.absences_s
    begin_s = executor_clock.now_s
    side_by_side.execute(temporal)
    absences_s.clear()
    executor_clock.sleep(0.02)
    side_by_side.execute(temporal)
    assert len(absences_s) == 1
    assert 0.02 <= absences_s[0] < executor_clock.now_s - begin_s, "since the last tasklet of the first"
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
    executor_clock: SteppedTime, side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch, step_ms: float
) -> None:
    """Or until the batch in flight ends, by what the last one in that partition took."""
    launch, collect = OnlineEngine.launch, OnlineEngine.collect

    def slow(engine: OnlineEngine, step: OnlineStep, *others: Any) -> None:
        executor_clock.sleep(0.2 if step.shape.prefill_tokens else 0.0)
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
    executor_clock: SteppedTime, side_by_side: SideBySide, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There would always be room."""
    device = side_by_side.device
    side_by_side.execute(spatial(8))
    run_tasklet = side_by_side.training.run_tasklet

    def slow() -> TaskletShape:
        executor_clock.sleep(0.002)
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
