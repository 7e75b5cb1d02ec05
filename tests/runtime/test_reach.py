"""A TPOT target that no decode step meets."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.core.plan import BatchShape, IterationRecord, Mode, Slo
from cotenant.runtime import reach
from cotenant.runtime.reach import TargetReach
from cotenant.wire.messages import AddRequest
from runtime.cotenancy import request
from runtime.driven_loop import Channel, small_loop

STEP = IterationRecord(BatchShape(4, 400), Mode.NONE, 12.5, 12.5)
OTHERS = {
    "shared": replace(STEP, mode=Mode.TEMPORAL),
    "disturbed": replace(STEP, is_disturbed=True),
    "prompts": replace(STEP, batch=BatchShape(4, 400, 30, 30)),
    "idle": replace(STEP, batch=BatchShape()),
}


def test_it_is_told_once_when_steps_alone_are_longer_and_go_on_being(caplog: pytest.LogCaptureFixture) -> None:
    watch = TargetReach(Slo(500.0, 10.0))
    for turn in range(199):
        watch.note(STEP)
        watch.note(list(OTHERS.values())[turn % 4])
    assert caplog.records == []
    watch.note(STEP)
    (told,) = caplog.messages
    assert "the TPOT target is 10 ms" in told
    assert "12.5 ms for 4 requests" in told
    assert "`serve`: --max-num-seqs; `bench colocate`: --batch-sizes, --time-scale" in told
    for _ in range(1000):
        watch.note(STEP)
    assert len(caplog.records) == 1


def test_a_step_in_time_begins_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    watch = TargetReach(Slo(500.0, 10.0))
    for turn in range(5000):
        watch.note(STEP if turn % 199 else replace(STEP, online_ms=9.9))
    for record in OTHERS.values():
        for _ in range(1000):
            watch.note(record)
    assert caplog.records == []


def test_the_loop_watches_what_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reach, "_STEPS", 3)
    channel = Channel(AddRequest(request("a", [5, 6, 7], 12)))
    loop, _ = small_loop(tmp_path, channel, "adaptive", slo=Slo(1000.0, 1e-6))
    with caplog.at_level(logging.WARNING):
        loop.run()
    assert sum("the TPOT target is 1e-06 ms" in message for message in caplog.messages) == 1
