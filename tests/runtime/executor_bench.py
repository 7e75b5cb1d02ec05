"""An executor that runs one plan after another, with a job to train."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.plan import Plan
from cotenant.core.request import SequenceOutput
from cotenant.core.tasklet import TaskletShape
from cotenant.device import Device, create_device
from cotenant.engine.engine import OnlineEngine
from cotenant.finetune.job import TrainingJob
from cotenant.runtime.executor import Executor
from cotenant.runtime.trace import Trace
from cotenant.runtime.training import TrainingTenant
from cotenant.wire.messages import FromWorker
from finetune import support
from finetune.conftest import save_llama


class Bench:
    """One engine, one job, one executor."""

    def __init__(
        self,
        folder: Path,
        device: Device | None = None,
        validation: support.Examples | None = None,
        trace: Trace | None = None,
    ) -> None:
        save_llama(folder / "model")
        decoder = support.load(folder / "model")
        device = device or create_device("cpu")
        self.engine = OnlineEngine(decoder, 64, 4, BatchConfig(8, 64), 128, LoraConfig(), (), device=device)
        self.updates: list[FromWorker] = []
        self.now_s = 0.0
        self.training = TrainingTenant(
            device, decoder, None, support.TASKLET_TOKENS, self.updates.append, clock=lambda: self.now_s
        )
        self.training.start(support.make_spec(folder / "job", validation=validation, eval_steps=1 if validation else 0))
        self.executor = Executor(device, decoder, self.engine, self.training, trace)
        self.emitted: list[SequenceOutput] = []

    def pause(self) -> None:
        """Stop the job and wait until that is answered."""
        self.training.pause_running()
        deadline_s = time.monotonic() + 120
        while self.training.job_id is not None:
            self.training.publish()
            assert time.monotonic() < deadline_s

    def run_short(self, monkeypatch: pytest.MonkeyPatch, are_short: Iterable[bool]) -> TrainingJob:
        """Let the job's next tasklets find no memory where that is said; the job."""
        job, each = self.training._job, iter(are_short)
        assert job is not None
        run_tasklet = job.run_tasklet

        def run_or_fail() -> TaskletShape:
            if next(each, False):
                raise torch.OutOfMemoryError("no memory")
            return run_tasklet()

        monkeypatch.setattr(job, "run_tasklet", run_or_fail)
        return job

    def run(self, plan: Plan, looks_before_arrival: int = 1_000_000) -> int:
        """Execute the plan; a request 'arrives' after so many looks. Returns the tasklets that ran."""
        looks = iter(range(looks_before_arrival))
        record = self.executor.execute(plan, self.emitted.extend, lambda: next(looks, None) is None)
        return sum(run.count for run, _ in record.tasklets) + (record.fused.count if record.fused else 0)
