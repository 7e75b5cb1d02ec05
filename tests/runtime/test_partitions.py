"""Batches and tasklets side by side: what a plan with a partition runs where."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from cotenant.core.plan import Mode, Plan
from cotenant.core.tasklet import TaskletShape
from runtime.cotenancy import request
from runtime.executor_bench import Bench
from runtime.side_by_side import FEW, MANY, NUM_TOKENS, SideBySide, count, spatial


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


def test_training_goes_on_where_each_batch_has_other_sms_than_the_one_before(side_by_side: SideBySide) -> None:
    """Its optimizer waits for tokens to be on their way."""
    plans = itertools.cycle([Plan(), spatial(4)])
    while side_by_side.engine.has_work:
        side_by_side.land_after(100)  # type: ignore[attr-defined]
        side_by_side.execute(next(plans))
    assert side_by_side.training.trained_tokens > 0


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
