"""`cotenant bench colocate`: a job beside a load, policy by policy, through the worker's own loop in this process.

Requests arrive at their times whether or not earlier ones were answered, and a loop that is busy with tasklets is
interrupted by them, as in the server; only HTTP and the process boundary are left out.
"""

from __future__ import annotations

import gc
import itertools
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from cotenant.config import ServerConfig
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.core.job import JobSpec
from cotenant.core.plan import IterationRecord, Slo
from cotenant.runtime.finetune_workload import Workload, write_random_dataset
from cotenant.runtime.load import Arrival, Load
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.tenants import Tenants, build_tenants
from cotenant.wire.messages import FromWorker, JobFailed, StartJob

_JOB_ID = "ftjob-bench"
_STEPS_PER_EPOCH = 4096  # a checkpoint is written at the end of an epoch: not while something is measured
_WARM_STEPS = 4  # of the optimizer, before anything is measured: layers are captured in them
_SETTLED_TOKENS = 16  # of each sequence, before steady decoding is measured
_ANSWERED_WITHIN_S = 120.0  # after the last arrival


@dataclass(slots=True)
class _Watch:
    """What iterations did, and how far training had come when (seconds, tokens)."""

    load: Load
    tenants: Tenants
    modes: Counter[str] = field(default_factory=Counter)
    errors: list[float] = field(default_factory=list)
    progress: list[tuple[float, int]] = field(default_factory=list)

    def note(self, record: IterationRecord) -> None:
        trained = self.tenants.training.trained_tokens
        if not self.progress or self.progress[-1][1] != trained:
            self.progress.append((self.load.now_s, trained))
        if not record.batch.empty:
            self.modes[record.mode.value] += 1
        if record.predicted_ms is not None and record.total_ms > 0:
            self.errors.append(abs(record.predicted_ms - record.total_ms) / record.total_ms)

    def tokens_per_s(self, start_s: float, end_s: float) -> float:
        """Of training, by the optimizer steps that ended in this time; 0 where fewer than two did."""
        steps = [(at_s, tokens) for at_s, tokens in self.progress if start_s <= at_s <= end_s]
        if len(steps) < 2:
            return 0.0
        return (steps[-1][1] - steps[0][1]) / (steps[-1][0] - steps[0][0])


@dataclass(frozen=True, slots=True)
class Cell:
    """What one policy did under one load. Requests' figures are lists in milliseconds, for whoever sums them up:
    ``itl_ms`` of all gaps between two tokens. ``attained``: requests that met both targets, of those answered or
    failed. ``modes``: iterations with a batch, by how training shared them."""

    policy: str
    slo: Slo
    duration_s: float
    num_requests: int
    num_failed: int
    num_attained: int
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    output_tokens_per_s: float
    train_tokens_per_s: float
    modes: dict[str, int]
    prediction_error: float | None


def steady_len(batch_size: int, context: int, num_tokens: int) -> int:
    """Tokens of the longest sequence that ``ColocateBench.steady`` may come to."""
    until_all_decode = _SETTLED_TOKENS + 2 * batch_size
    return max(1, context - num_tokens // 2) + num_tokens + until_all_decode


class ColocateBench:
    """One server and one job that has no end. Use as a context manager: the job's files lie in a folder of its own."""

    def __init__(self, config: ServerConfig, workload: Workload) -> None:
        """Load what ``config`` names. Raises CotenantError for what cannot be served or trained."""
        self._folder = tempfile.TemporaryDirectory(prefix="cotenant-bench-")
        self._failure: JobFailed | None = None
        self._tenants = build_tenants(config, self._hear)
        serving = self._tenants.serving
        folder = Path(self._folder.name)
        write_random_dataset(folder / "train.safetensors", workload, serving.resolved.spec.vocab_size, _STEPS_PER_EPOCH)
        self._spec = JobSpec(
            job_id=_JOB_ID,
            base_model=serving.resolved.name,
            folder=str(folder),
            dataset_path=str(folder / "train.safetensors"),
            validation_path=None,
            adapter_name="bench",
            hyperparameters=workload.hyperparameters(),
        )
        self._workload = workload
        self._seeds = itertools.count()  # no two loads have the same prompts: none is found in the prefix cache

    def __enter__(self) -> ColocateBench:
        return self

    def __exit__(self, *_: object) -> None:
        training = self._tenants.training
        if training.job_id is not None:
            training.cancel(_JOB_ID)
            while training.job_id is not None:
                training.publish()
                time.sleep(0.01)
        self._folder.cleanup()

    @property
    def max_model_len(self) -> int:
        return self._tenants.serving.max_model_len

    @property
    def default_slo(self) -> Slo:
        return self._tenants.default_slo

    def description(self) -> dict[str, Any]:
        """What was measured on what."""
        serving = self._tenants.serving
        return {
            "model": serving.resolved.name,
            "dtype": str(serving.decoder.dtype).removeprefix("torch."),
            "device": serving.device.name,
            "training": asdict(self._workload),
        }

    def alone(self, duration_s: float) -> float:
        """Tokens/s of training with the device to itself."""
        load = Load((), self._vocab_size, next(self._seeds), [StartJob(self._spec)])
        watch, loop = self._begin(load, "multitask", self.default_slo)
        while len(watch.progress) <= _WARM_STEPS:
            self._iterate(loop, watch)
        gc.collect()
        gc.freeze()  # as in the worker
        start_s = load.now_s
        while load.now_s < start_s + duration_s or watch.tokens_per_s(start_s, load.now_s) == 0.0:
            self._iterate(loop, watch)
        return watch.tokens_per_s(start_s, load.now_s)

    def trace(self, policy: str, slo: Slo, arrivals: Sequence[Arrival], duration_s: float) -> Cell:
        """These requests, open loop; training counts while they arrive, for ``duration_s``."""
        load = Load(arrivals, self._vocab_size, next(self._seeds))
        watch, loop = self._begin(load, policy, slo)
        while not (load.done and load.now_s >= duration_s):
            self._iterate(loop, watch)
            if load.now_s > duration_s + _ANSWERED_WITHIN_S:
                load.abort()
                break
        self._become_idle(loop, watch)
        return _cell(policy, slo, watch, 0.0, duration_s, with_ttft=True)

    def steady(self, policy: str, slo: Slo, batch_size: int, context: int, num_tokens: int) -> Cell:
        """``batch_size`` sequences that decode together: ``num_tokens`` tokens each, around ``context`` of them. The
        model takes ``steady_len`` tokens."""
        input_len = max(1, context - num_tokens // 2)
        room = self.max_model_len - input_len
        assert steady_len(batch_size, context, num_tokens) <= self.max_model_len
        load = Load([Arrival(0.0, input_len, room)] * batch_size, self._vocab_size, next(self._seeds))
        watch, loop = self._begin(load, policy, slo)
        while min(len(answer.token_s) for answer in load.answers) < _SETTLED_TOKENS:
            self._iterate(loop, watch)
        start_s, most = load.now_s, min(len(answer.token_s) for answer in load.answers) + num_tokens
        watch.modes.clear()
        watch.errors.clear()
        while min(len(answer.token_s) for answer in load.answers) < most:
            self._iterate(loop, watch)
        end_s = load.now_s
        load.abort()
        self._become_idle(loop, watch)
        return _cell(policy, slo, watch, start_s, end_s, with_ttft=False)

    @property
    def _vocab_size(self) -> int:
        return self._tenants.serving.resolved.spec.vocab_size

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, JobFailed):
            self._failure = message

    def _begin(self, load: Load, policy: str, slo: Slo) -> tuple[_Watch, WorkerLoop]:
        return _Watch(load, self._tenants), self._tenants.loop(load, policy, slo)

    def _iterate(self, loop: WorkerLoop, watch: _Watch) -> None:
        watch.note(loop.iterate())
        if self._failure is not None:
            raise CotenantError(f"the job failed: {self._failure.message}", code=self._failure.code)
        failed = next((answer for answer in watch.load.answers if answer.failure is not None), None)
        if failed is not None:
            raise InvalidInputError(f"a request of {failed.arrival} cannot be served: {failed.failure}")

    def _become_idle(self, loop: WorkerLoop, watch: _Watch) -> None:
        while self._tenants.serving.engine.has_work or self._tenants.serving.engine.num_in_flight:
            self._iterate(loop, watch)


def _cell(policy: str, slo: Slo, watch: _Watch, start_s: float, end_s: float, *, with_ttft: bool) -> Cell:
    """Of the requests whose tokens came in this time; ``with_ttft``: of all requests, from their beginning."""
    ttfts_ms, tpots_ms, gaps_ms = [], [], []
    num_attained = num_failed = num_tokens = 0
    for answer in watch.load.answers:
        times = [at_s for at_s in answer.token_s if with_ttft or start_s <= at_s <= end_s]
        num_tokens += len(times)
        if not times or (with_ttft and not answer.done):
            num_failed += 1
            continue
        ttft_ms = (times[0] - answer.arrival.due_s) * 1e3
        tpot_ms = (times[-1] - times[0]) * 1e3 / (len(times) - 1) if len(times) > 1 else 0.0
        if with_ttft:
            ttfts_ms.append(ttft_ms)
        if len(times) > 1:
            tpots_ms.append(tpot_ms)
        gaps_ms += [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
        num_attained += tpot_ms <= slo.tpot_ms and (not with_ttft or ttft_ms <= slo.ttft_ms)
    return Cell(
        policy=policy,
        slo=slo,
        duration_s=end_s - start_s,
        num_requests=len(watch.load.answers),
        num_failed=num_failed,
        num_attained=num_attained,
        ttft_ms=ttfts_ms,
        tpot_ms=tpots_ms,
        itl_ms=gaps_ms,
        output_tokens_per_s=num_tokens / (end_s - start_s),
        train_tokens_per_s=watch.tokens_per_s(start_s, end_s),
        modes=dict(watch.modes),
        prediction_error=sum(watch.errors) / len(watch.errors) if watch.errors else None,
    )
