"""When the next tasklet is launched, on a device whose clock is simulated: nothing here needs a GPU."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import pytest

from cotenant.core.plan import Partition
from device.pacing_simulation import BACKWARD, FORWARD, Simulation


def test_the_next_tasklet_is_launched_shortly_before_the_end(simulation: Simulation) -> None:
    leads_s = simulation.run(FORWARD, 1.2e-3, 40)[4:]
    assert all(0.0 < lead_s < 250e-6 for lead_s in leads_s), leads_s
    before = simulation.num_sleeps
    simulation.run(FORWARD, 1.2e-3, 20)
    assert simulation.num_sleeps - before <= 2 * 20


@pytest.mark.parametrize("drift", [-2e-4, 0.0, 2e-4])
def test_clocks_that_drift_apart_change_neither_times_nor_leads(simulation: Simulation, drift: float) -> None:
    """The stream is never idle for long, so nothing else tells what the host's clock says of the device's."""
    simulation.drift = drift
    leads_s = []
    for _ in range(60):
        leads_s += simulation.run(FORWARD, 1.2e-3, 50)
        simulation.queue.wait_for_room()
        simulation.now_s += 3e-3  # the host is held up: the next launch is late
        simulation.launch(FORWARD, 1.2e-3)
    assert max(leads_s[4:]) < 300e-6
    simulation.queue.wait_for_room()
    finished = simulation.queue.take_finished()
    assert len(finished) > 3000
    times_ms = [each.elapsed_ms for each in finished]
    assert min(times_ms) > 1.15
    assert max(times_ms) < 1.35


@pytest.mark.parametrize("drift", [-2e-4, 2e-4])
def test_clocks_that_drift_apart_change_no_times_where_the_host_is_the_slower_one(
    simulation: Simulation, drift: float
) -> None:
    """Every launch is late then, and the stream is never idle when the host looks."""
    simulation.drift = drift
    for _ in range(3000):
        simulation.queue.wait_for_room()
        simulation.launch(FORWARD, 1.2e-3, host_s=1.5e-3)
    simulation.queue.wait_for_room()
    times_ms = [each.elapsed_ms for each in simulation.queue.take_finished()]
    assert len(times_ms) > 2900
    assert min(times_ms) > 1.15


def test_a_tasklet_takes_few_questions_to_the_driver(simulation: Simulation) -> None:
    """Whether it runs still, whether the one before does, and how long that took."""
    simulation.run(FORWARD, 1.2e-3, 40)
    before = simulation.num_questions
    simulation.run(FORWARD, 1.2e-3, 100)
    assert simulation.num_questions - before <= 3.2 * 100


def test_what_a_tasklet_waited_for_others_is_no_part_of_its_time(simulation: Simulation) -> None:
    """Whatever was put on its stream after the one before."""
    simulation.run(FORWARD, 1.2e-3, 10)
    simulation.queue.wait_for_room()
    simulation.busy_until_s += 6e-3
    simulation.launch(FORWARD, 1.2e-3, waits_for_others=True)
    simulation.run(FORWARD, 1.2e-3, 5)
    simulation.now_s = simulation.busy_until_s
    assert all(1.19 < tasklet.elapsed_ms < 1.27 for tasklet in simulation.queue.take_finished())


def test_what_a_tasklet_waited_for_the_host_is_no_part_of_its_time(simulation: Simulation) -> None:
    for away_s in (0.0, 0.0, 5e-3, 0.4e-3, 0.0):
        simulation.run(FORWARD, 1.2e-3, 5)
        simulation.now_s += away_s
    reported = simulation.queue.take_finished()
    assert all(1.199 < tasklet.elapsed_ms < 1.261 for tasklet in reported), "with the launch itself, where it is late"
    ends_s = [tasklet.end_s for tasklet in reported]
    assert max(later - earlier for earlier, later in itertools.pairwise(ends_s)) > 4.9e-3
    assert ends_s[-1] <= simulation.busy_until_s


@pytest.mark.parametrize("host_s", [40e-6, 100e-6, 200e-6])
def test_a_host_that_takes_longer_to_launch_begins_sooner(simulation: Simulation, host_s: float) -> None:
    """The device hardly waits, and nothing is launched much sooner than has to be."""
    simulation.run(FORWARD, 1.2e-3, 100, host_s=host_s)
    leads_s = simulation.run(FORWARD, 1.2e-3, 100, host_s=host_s)
    assert all(host_s - 2e-6 < lead_s < host_s + 60e-6 for lead_s in leads_s), leads_s
    assert sum(lead_s < host_s for lead_s in leads_s) <= 6
    simulation.run(FORWARD, 1.2e-3, 1, host_s=2e-3)
    after_s = simulation.run(FORWARD, 1.2e-3, 30, host_s=host_s)
    assert max(after_s[5:]) < host_s + 150e-6
    assert max(after_s[20:]) < host_s + 60e-6, "a rare long one hurries no others"


@pytest.mark.parametrize(("least_s", "most_s"), [(50e-6, 70e-6), (60e-6, 180e-6), (200e-6, 240e-6)])
def test_a_host_that_oversleeps_more_wakes_sooner(simulation: Simulation, least_s: float, most_s: float) -> None:
    """Also one that oversleeps until nothing is in flight any more."""
    drawn = random.Random(7)
    simulation.oversleeps = iter(lambda: drawn.uniform(least_s, most_s), None)
    simulation.run(FORWARD, 1.2e-3, 300)
    leads_s = simulation.run(FORWARD, 1.2e-3, 1000)
    waited_s = sum(max(0.0, 60e-6 - lead_s) for lead_s in leads_s)
    assert waited_s < 1e-3 * 1000 * 1.2e-3, "the device waits for a thousandth of the time at most"
    assert max(leads_s) < 60e-6 + 1.2 * (most_s - least_s) + 40e-6


def test_launches_that_compile_do_not_wake_the_host_sooner(simulation: Simulation) -> None:
    """A piece of each layer is captured at its first launch."""
    simulation.run(FORWARD, 5e-3, 100)
    simulation.run(FORWARD, 5e-3, 100, host_s=3e-3)
    assert max(simulation.run(FORWARD, 5e-3, 60)[40:]) < 220e-6


def test_what_holds_the_host_up_elsewhere_does_not_wake_it_sooner(simulation: Simulation) -> None:
    """A batch between its waking and the launch, again and again."""
    simulation.run(FORWARD, 1.2e-3, 100)
    for _ in range(50):
        simulation.queue.wait_for_room()
        simulation.now_s += 3e-3
        simulation.launch(FORWARD, 1.2e-3)
    assert max(simulation.run(FORWARD, 1.2e-3, 20)[4:]) < 130e-6


def test_launches_for_which_nobody_slept_do_not_wake_the_host_sooner(simulation: Simulation) -> None:
    simulation.run(FORWARD, 1.2e-3, 100)
    for _ in range(50):
        simulation.run(BACKWARD, 0.3e-3, 3)
        simulation.now_s = simulation.busy_until_s + 1e-6
        assert simulation.queue.has_room()
        simulation.launch(BACKWARD, 0.3e-3)
    assert max(simulation.run(FORWARD, 1.2e-3, 20)[4:]) < 130e-6


def test_times_vary_and_the_device_hardly_waits(simulation: Simulation) -> None:
    leads_s: list[float] = []
    for turn in range(60):
        leads_s += simulation.run(FORWARD, 1.0e-3 * (1 + 0.02 * (turn % 3)), 1)
        leads_s += simulation.run(BACKWARD, 1.3e-3 * (1 + 0.02 * (turn % 2)), 1)
    assert min(leads_s[10:]) > 0.0
    assert max(leads_s[10:]) < 400e-6


def test_a_shape_takes_longer_on_fewer_sms(simulation: Simulation) -> None:
    """And is expected to: each partition's times are its own."""
    few = Partition(48, 84)
    leads_s: list[float] = []
    for _ in range(40):
        leads_s += simulation.run(FORWARD, 1.2e-3, 1) + simulation.run(FORWARD, 2.4e-3, 2, few)
    assert all(0.0 < lead_s < 300e-6 for lead_s in leads_s[12:]), leads_s
    reported = simulation.queue.take_finished()
    assert {tasklet.elapsed_ms > 2 for tasklet in reported if tasklet.partition == few} == {True}
    assert {tasklet.elapsed_ms < 2 for tasklet in reported if tasklet.partition is None} == {True}


def test_it_is_known_when_those_on_all_sms_end(simulation: Simulation) -> None:
    """By the device's clock, for whoever waits for them, and about when that is."""
    simulation.run(FORWARD, 2e-3, 20, Partition(48, 84))
    simulation.run(FORWARD, 1e-3, 20)
    simulation.now_s = simulation.busy_until_s
    assert simulation.queue.end_on_all_sms() is None
    assert simulation.queue.left_on_all_sms_ms() == 0.0
    for _ in range(3):
        simulation.launch(FORWARD, 1e-3)
    simulation.now_s += 0.4e-3
    end, ends_s = simulation.queue.end_on_all_sms(), simulation.busy_until_s
    assert end is not None
    assert simulation.queue.left_on_all_sms_ms() == pytest.approx((ends_s - simulation.now_s) * 1e3, abs=0.1)
    simulation.launch(FORWARD, 2e-3, partition=Partition(48, 84))
    assert simulation.queue.end_on_all_sms() is None, "a batch on the others waits for no part of that"
    left_ms = (ends_s - simulation.now_s) * 1e3
    assert simulation.queue.left_on_all_sms_ms() == pytest.approx(left_ms, abs=0.1), "but for those before"
    simulation.now_s = ends_s + 1e-6
    assert simulation.queue.left_on_all_sms_ms() == 0.0
    simulation.run(FORWARD, 1e-3, 20)
    assert end.at_s == ends_s, "it is used for nothing else"  # type: ignore[attr-defined]


def test_a_launch_that_compiles_teaches_nothing(simulation: Simulation) -> None:
    """Neither the next launch waits for as long as that took, nor is it reported as the device's time."""
    simulation.launch(FORWARD, 0.5e-3, host_s=0.4)
    simulation.run(FORWARD, 0.5e-3, 30)
    assert simulation.now_s < 0.4 + 30 * 2e-3
    reported = simulation.queue.take_finished()
    assert len(reported) >= 28
    assert max(tasklet.elapsed_ms for tasklet in reported) < 1.0


def test_a_short_tasklet_among_long_ones_does_not_hurry_them(simulation: Simulation) -> None:
    """Layer 0's backward has less to do than the others of its shape."""
    leads_s: list[float] = []
    for _ in range(6):
        leads_s += simulation.run(BACKWARD, 0.72e-3, 31) + simulation.run(BACKWARD, 0.55e-3, 1)
    assert max(leads_s[32:]) < 350e-6


def test_a_disturbed_measurement_is_not_waited_for(simulation: Simulation) -> None:
    """A shape that once took 300 ms, for others were at work, takes one."""
    simulation.run(FORWARD, 300e-3, 2)
    simulation.queue.wait_for_room()
    simulation.now_s = max(simulation.now_s, simulation.busy_until_s)
    start_s = simulation.now_s
    simulation.run(FORWARD, 1e-3, 30)
    assert simulation.now_s - start_s < 0.3


@pytest.mark.parametrize("is_busy", [False, True])
def test_behind_a_batch_the_next_launches_are_as_well_timed(simulation: Simulation, is_busy: bool) -> None:
    """However late the host comes back to it, and whether or not a tasklet was still in flight before the batch."""
    simulation.run(FORWARD, 1.2e-3, 20)
    if not is_busy:
        simulation.now_s = simulation.busy_until_s + 1e-3
        simulation.queue.collect()
    for _ in range(5):
        batch = SimpleNamespace(busy_until_s=max(simulation.now_s, simulation.busy_until_s) + 6e-3)
        simulation.launch(FORWARD, 1.2e-3, behind=batch)
        assert simulation.busy_until_s == pytest.approx(batch.busy_until_s + 1.2e-3)
        simulation.now_s = batch.busy_until_s + 0.4e-3  # tokens are read and sent
        leads_s = simulation.run(FORWARD, 1.2e-3, 6)
        assert all(0.0 < lead_s < 250e-6 for lead_s in leads_s), leads_s
    reported = simulation.queue.take_finished()
    assert max(tasklet.elapsed_ms for tasklet in reported) < 1.3, "to wait for a batch is no part of a tasklet's time"


def test_no_tasklet_takes_no_time(simulation: Simulation) -> None:
    """The first one waits for a copy, and the host comes back long after both: it seems to have been late for all."""
    simulation.run(FORWARD, 1.2e-3, 10)
    simulation.queue.wait_for_room()
    simulation.now_s += 0.1
    simulation.queue.take_finished()
    simulation.busy_until_s = simulation.now_s + 3e-3
    simulation.launch(FORWARD, 1.2e-3, waits_for_others=True)
    simulation.now_s = simulation.busy_until_s + 0.5e-3
    simulation.launch(BACKWARD, 0.9e-3)
    simulation.now_s += 1.0
    found = simulation.queue.take_finished()
    assert found
    assert all(each.elapsed_ms > 0 for each in found)


def test_a_tasklet_part_of_which_is_tried_tells_nothing_of_the_next_one(simulation: Simulation) -> None:
    simulation.run(FORWARD, 1.2e-3, 20)
    for _ in range(5):
        simulation.queue.wait_for_room()
        simulation.launch(FORWARD, 3e-3, is_trial=True)
    leads_s = simulation.run(FORWARD, 1.2e-3, 20)
    simulation.queue.wait_for_room()
    times_ms = [each.elapsed_ms for each in simulation.queue.take_finished()]
    assert len(times_ms) == 39, "one is in flight"
    assert max(times_ms) < 1.3
    assert all(0.0 < lead_s < 300e-6 for lead_s in leads_s[2:]), leads_s
    assert simulation.queue.num_launched == 45
