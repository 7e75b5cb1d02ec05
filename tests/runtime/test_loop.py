"""The loop waits when there is nothing to run, answers what it was asked before it ends, and trains meanwhile."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from cotenant.config import POLICIES, BatchConfig, LoraConfig
from cotenant.core.plan import Plan, Slo, Snapshot
from cotenant.device import create_device
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import signs_of_life
from cotenant.runtime.executor import Executor
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import Policy, create_policy
from cotenant.wire.messages import (
    AddRequest,
    Drain,
    Drained,
    JobPaused,
    JobSucceeded,
    Outputs,
    StartJob,
    Stats,
    ToWorker,
)
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import request
from runtime.driven_loop import A_MOMENT_S, AheadDevice, Behind, Channel, small_loop

pytestmark = pytest.mark.usefixtures("loop_clock")


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


def test_tasklets_run_while_prompts_wait_that_were_there_before(tmp_path: Path) -> None:
    """There are more requests than seats."""
    requests = (AddRequest(request(f"r{index}", [5, 6, 7 + index], 12)) for index in range(32))
    loop, _ = small_loop(tmp_path, Channel(*requests), Behind(), AheadDevice(), with_job=True)
    num_ended = sum(run.count for _ in range(20) for run, _ in loop.iterate().tasklets)
    assert num_ended >= 10
    loop.run()


@pytest.mark.parametrize("policy", ["adaptive", "whole-step"])
def test_between_tasklets_the_loop_says_that_it_goes_on(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signs_of_life, "REPEAT_EVERY_S", 0.0)
    channel = Channel()
    loop, _ = small_loop(tmp_path, channel, policy, with_job=True)
    loop.iterate()
    channel.sent.clear()
    record = loop.iterate()
    assert record.num_tasklets > 2
    assert sum(isinstance(message, Stats) for message in channel.sent) >= record.num_tasklets
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
