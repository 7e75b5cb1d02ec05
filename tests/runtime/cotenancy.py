"""A worker without its process: the real engine, job, policy and executor, driven iteration by iteration."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.job import JobSpec
from cotenant.core.plan import Slo, Snapshot
from cotenant.core.request import Request, SamplingParams
from cotenant.device import create_device
from cotenant.engine.engine import OnlineEngine
from cotenant.models.decoder import Decoder
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import create_policy
from cotenant.wire.messages import FromWorker, JobFailed, JobSucceeded
from finetune import support


@dataclass
class Outcome:
    """What a run gave: tokens by request, the job's messages, and how the two were mixed."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    updates: list[FromWorker] = field(default_factory=list)
    num_mixed_iterations: int = 0
    num_held: int = 0  # iterations with tasklets, and without a batch that requests wait for
    num_fused: int = 0
    num_interruptions: int = 0


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, tuple(prompt), sampling, time.monotonic())


def run(
    decoder: Decoder,
    policy: str,
    arrivals: dict[int, Request],
    spec: JobSpec | None,
    *,
    fuse: bool = False,
    interrupt_every: int = 0,
    ttft_ms: float = 10_000.0,
    tpot_ms: float = 200.0,
) -> Outcome:
    """Run until all arrivals (by iteration number) are answered and the job has ended.

    ``interrupt_every``: every so many looks between tasklets say that a message has come.
    """
    outcome = Outcome()
    device = create_device("cpu")
    engine = OnlineEngine(decoder, 64, 4, BatchConfig(8, 64), 128, LoraConfig(), ())
    training = TrainingTenant(device, decoder, None, support.TASKLET_TOKENS, outcome.updates.append)
    predictor = LatencyPredictor("test", policy)
    executor = Executor(device, decoder, engine, training)
    chosen = create_policy(policy, predictor)
    looks = 0

    def interrupted() -> bool:
        nonlocal looks
        looks += 1
        yes = interrupt_every > 0 and looks % interrupt_every == 0
        outcome.num_interruptions += yes
        return yes

    def emit(outputs: list) -> None:  # type: ignore[type-arg]
        for output in outputs:
            outcome.tokens.setdefault(output.request_id, []).extend(output.token_ids)

    if spec is not None:
        training.start(spec)
    deadline_s = time.monotonic() + 120
    iteration, last_arrival = 0, max(arrivals, default=-1)
    while iteration <= last_arrival or engine.has_work or _job_runs(outcome, spec):
        if iteration in arrivals:
            engine.add(replace(arrivals[iteration], arrival_s=time.monotonic()))  # not when it was made
        slo = Slo(ttft_ms, tpot_ms)
        snapshot = Snapshot(time.monotonic(), slo, engine.next_shape(), engine.views(), training.view(), fuse)
        record = executor.execute(chosen.plan(snapshot), emit, interrupted)
        predictor.observe(record)
        training.publish()
        engine.check_integrity()
        num_tasklets = sum(run.count for run, _ in record.tasklets) + (record.fused.count if record.fused else 0)
        outcome.num_mixed_iterations += num_tasklets > 0 and not record.batch.empty
        outcome.num_held += num_tasklets > 0 and record.batch.empty and bool(snapshot.requests)
        outcome.num_fused += record.fused.count if record.fused else 0
        iteration += 1
        if num_tasklets == 0 and record.batch.empty:
            time.sleep(0.001)  # only files are being written
        assert time.monotonic() < deadline_s
    return outcome


def _job_runs(outcome: Outcome, spec: JobSpec | None) -> bool:
    ended = any(isinstance(update, JobSucceeded | JobFailed) for update in outcome.updates)
    return spec is not None and not ended


def adapter_of(folder: Path) -> bytes:
    return support.adapter_bytes(folder)
