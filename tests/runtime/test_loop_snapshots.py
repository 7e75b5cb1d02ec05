"""What the loop tells policies: of answers, prompts, tokens and time."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest

from clocks import SteppedTime
from cotenant.core.request import FinishReason
from cotenant.device.cpu.device import CpuDevice
from cotenant.runtime import loop as loop_module
from cotenant.scheduler.answers import AnswerLengths
from cotenant.wire.messages import AbortRequests, AddRequest, FromWorker, Outputs, ToWorker
from runtime import cotenancy
from runtime.cotenancy import request
from runtime.driven_loop import AheadDevice, Channel, Watching, small_loop
from runtime.noted_margins import noted_margins

pytestmark = pytest.mark.usefixtures("loop_clock")


def test_a_policy_is_told_how_short_answers_get(tmp_path: Path) -> None:
    requests = [request(f"r{index}", [5 + index, 6], 40) for index in range(40)]
    loop, policy = small_loop(tmp_path, Channel(*map(AddRequest, requests)), Watching())
    loop.run()
    assert {snapshot.least_answer for snapshot in policy.seen} == {0, 40}


def test_one_that_is_given_up_before_it_has_a_token_tells_nothing_of_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[tuple[int, FinishReason]] = []
    monkeypatch.setattr(AnswerLengths, "ended", lambda self, *answer: ended.append(answer))
    loop, _ = small_loop(tmp_path, Channel(AddRequest(request("r", [5, 6], 9)), AbortRequests(("r",))), "multitask")
    loop.run()
    assert ended == []


def test_how_long_answers_are_is_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that its client gave up says that an answer may end there."""
    ended: list[tuple[int, FinishReason]] = []
    monkeypatch.setattr(AnswerLengths, "ended", lambda self, *answer: ended.append(answer))

    class GivenUp(Channel):
        def receive(self) -> list[ToWorker]:
            messages = super().receive()
            has_begun = any(isinstance(sent, Outputs) for sent in self.sent)
            return [*messages, AbortRequests(("abandoned",))] if has_begun else messages

    requests = [request("a", [5, 6, 7], 3), request("b", [7, 6], 9), request("abandoned", [5, 6, 7], 40)]
    loop, _ = small_loop(tmp_path, GivenUp(*map(AddRequest, requests)), "multitask")
    loop.run()
    given_up = [num_tokens for num_tokens, reason in ended if reason is FinishReason.ABORT]
    assert len(given_up) == 1
    assert 0 < given_up[0] < 40
    assert sorted(each for each in ended if each[1] is not FinishReason.ABORT) == [
        (3, FinishReason.LENGTH), (9, FinishReason.LENGTH),
    ]  # fmt: skip


def test_a_policy_is_told_which_prompts_have_begun_and_how_many_end_with_the_batch(tmp_path: Path) -> None:
    channel = Channel(
        AddRequest(request("long", [5 + place % 90 for place in range(100)], 2)),
        AddRequest(request("short", [7, 6, 5], 2)),
    )
    loop, policy = small_loop(tmp_path, channel, Watching())
    loop.run()
    with_prompts = [(each.batch.prefill_tokens, each.num_ending) for each in policy.seen if each.batch.prefill_tokens]
    assert with_prompts == [(64, 0), (39, 2)], "64 tokens in a batch"
    begun = [{each.request_id for each in snapshot.requests if each.has_begun} for snapshot in policy.seen[:3]]
    assert begun == [set(), {"long"}, {"long", "short"}]
    assert all(each.num_ending == 0 for each in policy.seen if not each.batch.prefill_tokens)


@pytest.mark.parametrize("left_ms", [0.0, 2.5])
def test_a_policy_is_told_how_long_tasklets_in_flight_take(
    left_ms: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a batch waits for; the one in flight was launched with none before it."""
    monkeypatch.setattr(CpuDevice, "tasklets_left_ms", lambda self: left_ms)
    channel = Channel(AddRequest(request("r", [5, 6, 7], 5)))
    loop, policy = small_loop(tmp_path, channel, Watching(), device=AheadDevice())
    loop.run()
    assert {each.in_flight is None for each in policy.seen} == {False, True}
    assert {each.wait_ms for each in policy.seen if each.in_flight is None} == {left_ms}
    assert not any(each.wait_ms for each in policy.seen if each.in_flight is not None)


def test_idle_time_begins_when_the_last_answer_has_ended(tmp_path: Path, loop_clock: SteppedTime) -> None:
    class Slow(Channel):
        def send(self, message: FromWorker) -> None:
            super().send(message)
            if isinstance(message, Outputs):
                loop_clock.sleep(0.3)

    loop, policy = small_loop(tmp_path, Slow(AddRequest(request("r", [5, 6, 7], 2))), Watching())
    loop.run()
    idle_s = [each.idle_s for each in policy.seen]
    assert idle_s[:2] == [0.0, 0.0], "live"
    assert 0.0 <= idle_s[2] < 0.3


@pytest.mark.parametrize("by_s", [-3600.0, 3600.0])
def test_a_clock_that_is_set_makes_nobody_late_or_early(
    by_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (loop_module, cotenancy):
        monkeypatch.setattr(module, "time", time)  # the machine's
    clock = time.time

    class Set(Channel):
        def send(self, message: FromWorker) -> None:
            super().send(message)
            if isinstance(message, Outputs):
                monkeypatch.setattr(time, "time", lambda: clock() + by_s)

    loop, policy = small_loop(tmp_path, Set(AddRequest(request("r", [5, 6, 7], 3))), Watching())
    loop.run()
    assert policy.seen[-1].idle_s > 0.0, "nobody asks any more"
    assert all(each.idle_s >= 0.0 for each in policy.seen)
    live_s = [each.now_s - view.arrival_s for each in policy.seen for view in each.requests]
    assert len(live_s) >= 3
    assert all(0.0 <= each_s < 600.0 for each_s in live_s)


def test_a_policy_is_told_what_prompts_take_off_what_was_learned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    margins = noted_margins(monkeypatch)
    loop, policy = small_loop(tmp_path, Channel(AddRequest(request("r", [5, 6, 7], 24))), Watching())
    (margin,) = margins
    monkeypatch.setattr(margin, "aim", lambda now_s: margin.value - 0.25)
    loop.run()
    seen = [snapshot for snapshot in policy.seen if snapshot.requests]
    assert seen
    assert all(snapshot.taken_off == pytest.approx(0.25) for snapshot in seen)
    assert all(snapshot.margin + snapshot.taken_off <= 0.98 for snapshot in seen)


def test_a_policy_is_told_when_tokens_went_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loop_clock: SteppedTime
) -> None:
    margins = noted_margins(monkeypatch)
    loop, policy = small_loop(tmp_path, Channel(AddRequest(request("r", [5, 6, 7], 24))), Watching())
    (margin,) = margins
    loop.run()
    seen = [snapshot for snapshot in policy.seen if snapshot.requests]
    assert seen[0].since_tokens_ms == math.inf
    ended_s = margin.tokens["r"][-2]
    assert 0.0 < seen[-1].since_tokens_ms < (loop_clock.now_s - ended_s) * 1e3
