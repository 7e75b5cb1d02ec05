"""What the loop tells its margin of requests, prompts and decode steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clocks import SteppedTime
from cotenant.wire.messages import AddRequest
from runtime.cotenancy import request
from runtime.driven_loop import AheadDevice, Channel, small_loop
from runtime.noted_margins import noted_margins

pytestmark = pytest.mark.usefixtures("loop_clock")


def test_the_margin_hears_when_requests_came_and_were_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop_clock: SteppedTime
) -> None:
    """On one clock. Who came before the worker did has waited for the worker, which is no matter of training."""
    margins = noted_margins(monkeypatch)
    early, late = request("early", [5, 6, 7], 3), request("late", [7, 6, 5], 2)
    began_s = loop_clock.now_s
    channel = Channel(AddRequest(replace(early, arrival_s=began_s - 1000.0)))
    loop, _ = small_loop(tmp_path, channel, "multitask")
    loop_clock.sleep(0.2)
    sent_s = loop_clock.now_s
    channel.inbox.append(AddRequest(replace(late, arrival_s=sent_s - 0.1)))
    loop.run()
    (margin,) = margins
    assert set(margin.arrivals) == {"early", "late"}
    assert began_s <= margin.arrivals["early"] <= sent_s - 0.1
    assert margin.arrivals["late"] == sent_s - 0.1
    assert {name: len(times) for name, times in margin.tokens.items()} == {"early": 3, "late": 2}
    assert all(margin.arrivals[name] < min(times) for name, times in margin.tokens.items())


@pytest.mark.parametrize("sizes_chunks", [False, True])
def test_the_margin_hears_what_prompts_take_where_chunks_are_sized(
    sizes_chunks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each batch with prompts once."""
    margins = noted_margins(monkeypatch)
    channel = Channel(AddRequest(request("first", [5, 6, 7], 40)))
    loop, _ = small_loop(tmp_path, channel, "inference-only", sizes_chunks=sizes_chunks)
    for index in range(6):
        loop.iterate()
        channel.inbox.append(AddRequest(request(f"r{index}", [5 + index] * 20, 2)))
    loop.run()
    (margin,) = margins
    assert len(margin.prompts_ms) == (7 if sizes_chunks else 0)


def test_the_margin_hears_how_long_the_steps_are_that_prompts_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    margins = noted_margins(monkeypatch)
    channel = Channel(AddRequest(request("first", [5, 6, 7], 40)))
    loop, _ = small_loop(tmp_path, channel, "inference-only", sizes_chunks=True)
    for _ in range(20):
        loop.iterate()
    channel.inbox.append(AddRequest(request("second", [5] * 20, 2)))
    loop.run()
    (margin,) = margins
    assert margin.steps_ms
    assert all(step_ms > 0 for step_ms in margin.steps_ms)


def test_the_margin_begins_by_what_a_decode_step_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last token of a request that was alone comes when nothing decodes any more."""
    margins = noted_margins(monkeypatch)
    channel = Channel(AddRequest(request("r", [5, 6, 7], 24)))
    loop, _ = small_loop(tmp_path, channel, "adaptive", AheadDevice())
    loop.run()
    (margin,) = margins
    unknown, *known = margin.begins
    assert unknown == 0.8
    assert len(known) > 10
    assert all(0.8 < value <= 0.95 for value in known), known
    assert margin.value > known[-1]
    assert margin.has_learned
