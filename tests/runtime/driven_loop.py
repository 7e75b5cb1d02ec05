"""A small loop on a CPU, its channel without the API process, and policies that it is tried with."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, TypeVar

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.plan import Mode, Plan, Slo, Snapshot
from cotenant.device.cpu.device import CpuDevice
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime import loop as loop_module
from cotenant.runtime.executor import Executor
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import Policy, create_policy
from cotenant.wire.messages import Drain, FromWorker, Outputs, ToWorker
from finetune import support
from finetune.conftest import save_llama

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


class Watching(Policy):
    """Serves, and keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[Snapshot] = []

    def plan(self, snapshot: Snapshot) -> Plan:
        self.seen.append(snapshot)
        return Plan(run_online=not snapshot.batch.empty)


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


class AheadDevice(CpuDevice):
    """A CPU whose batches are launched a step ahead, as on a device that runs behind the host."""

    overlaps = True


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


def iterate_until_answered(loop: WorkerLoop, channel: Channel, name: str) -> None:
    def is_answered() -> bool:
        outputs = [output for sent in channel.sent if isinstance(sent, Outputs) for output in sent.outputs]
        return any(output.request_id == name and output.finish_reason is not None for output in outputs)

    while not is_answered():
        loop.iterate()
