"""The loop waits when there is nothing to run, and answers what it was asked before it ends."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

from clocks import SteppedTime
from cotenant.config import POLICIES, BatchConfig, LoraConfig
from cotenant.core.plan import (
    BatchShape,
    InFlight,
    IterationRecord,
    Mode,
    Plan,
    Slo,
    Snapshot,
    causal_pairs,
)
from cotenant.core.request import FinishReason
from cotenant.device import create_device
from cotenant.device.cpu.device import CpuDevice
from cotenant.engine.engine import OnlineEngine
from cotenant.models.tensors_in_memory import read_tensors
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import loop as loop_module
from cotenant.runtime import prompts
from cotenant.runtime.executor import Executor
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import Policy, create_policy
from cotenant.scheduler.answers import AnswerLengths
from cotenant.scheduler.chunking import prompt_budget
from cotenant.scheduler.margin import Margin
from cotenant.scheduler.turns import Turns, take_turns
from cotenant.wire.messages import (
    AbortRequests,
    AddRequest,
    CancelJob,
    Drain,
    Drained,
    FromWorker,
    JobCancelled,
    JobFailed,
    JobMetrics,
    JobPaused,
    JobStarted,
    JobSucceeded,
    Outputs,
    PauseJob,
    StartJob,
    ToWorker,
)
from finetune import support
from finetune.conftest import save_llama
from finetune.slow_disk import SlowDisk
from runtime import cotenancy
from runtime.cotenancy import request


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SteppedTime:
    """The loop's and the requests': what a batch, a message or a pause of the machine takes is nothing."""
    return SteppedTime(monkeypatch, loop_module, cotenancy)


A_MOMENT_S = 1e-3  # of the real time, in which threads write files while the loop waits


class Channel:
    """Holds what the API process sends; when the loop waits for more, it is drained."""

    def __init__(self, *messages: ToWorker) -> None:
        self.inbox = list(messages)
        self.sent: list[FromWorker] = []
        self.num_looks_before_wait = 0

    def send(self, message: FromWorker) -> None:
        self.sent.append(message)

    def receive(self) -> list[ToWorker]:
        messages, self.inbox = self.inbox, []
        self.num_looks_before_wait += 1
        assert self.num_looks_before_wait < 1000, "the loop never waits"
        return messages

    def pending(self) -> bool:
        return bool(self.inbox)

    def wait(self, timeout_s: float) -> bool:
        self.num_looks_before_wait = 0
        time.sleep(A_MOMENT_S)
        if timeout_s < 0.05:  # for something else than messages
            loop_module.time.sleep(timeout_s)  # type: ignore[attr-defined]
            return False
        self.inbox.append(Drain())
        return True


@pytest.mark.parametrize("policy", POLICIES)
def test_the_loop_waits_once_there_is_nothing_to_run(policy: str, tmp_path: Path) -> None:
    save_llama(tmp_path / "model")
    decoder, device = support.load(tmp_path / "model"), create_device("cpu")
    channel = Channel(StartJob(support.make_spec(tmp_path / "job")), AddRequest(request("r", [5, 6, 7], 3)))
    engine = OnlineEngine(decoder, 64, 4, BatchConfig(8, 64), 128, LoraConfig(), ())
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, channel.send)
    predictor = LatencyPredictor("test", "test")
    executor = Executor(device, decoder, engine, training)
    loop = WorkerLoop(
        channel,
        engine,
        training,
        create_policy(policy, predictor),
        executor,
        predictor,
        Slo(1000.0, 100.0),
        can_fuse=False,
    )
    loop.run()
    outputs = [output for message in channel.sent if isinstance(message, Outputs) for output in message.outputs]
    assert sum(len(output.token_ids) for output in outputs) == 3
    paused = any(isinstance(message, JobPaused) for message in channel.sent)
    if policy != "lifecycle":  # it waits before it trains again, for a time that depends on the gaps
        assert paused == (policy == "inference-only"), "only there is the job still to do"
    assert isinstance(channel.sent[-1], Drained)


class Noted(Margin):
    """A margin that keeps what it is told."""

    def __init__(self, slo: Slo) -> None:
        super().__init__(slo)
        self.begins: list[float] = []
        self.arrivals: dict[str, float] = {}
        self.tokens: dict[str, list[float]] = {}
        self.prompts_ms: list[float] = []
        self.steps_ms: list[float] = []

    def expect_prompts(self, most: float, now_s: float, step_ms: float) -> None:
        self.steps_ms.append(step_ms)
        super().expect_prompts(most, now_s, step_ms)

    def begin_at(self, value: float) -> None:
        self.begins.append(value)
        super().begin_at(value)

    def arrived(self, request_id: str, at_s: float) -> None:
        self.arrivals[request_id] = at_s
        super().arrived(request_id, at_s)

    def prompts_took(self, time_ms: float, now_s: float) -> None:
        self.prompts_ms.append(time_ms)
        super().prompts_took(time_ms, now_s)

    def note(self, request_id: str, num_new: int, now_s: float, is_over: bool) -> int:
        self.tokens.setdefault(request_id, []).extend([now_s] * num_new)
        return super().note(request_id, num_new, now_s, is_over)


def noted_margins(monkeypatch: pytest.MonkeyPatch) -> list[Noted]:
    """Of the loops that are made from now on."""
    margins: list[Noted] = []

    def create(slo: Slo) -> Noted:
        margins.append(Noted(slo))
        return margins[-1]

    monkeypatch.setattr(loop_module, "Margin", create)
    return margins


def test_the_margin_hears_when_requests_came_and_were_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SteppedTime
) -> None:
    """On one clock. Who came before the worker did has waited for the worker, which is no matter of training."""
    margins = noted_margins(monkeypatch)
    early, late = request("early", [5, 6, 7], 3), request("late", [7, 6, 5], 2)
    began_s = clock.now_s
    channel = Channel(AddRequest(replace(early, arrival_s=began_s - 1000.0)))
    loop, _ = small_loop(tmp_path, channel, "multitask")
    clock.sleep(0.2)
    sent_s = clock.now_s
    channel.inbox.append(AddRequest(replace(late, arrival_s=sent_s - 0.1)))
    loop.run()
    (margin,) = margins
    assert set(margin.arrivals) == {"early", "late"}
    assert began_s <= margin.arrivals["early"] <= sent_s - 0.1
    assert margin.arrivals["late"] == sent_s - 0.1
    assert {name: len(times) for name, times in margin.tokens.items()} == {"early": 3, "late": 2}
    assert all(margin.arrivals[name] < min(times) for name, times in margin.tokens.items())


class Watching(Policy):
    """Serves, and keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def plan(self, snapshot: Snapshot) -> Plan:
        self.seen.append(snapshot)
        return Plan(run_online=not snapshot.batch.empty)


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


def test_idle_time_begins_when_the_last_answer_has_ended(tmp_path: Path, clock: SteppedTime) -> None:
    class Slow(Channel):
        def send(self, message: FromWorker) -> None:
            super().send(message)
            if isinstance(message, Outputs):
                clock.sleep(0.3)

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


Chosen = TypeVar("Chosen")


def small_loop(
    folder: Path,
    channel: Channel,
    policy: Chosen,
    device: CpuDevice | None = None,
    *,
    sizes_chunks: bool = False,
    with_job: bool = False,
    predictor: LatencyPredictor | None = None,
    slo: Slo | None = None,
    **more: Any,
) -> tuple[WorkerLoop, Chosen]:
    """``policy``: or its name. ``with_job``: one is ready to train. ``more``: for the loop."""
    save_llama(folder / "model")
    decoder, device = support.load(folder / "model"), device or CpuDevice()
    batch, clock = BatchConfig(8, 64), loop_module.time.monotonic  # type: ignore[attr-defined]
    engine = OnlineEngine(decoder, 64, 4, batch, 128, LoraConfig(), (), clock=clock)
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, channel.send)
    if with_job:
        training.start(support.make_spec(folder / "job"))
    predictor = predictor or LatencyPredictor("test", "test")
    chosen = create_policy(policy, predictor) if isinstance(policy, str) else policy
    executor = Executor(device, decoder, engine, training)
    loop = WorkerLoop(
        channel,
        engine,
        training,
        chosen,
        executor,
        predictor,
        slo or Slo(1000.0, 100.0),
        can_fuse=False,
        sizes_chunks=sizes_chunks,  # type: ignore[arg-type]
        **more,
    )
    return loop, policy


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: SteppedTime
) -> None:
    margins = noted_margins(monkeypatch)
    loop, policy = small_loop(tmp_path, Channel(AddRequest(request("r", [5, 6, 7], 24))), Watching())
    (margin,) = margins
    loop.run()
    seen = [snapshot for snapshot in policy.seen if snapshot.requests]
    assert seen[0].since_tokens_ms == math.inf
    ended_s = margin.tokens["r"][-2]
    assert 0.0 < seen[-1].since_tokens_ms < (clock.now_s - ended_s) * 1e3


class AheadDevice(CpuDevice):
    """A CPU whose batches are launched a step ahead, as on a device that runs behind the host."""

    overlaps = True


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tpot_ms", [0.001, 1000.0])
def test_all_is_answered_when_the_host_runs_ahead(policy: str, tpot_ms: float, tmp_path: Path) -> None:
    """Whatever room prompts are given beside the decodes: with targets that cannot be met it is the least there is."""
    save_llama(tmp_path / "model")
    prompts = {
        f"r{index}": [5 + (index + 3 * place) % 90 for place in range(4 + 11 * (index % 7))] for index in range(24)
    }
    channel = Channel(
        *(AddRequest(request(name, prompt, 2 + len(prompt) % 9)) for name, prompt in prompts.items()),
    )
    engine = OnlineEngine(support.load(tmp_path / "model"), 96, 4, BatchConfig(12, 96), 128, LoraConfig(), ())
    device, decoder = AheadDevice(), support.load(tmp_path / "model")
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, channel.send)
    training.start(support.make_spec(tmp_path / "job"))
    predictor = LatencyPredictor("test", "test")
    loop = WorkerLoop(
        channel,
        engine,
        training,
        create_policy(policy, predictor),
        Executor(device, decoder, engine, training),
        predictor,
        Slo(1000.0, tpot_ms),
        can_fuse=False,
        sizes_chunks=True,
    )
    loop.run()
    tokens: dict[str, int] = dict.fromkeys(prompts, 0)
    ended: list[str] = []
    for message in channel.sent:
        for output in message.outputs if isinstance(message, Outputs) else ():
            tokens[output.request_id] += len(output.token_ids)
            ended += [output.request_id] if output.finish_reason is not None else []
    assert tokens == {name: 2 + len(prompt) % 9 for name, prompt in prompts.items()}
    assert sorted(ended) == sorted(prompts)
    assert isinstance(channel.sent[-1], Drained)
    assert engine.kv_cache_usage == 0


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
    sizes_chunks: bool, tmp_path: Path, clock: SteppedTime
) -> None:
    """At 20 ms a token it has time for 22 of the 40, half of its target of 1 s being over."""
    channel = Channel()
    loop, _ = small_loop(tmp_path, channel, "inference-only", sizes_chunks=sizes_chunks, predictor=taught(20.0))
    soon = replace(request("soon", [5] * 10, 2), arrival_s=clock.now_s - 0.5)
    channel.inbox += [AddRequest(soon), AddRequest(request("other", [6] * 30, 2))]
    loop.run()
    first = next(message for message in channel.sent if isinstance(message, Outputs))
    assert [output.request_id for output in first.outputs] == ["soon"]


class Behind(Policy):
    """Every other batch has two tasklets behind it."""

    def __init__(self, hold_ms: float = 0.0) -> None:
        self.num_plans = 0
        self._hold_ms = hold_ms

    def plan(self, snapshot: Snapshot) -> Plan:
        self.num_plans += 1
        if snapshot.batch.empty or snapshot.batch.prefill_tokens or self.num_plans % 2:
            return Plan(run_online=not snapshot.batch.empty)
        return Plan(num_tasklets=2, mode=Mode.TEMPORAL, hold_ms=self._hold_ms)


def test_tasklets_run_while_prompts_wait_that_were_there_before(tmp_path: Path) -> None:
    """There are more requests than seats."""
    requests = (AddRequest(request(f"r{index}", [5, 6, 7 + index], 12)) for index in range(32))
    loop, _ = small_loop(tmp_path, Channel(*requests), Behind(), AheadDevice(), with_job=True)
    num_ended = sum(run.count for _ in range(20) for run, _ in loop.iterate().tasklets)
    assert num_ended >= 10
    loop.run()


class PatientChannel(Channel):
    """Nothing comes until the job is done. ``timeouts_s``: what it was asked to wait for."""

    def __init__(self, *messages: ToWorker) -> None:
        super().__init__(*messages)
        self.timeouts_s: list[float] = []

    def wait(self, timeout_s: float) -> bool:
        self.timeouts_s.append(timeout_s)
        self.num_looks_before_wait = 0
        time.sleep(A_MOMENT_S)
        if any(isinstance(sent, JobSucceeded) for sent in self.sent):
            self.inbox.append(Drain())
        return bool(self.inbox)


class CoolingDown(Policy):
    """Valve's policy with gaps of 10 ms, on a clock that only waiting moves."""

    def __init__(self, channel: PatientChannel) -> None:
        self._policy = create_policy("lifecycle", LatencyPredictor("test", "test"))
        self._channel = channel

    def plan(self, snapshot: Snapshot) -> Plan:
        idle_s = sum(self._channel.timeouts_s)
        return self._policy.plan(replace(snapshot, idle_s=idle_s, largest_gap_s=0.01))


def test_training_goes_on_as_the_cool_down_ends(tmp_path: Path) -> None:
    channel = PatientChannel(AddRequest(request("r", [5, 6, 7], 3)))
    loop, _ = small_loop(tmp_path, channel, CoolingDown(channel), with_job=True)
    while loop.iterate().num_tasklets == 0:
        pass
    assert channel.timeouts_s == [pytest.approx(0.02)]
    loop.run()


@pytest.mark.parametrize(("comes", "hold_ms"), [(False, 0.0), (True, 0.0), (True, 1e6)])
def test_what_was_begun_is_finished_unless_prompts_come(comes: bool, hold_ms: float, tmp_path: Path) -> None:
    """A batch that tasklets are to follow is launched ahead; a prompt that has come since waits for none of them, or
    for as long as the plan says."""
    channel, policy = Channel(AddRequest(request("r", [5, 6, 7], 30))), Behind(hold_ms)
    loop, _ = small_loop(tmp_path, channel, policy, AheadDevice(), with_job=True)
    while not loop.begun:
        loop.iterate()
    if comes:
        channel.inbox.append(AddRequest(request("late", [8, 9, 10], 4)))
    num_plans, record = policy.num_plans, loop.iterate()
    num_ended = sum(run.count for run, _ in record.tasklets)
    assert (policy.num_plans - num_plans, num_ended) == ((1, 0) if comes and not hold_ms else (0, 2))
    assert not loop.begun
    loop.run()
    tokens = [output.request_id for sent in channel.sent if isinstance(sent, Outputs) for output in sent.outputs]
    assert (tokens.count("r"), tokens.count("late")) == (30, 4 if comes else 0)


class SlowDiskChannel(Channel):
    """Each wait while the job waits for the disk lets a checkpoint through to it; the server ends once the job has."""

    def __init__(self, disk: SlowDisk, *messages: ToWorker) -> None:
        super().__init__(*messages)
        self._disk = disk
        self.training: TrainingTenant | None = None
        self.num_steps: list[int] = []  # reported before each of these waits

    def wait(self, timeout_s: float) -> bool:
        self.num_looks_before_wait = 0
        time.sleep(A_MOMENT_S)
        assert self.training is not None
        if self.training.waits_shortly or self.training.runnable:  # until it is prepared, or copied, or since it is
            return False
        self.num_steps.append(sum(len(sent.steps) for sent in self.sent if isinstance(sent, JobMetrics)))
        self._disk.let_through(1)
        if any(isinstance(sent, JobSucceeded) for sent in self.sent):
            self.inbox.append(Drain())
        return bool(self.inbox)


def test_the_loop_rests_while_the_job_waits_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = support.make_spec(tmp_path / "job", batch_size=1, n_epochs=1, save_steps=1, max_steps=6)
    channel = SlowDiskChannel(SlowDisk(monkeypatch), StartJob(spec), AddRequest(request("r", [5, 6, 7], 20)))
    loop, _ = small_loop(tmp_path, channel, "adaptive")
    channel.training = loop._training
    loop.run()
    assert channel.num_steps[0] == 2
    assert channel.num_steps[-1] == 6
    tokens = [output.request_id for sent in channel.sent if isinstance(sent, Outputs) for output in sent.outputs]
    assert tokens.count("r") == 20


class SlowFile:
    """A job whose training file says nothing before ``feed``: whoever reads it until then waits."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.spec = support.make_spec(folder, n_epochs=1)
        self.is_read = threading.Event()
        self._may_read = threading.Semaphore(0)
        monkeypatch.setattr("cotenant.finetune.dataset.read_tensors", self._wait_and_read)

    def feed(self) -> None:
        """To the one who reads or the next who will."""
        self._may_read.release()

    def _wait_and_read(self, path: Path) -> dict[str, torch.Tensor]:
        self.is_read.set()
        self._may_read.acquire(timeout=20)  # a loop that reads the file itself fails the test, late
        return read_tensors(path)


def kinds(channel: Channel) -> set[type[FromWorker]]:
    return {type(message) for message in channel.sent}


def iterate_until_answered(loop: WorkerLoop, channel: Channel, name: str) -> None:
    def is_answered() -> bool:
        outputs = [output for sent in channel.sent if isinstance(sent, Outputs) for output in sent.outputs]
        return any(output.request_id == name and output.finish_reason is not None for output in outputs)

    while not is_answered():
        loop.iterate()


@pytest.mark.parametrize("is_good", [True, False])
def test_requests_are_answered_while_a_jobs_file_is_read(
    is_good: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SlowFile(tmp_path / "job", monkeypatch)
    if not is_good:
        Path(job.spec.dataset_path).write_bytes(b"nothing")
    channel = Channel(StartJob(job.spec), AddRequest(request("r", [5, 6, 7], 10)))
    loop, _ = small_loop(tmp_path, channel, "adaptive")
    iterate_until_answered(loop, channel, "r")
    assert not kinds(channel) & {JobStarted, JobFailed}
    job.feed()
    loop.run()
    codes = [message.code for message in channel.sent if isinstance(message, JobFailed)]
    assert codes == ([] if is_good else ["invalid_training_file"])
    assert (kinds(channel) >= {JobStarted, JobSucceeded}) == is_good
    assert isinstance(channel.sent[-1], Drained)


@pytest.mark.parametrize(
    ("message", "answer"),
    [(PauseJob, JobPaused), (CancelJob, JobCancelled), (Drain, JobPaused)],
    ids=["pause", "cancel", "drain"],
)
def test_a_job_whose_file_is_being_read_can_be_stopped(
    message: Callable[..., ToWorker], answer: type[FromWorker], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = SlowFile(tmp_path / "job", monkeypatch)
    channel = Channel(StartJob(job.spec), StartJob(job.spec))  # said twice
    loop, _ = small_loop(tmp_path, channel, "adaptive")
    for _ in range(3):
        loop.iterate()
    assert job.is_read.wait(20)
    channel.inbox.append(Drain() if message is Drain else message(job.spec.job_id))
    loop.iterate()
    assert answer in kinds(channel)
    assert not kinds(channel) & {JobStarted, JobFailed}
    assert (Drained in kinds(channel)) == (message is Drain)
    job.feed()
    if message is Drain:
        return
    channel.inbox = [StartJob(job.spec), AddRequest(request("r", [5, 6, 7], 10))]  # no job begins after a Drain
    iterate_until_answered(loop, channel, "r")
    assert JobStarted not in kinds(channel), "the file is read again"
    job.feed()
    loop.run()
    assert {JobStarted, JobSucceeded} <= kinds(channel)


def test_no_job_begins_once_the_worker_drains(tmp_path: Path) -> None:
    runs = support.make_spec(tmp_path / "job")
    late = replace(support.make_spec(tmp_path / "late"), job_id="ftjob-2")
    channel = Channel(Drain(), StartJob(late), StartJob(runs), AddRequest(request("r", [5, 6, 7], 10)))
    loop, _ = small_loop(tmp_path, channel, "adaptive", with_job=True)
    loop.run()
    told = JobStarted | JobPaused | JobFailed | JobSucceeded
    jobs = [(type(message), message.job_id) for message in channel.sent if isinstance(message, told)]
    assert jobs == [(JobStarted, runs.job_id), (JobPaused, late.job_id), (JobPaused, runs.job_id)]
    assert isinstance(channel.sent[-1], Drained)
