"""Where a device's time goes: the shares of what ran on it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotenant.bench.device_losses import losses
from cotenant.core.plan import BatchShape, Partition
from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device.base import FinishedTasklet
from cotenant.runtime.device_time import DeviceTime

FORWARD, BACKWARD = TaskletShape(TaskletKind.FORWARD, 64), TaskletShape(TaskletKind.BACKWARD, 64)
THERE = Partition(48, 84)
DECODE, PROMPT = BatchShape(2, 80), BatchShape(2, 80, 30, 1)


def tasklet(shape: TaskletShape, elapsed_ms: float, partition: Partition | None = None) -> FinishedTasklet:
    return FinishedTasklet(shape, elapsed_ms, 0.0, partition)


def test_what_ran_is_told_apart_and_the_rest_is_nobodys() -> None:
    time = DeviceTime()
    time.batch(PROMPT, 100.0, shared=False)
    time.batch(PROMPT, 20.0, shared=True)
    time.batch(DECODE, 50.0, shared=False)
    time.batch(DECODE, 30.0, shared=True)
    time.ended([tasklet(FORWARD, 100.0), tasklet(FORWARD, 200.0)], beside=False)
    time.ended([tasklet(BACKWARD, 400.0), tasklet(FORWARD, 60.0, THERE)], beside=True)  # the batch's time, but behind
    assert time.tasklets_ms(1.4) == {FORWARD: 300.0, BACKWARD: 800.0}, "twice what the device was at work"
    assert time.figures(1.0, {FORWARD: 120.0}) == {
        "prompts_alone": 0.1,
        "prompts_shared": 0.02,
        "decode_alone": 0.05,
        "decode_shared": 0.03,
        "training_alone": 0.7,
        "rest": 0.1,
        "training_work": 0.64,  # what was never seen without requests counts as it is
        "decode_steps_per_s": 2.0,
        "decode_step_ms": 40.0,
    }


def test_training_on_a_part_of_the_device_is_its_own_time_where_there_is_no_batch() -> None:
    """As a policy does that keeps its partition."""
    time = DeviceTime()
    time.ended([tasklet(FORWARD, 600.0, THERE)], beside=False)
    figures = time.figures(1.0, {FORWARD: 400.0})
    assert (figures["training_alone"], figures["training_work"], figures["rest"]) == (0.6, 0.4, 0.4)
    lost = losses({"device_time": figures, "harvest": 0.4})
    assert lost == pytest.approx(
        {"prompts": 0.0, "decode alone": 0.0, "while shared": 0.0, "slower": 0.2, "rest": 0.4}, abs=1e-9
    )


def test_a_device_on_which_nothing_ran_rested() -> None:
    figures = DeviceTime().figures(2.0, {})
    assert figures["rest"] == 1.0
    assert sum(figures.values()) == 1.0


milliseconds = st.floats(0.01, 100.0)


@given(
    st.lists(st.tuples(milliseconds, st.booleans(), st.booleans())),
    st.lists(st.tuples(milliseconds, st.sampled_from([FORWARD, BACKWARD]), st.sampled_from([None, THERE])), min_size=1),
    st.floats(0.01, 1.0),
)
def test_harvest_and_what_it_lost_are_the_whole(
    batches: list[tuple[float, bool, bool]],
    tasklets: list[tuple[float, TaskletShape, Partition | None]],
    harvest: float,
) -> None:
    time = DeviceTime()
    for taken_ms, has_prompt, shared in batches:
        time.batch(PROMPT if has_prompt else DECODE, taken_ms, shared=shared)
    time.ended([tasklet(shape, taken_ms, there) for taken_ms, shape, there in tasklets], beside=True)
    figures = time.figures(20.0, {FORWARD: 10.0, BACKWARD: 20.0})
    for kind, has_prompt in (("prompts", True), ("decode", False)):
        for way, shared in (("alone", False), ("shared", True)):
            taken_ms = sum(each_ms for each_ms, *which in batches if which == [has_prompt, shared])
            assert figures[f"{kind}_{way}"] == pytest.approx(taken_ms / 20e3, abs=1e-4)
    on_all = [(each_ms, shape) for each_ms, shape, there in tasklets if there is None]
    assert figures["training_alone"] == pytest.approx(sum(each_ms for each_ms, _ in on_all) / 20e3, abs=1e-4)
    work_ms = sum(10.0 if shape == FORWARD else 20.0 for _, shape in on_all)
    assert figures["training_work"] == pytest.approx(work_ms / 20e3, abs=1e-4)
    busy_ms = sum(each_ms for each_ms, *_ in batches) + sum(each_ms for each_ms, _ in on_all)
    assert figures["rest"] == pytest.approx(1 - busy_ms / 20e3, abs=1e-4)
    lost = losses({"device_time": figures, "harvest": harvest})
    assert lost is not None
    assert harvest + sum(lost.values()) == pytest.approx(1.0, abs=1e-3)
