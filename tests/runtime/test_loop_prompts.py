"""Which prompts the loop takes into a batch, and how much of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clocks import SteppedTime
from cotenant.core.plan import BatchShape, InFlight, IterationRecord, Mode, causal_pairs
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import prompts
from cotenant.runtime.executor import Executor
from cotenant.scheduler.chunking import prompt_budget
from cotenant.scheduler.turns import Turns, take_turns
from cotenant.wire.messages import AddRequest, Outputs
from runtime.cotenancy import request
from runtime.driven_loop import AheadDevice, Channel, small_loop

pytestmark = pytest.mark.usefixtures("loop_clock")


def taught(token_ms: float) -> LatencyPredictor:
    """What it costs a token of a prompt."""
    predictor = LatencyPredictor("test", "test")
    for count in (10, 20, 40, 60):
        for _ in range(8):
            batch = BatchShape(0, 0, count, count, 0, causal_pairs(count))
            predictor.observe(IterationRecord(batch, Mode.NONE, token_ms * count, token_ms * count))
    return predictor


def test_chunks_and_turns_go_by_what_the_batch_in_flight_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    aheads: list[InFlight | None] = []
    begins_ms: list[float] = []
    seats: list[int] = []

    def noted(*args: Any, **named: Any) -> int:
        aheads.append(named["ahead"])
        return prompt_budget(*args, **named)

    def turns(*args: Any) -> Turns:
        begins_ms.append(args[-2])
        seats.append(args[-1])
        return take_turns(*args)

    monkeypatch.setattr(Executor, "wait_ms", 7.0)
    monkeypatch.setattr(Executor, "begins_after_ms", 11.0)
    monkeypatch.setattr(prompts, "prompt_budget", noted)
    monkeypatch.setattr(prompts, "take_turns", turns)
    requests = [AddRequest(request(f"r{index}", list(range(5, 45 + index)), 6)) for index in range(12)]
    loop, _ = small_loop(
        tmp_path, Channel(*requests), "inference-only", AheadDevice(), sizes_chunks=True, predictor=taught(1.0)
    )
    loop.run()
    assert aheads[0] is None
    in_flight = [ahead for ahead in aheads if ahead is not None]
    assert in_flight
    assert all(ahead.batch.num_decode or ahead.batch.prefill_tokens for ahead in in_flight)
    waits_ms = [time_ms for time_ms, ahead in zip(begins_ms, aheads, strict=True) if ahead is not None]
    assert max(waits_ms) > 30.0, "the next batch begins when that has ended, which takes about 60 ms"
    assert min(waits_ms) >= 7.0, "and tasklets"
    assert begins_ms[0] == 11.0
    assert (seats[0], min(seats)) == (8, 0), "of those that are free, 12 having come"


@pytest.mark.parametrize("sizes_chunks", [False, True])
def test_a_prompt_that_would_make_others_late_comes_behind_them(sizes_chunks: bool, tmp_path: Path) -> None:
    """At 20 ms a token the 60 are late in any case, and the 30 that came later need not be, of 1 s each."""
    lengths, channel = {"long": 60, "short": 20, "shorter": 10}, Channel()
    loop, _ = small_loop(tmp_path, channel, "inference-only", sizes_chunks=sizes_chunks, predictor=taught(20.0))
    channel.inbox += [AddRequest(request(name, [5] * length, 2)) for name, length in lengths.items()]
    loop.run()
    first = next(message for message in channel.sent if isinstance(message, Outputs))
    assert {output.request_id for output in first.outputs} == {"short", "shorter"}


@pytest.mark.parametrize("sizes_chunks", [False, True])
def test_a_batch_ends_in_time_for_the_first_of_its_prompts(
    sizes_chunks: bool, tmp_path: Path, loop_clock: SteppedTime
) -> None:
    """At 20 ms a token it has time for 22 of the 40, half of its target of 1 s being over."""
    channel = Channel()
    loop, _ = small_loop(tmp_path, channel, "inference-only", sizes_chunks=sizes_chunks, predictor=taught(20.0))
    soon = replace(request("soon", [5] * 10, 2), arrival_s=loop_clock.now_s - 0.5)
    channel.inbox += [AddRequest(soon), AddRequest(request("other", [6] * 30, 2))]
    loop.run()
    first = next(message for message in channel.sent if isinstance(message, Outputs))
    assert [output.request_id for output in first.outputs] == ["soon"]
