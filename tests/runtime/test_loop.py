"""The loop waits when there is nothing to run, and answers what it was asked before it ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from cotenant.config import POLICIES, BatchConfig, LoraConfig
from cotenant.core.plan import Slo
from cotenant.device import create_device
from cotenant.device.cpu.device import CpuDevice
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import create_policy
from cotenant.wire.messages import AddRequest, Drain, Drained, FromWorker, JobPaused, Outputs, StartJob, ToWorker
from finetune import support
from finetune.conftest import save_llama
from runtime.cotenancy import request


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
        self.inbox.append(Drain())
        self.num_looks_before_wait = 0
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


class AheadDevice(CpuDevice):
    """A CPU whose batches are launched a step ahead, as on a device that runs behind the host."""

    overlaps = True


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tpot_ms", [0.001, 1000.0])
def test_all_is_answered_when_the_host_runs_ahead(policy: str, tpot_ms: float, tmp_path: Path) -> None:
    """Whatever room prompts are given beside the decodes: with targets that cannot be met it is the least there is."""
    save_llama(tmp_path / "model")
    prompts = {
        f"r{index}": [5 + (index + 3 * place) % 90 for place in range(4 + 11 * (index % 7))] for index in range(24)
    }
    channel = Channel(
        StartJob(support.make_spec(tmp_path / "job")),
        *(AddRequest(request(name, prompt, 2 + len(prompt) % 9)) for name, prompt in prompts.items()),
    )
    engine = OnlineEngine(support.load(tmp_path / "model"), 96, 4, BatchConfig(12, 96), 128, LoraConfig(), ())
    device, decoder = AheadDevice(), support.load(tmp_path / "model")
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, channel.send)
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
