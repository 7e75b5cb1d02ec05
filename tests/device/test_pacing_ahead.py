"""How much lies ahead of the device while the host is away, and how soon it is asked again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from cotenant.core.plan import Partition
from device.pacing_simulation import FORWARD, Simulation


@pytest.mark.parametrize("far_ahead", [True, False])
def test_far_ahead_the_device_has_work_while_the_host_is_away(simulation: Simulation, far_ahead: bool) -> None:
    """For two milliseconds of every eight, as beside a batch."""
    idle_s, next_away_s = 0.0, 8e-3
    for _ in range(400):
        simulation.queue.wait_for_room(far_ahead=far_ahead)
        idle_s += max(0.0, simulation.now_s - simulation.busy_until_s)
        assert simulation.busy_until_s - simulation.now_s < (2.6e-3 if far_ahead else 1e-3)
        simulation.launch(FORWARD, 0.7e-3)
        if simulation.now_s > next_away_s:
            simulation.now_s += 2e-3
            next_away_s = simulation.now_s + 6e-3
    assert (idle_s < 0.01 * simulation.now_s) == far_ahead


def test_no_more_lies_ahead_than_the_host_is_away_for(simulation: Simulation) -> None:
    """Then one tasklet at most stands before a batch, as where none lies ahead."""

    def most_ahead_s(partition: Partition | None = None) -> float:
        ahead_s = []
        for _ in range(30):
            simulation.queue.wait_for_room(far_ahead=True)
            simulation.launch(FORWARD, 0.9e-3, partition=partition)
            ahead_s.append(simulation.busy_until_s - simulation.now_s)
        return max(ahead_s)

    def away(seconds: float, count: int) -> None:
        for _ in range(count):
            simulation.queue.host_was_away(seconds)

    simulation.run(FORWARD, 0.9e-3, 20)
    at_first_s = most_ahead_s()
    away(0.5e-3, 100)
    assert most_ahead_s() < 0.5e-3 + 0.9e-3 + 100e-6 < at_first_s
    assert most_ahead_s(Partition(48, 84)) == pytest.approx(at_first_s, abs=200e-6), "a batch has its own SMs there"
    simulation.run(FORWARD, 0.9e-3, 9)
    away(3600.0, 1)  # nobody wanted anything
    assert most_ahead_s() < 0.6e-3 + 0.9e-3
    away(4e-3, 100)
    assert 3.6e-3 < most_ahead_s() < 4.2e-3 + 0.9e-3 + 100e-6
    away(0.0, 1000)
    away(4e-3, 100)
    assert most_ahead_s() > 3.6e-3, "a host that was never away may be some time"
    away(3600.0, 100)
    assert most_ahead_s() < 6e-3 + 0.9e-3 + 100e-6, "whoever comes waits for it"


def test_as_often_as_not_enough_lies_ahead(simulation: Simulation) -> None:
    """Where the times that the host is away vary, the longest ones by much."""
    drawn = random.Random(7)
    simulation.run(FORWARD, 0.3e-3, 20)
    idle_s, num_idle = 0.0, 0
    for turn in range(600):
        for _ in range(30):
            simulation.queue.wait_for_room(far_ahead=True)
            simulation.launch(FORWARD, 0.3e-3)
        away_s = drawn.choice([drawn.uniform(3.2e-3, 4.8e-3)] * 9 + [0.02])
        simulation.now_s += away_s
        simulation.queue.host_was_away(away_s)
        late_s = simulation.now_s - simulation.busy_until_s
        if turn >= 100 and away_s < 0.02:
            idle_s, num_idle = idle_s + max(0.0, late_s), num_idle + (late_s > 0)
            assert late_s > -2.2e-3, "and not much more than enough"
    assert num_idle < 260
    assert idle_s < 500 * 0.25e-3


def test_those_behind_a_tasklet_that_is_late_have_not_begun(simulation: Simulation) -> None:
    """A batch takes the SMs: what lies ahead is no less for it."""
    simulation.run(FORWARD, 2e-3, 20)
    for _ in range(40):
        simulation.queue.host_was_away(0.5e-3)
    simulation.queue.wait_for_room()
    simulation.launch(FORWARD, 7e-3)
    simulation.launch(FORWARD, 2e-3)
    simulation.now_s += 6e-3
    simulation.queue.wait_for_room(far_ahead=True)
    assert simulation.busy_until_s - simulation.now_s < 0.5e-3 + 100e-6


def test_far_ahead_there_are_no_more_than_two_of_which_nobody_knows_how_long_they_take(simulation: Simulation) -> None:
    for _ in range(4):
        simulation.queue.wait_for_room(far_ahead=True)
        assert simulation.busy_until_s - simulation.now_s <= 11e-3
        simulation.launch(FORWARD, 10e-3)


def test_who_waits_is_told_the_mean(simulation: Simulation) -> None:
    """What is expected for the next launch is less than that."""
    drawn, errors_ms = random.Random(3), []
    for turn in range(200):
        for _ in range(3):
            simulation.launch(FORWARD, drawn.uniform(0.9e-3, 1.5e-3))
        left_ms = (simulation.busy_until_s - simulation.now_s) * 1e3
        if turn >= 20:
            errors_ms.append(simulation.queue.left_on_all_sms_ms() - left_ms)
        simulation.now_s = simulation.busy_until_s + 1e-3
    assert abs(sum(errors_ms)) / len(errors_ms) < 0.1


@pytest.mark.parametrize(
    ("far_ahead", "for_s", "least_s", "most_s"),
    [
        (True, 0.0, 2.4e-3, 2.6e-3),
        (False, 0.0, 0.05e-3, 0.3e-3),
        (False, 9e-3, 8.9e-3, 9.1e-3),
        (False, -1.0, 0.05e-3, 0.3e-3),
    ],
)
def test_it_is_told_without_a_wait_whether_there_is_room(
    simulation: Simulation, far_ahead: bool, for_s: float, least_s: float, most_s: float
) -> None:
    simulation.run(FORWARD, 1e-3, 20)
    num_sleeps, found = simulation.num_sleeps, set()
    for _ in range(60):
        has_room = simulation.queue.has_room(far_ahead=far_ahead, for_s=for_s)
        left_s = simulation.busy_until_s - simulation.now_s
        found.add(has_room)
        assert left_s < most_s if has_room else left_s > least_s
        if has_room:
            simulation.launch(FORWARD, 1e-3)
        simulation.now_s += 0.13e-3
    assert found == {True, False}
    assert simulation.num_sleeps == num_sleeps
    simulation.now_s += 1.0
    assert simulation.queue.has_room(far_ahead=far_ahead), "nothing is in flight"


@pytest.mark.parametrize("asked", [True, False])
def test_somebody_who_is_asked_is_asked_often(simulation: Simulation, asked: bool) -> None:
    simulation.run(FORWARD, 20e-3, 3)
    times_s: list[float] = []

    def interrupted() -> bool:
        times_s.append(simulation.now_s)
        return len(times_s) == 5

    start_s = simulation.now_s
    wait: Callable[[], None] = lambda: simulation.queue.wait_for_room(interrupted if asked else None)  # noqa: E731
    wait()
    waited_s = simulation.now_s - start_s
    assert waited_s < 6e-3 if asked else waited_s > 15e-3
    assert len(times_s) == (5 if asked else 0)


def test_whoever_is_asked_is_asked_often_although_tasklets_are_late(simulation: Simulation) -> None:
    simulation.run(FORWARD, 1e-3, 40)
    for _ in range(2):
        simulation.launch(FORWARD, 500e-3)
    asked_s = [simulation.now_s]

    def interrupted() -> bool:
        asked_s.append(simulation.now_s)
        return False

    simulation.queue.wait_for_room(interrupted)
    assert simulation.now_s > 0.49
    assert max(later - earlier for earlier, later in itertools.pairwise(asked_s)) < 2e-3
