"""`cotenant bench colocate`: a job beside a load, policy by policy, through the worker's own loop in this process.

Requests arrive at their times whether or not earlier ones were answered, and a loop that is busy with tasklets is
interrupted by them, as in the server; only HTTP and the process boundary are left out.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cotenant.config import ServerConfig
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.core.job import JobSpec
from cotenant.core.plan import Partition, Slo
from cotenant.core.tasklet import TaskletShape
from cotenant.models.lane_products import num_trials
from cotenant.runtime.colocate_cell import ENOUGH_TOKENS, Cell, is_settled
from cotenant.runtime.colocate_watch import Watch, measured_cell
from cotenant.runtime.device_time import DeviceTime
from cotenant.runtime.finetune_workload import Workload, write_random_dataset
from cotenant.runtime.load import Arrival, Load
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.steady import (
    LEARNING_TOKENS,
    LEAST_RISE,
    SETTLED_TOKENS,
    are_settled,
    most_learning,
    profile_len,
    settled_from,
    steady_len,
    timed_from,
)
from cotenant.runtime.tenants import build_tenants
from cotenant.runtime.timeline import Timeline
from cotenant.runtime.utilisation import UtilisationSampler
from cotenant.scheduler import create_policy
from cotenant.scheduler.space import nearest, sm_shares
from cotenant.wire.messages import FromWorker, JobFailed, StartJob

_JOB_ID = "ftjob-bench"
_STEPS_PER_EPOCH = 4096  # a checkpoint is written at the end of an epoch: not while something is measured
_WARM_STEPS = 4  # of the optimizer, before anything is measured: layers are captured in them
# The same in each partition, for whose SMs they are captured again, beside so many sequences; and steps more until a
# whole one has tried no product there, but not for ever.
_WARM_STEPS_THERE, _WARM_SEQUENCES, _MOST_WARM_STEPS = 2, 16, 12
_NO_TARGET = Slo(1e9, 1e9)
ANSWERED_WITHIN_S = 120.0  # after the last arrival


@dataclass(frozen=True, slots=True)
class Shared:
    """What sharing in space comes to in a partition: of a decode step, and of training beside it."""

    partition: Partition
    step_ms: float
    train_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Profiled:
    """Of a shape: how long a decode step takes alone, and how long it is from one step's tokens to the next one's with
    ``tasklets_per_step`` of training's tasklets, on all SMs; and the partitions."""

    alone_ms: float
    beside_ms: float
    tasklets_per_step: float
    shared: tuple[Shared, ...]


class ColocateBench:
    """One server and one job that has no end. Use as a context manager: the job's files lie in a folder of its own."""

    def __init__(self, config: ServerConfig, workload: Workload, *, uses_data_dir: bool = False) -> None:
        """Load what ``config`` names. ``uses_data_dir``: begin with the latencies kept there; otherwise that folder is
        not touched, and all is measured anew. Raises CotenantError for what cannot be served or trained."""
        self._folder = tempfile.TemporaryDirectory(prefix="cotenant-bench-")
        self._failure: JobFailed | None = None
        if not uses_data_dir:
            config = replace(config, data_dir=self._folder.name)
        self._tenants = build_tenants(config, self._hear)
        self._tenants.lanes.finish()
        serving = self._tenants.serving
        serving.engine.compile_the_rest()  # as the worker does
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
        self._page_tokens = config.cache.page_tokens
        self.max_num_seqs = config.batch.resolved(serving.device.torch_device.type).max_num_seqs
        self._num_loads = itertools.count()
        self._last_watch: Watch | None = None
        self._warm: set[Partition] = set()
        self._alone_ms: dict[TaskletShape, float] = {}  # of tasklets, without requests
        self.alone_utilisation: dict[str, float] | None = None  # of the device, the last time that training was alone

    def __enter__(self) -> ColocateBench:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            training = self._tenants.training
            if training.job_id is not None:
                training.cancel(_JOB_ID)
                while training.job_id is not None:
                    training.publish()
                    time.sleep(0.01)
            training.close()
            self._tenants.latencies.wait()
        finally:
            if self._tenants.trace is not None:
                self._tenants.trace.close()
            self._folder.cleanup()

    def wait_for_kernels(self) -> None:
        """Block until nothing more is compiled in the background: from then on prompts go through other kernels, and
        until then compilers have cores. It may take minutes where none of this model's were compiled before."""
        self._tenants.serving.engine.wait_for_kernels()

    @property
    def default_slo(self) -> Slo:
        """The targets of a server that is given none, measured here where it measures them."""
        return self._tenants.default_slo

    @property
    def has_partitions(self) -> bool:
        """Whether the device's SMs are divided for some policy."""
        return bool(self._tenants.serving.device.partitions)

    @property
    def longest_tasklet_ms(self) -> float:
        """As measured so far."""
        view = self._tenants.training.view()
        shapes = () if view is None else {run.shape for cycle in view.upcoming for run in cycle.runs}
        return max((self._tenants.predictor.tasklet_ms(shape) or 0.0 for shape in shapes), default=0.0)

    def save_latencies(self) -> tuple[int, Path]:
        """Keep what was measured in the configuration's data folder: how many records there are, and where. Raises
        OSError."""
        tenants = self._tenants
        tenants.latencies.write(tenants.predictor)
        return tenants.predictor.num_records, tenants.latencies.path

    def description(self) -> dict[str, Any]:
        """What was measured on what."""
        serving = self._tenants.serving
        return {
            "model": serving.resolved.name,
            "dtype": str(serving.decoder.dtype).removeprefix("torch."),
            "compressed": serving.decoder.weights.is_compressed,
            "device": serving.device.name,
            "num_sms": serving.device.num_multiprocessors,
            "training": asdict(self._workload),
        }

    def alone(self, duration_s: float) -> float:
        """Tokens/s of training with the device to itself: for so long, or until some tokens have counted."""
        load = Load((), self._vocab_size, seed=0, first_messages=[StartJob(self._spec)])
        watch, loop = self._begin(load, "multitask", self._tenants.default_slo)
        warm_tokens = _WARM_STEPS * self._workload.tokens_per_step
        while self._tenants.training.trained_tokens < warm_tokens:
            self._iterate(loop, watch)
        gc.collect()
        gc.freeze()  # as in the worker
        device_time = self._account("training alone")
        start_s = load.now_s
        tokens_per_s = 0.0
        with self._sampler() as utilisation:
            while load.now_s < start_s + duration_s or not tokens_per_s:
                self._iterate(loop, watch)
                if load.now_s >= start_s + duration_s:
                    tokens_per_s = watch.timeline.tokens_per_s(start_s, load.now_s)
        self.alone_utilisation = utilisation.figures
        self._alone_ms = device_time.tasklets_ms(load.now_s - start_s)
        self._mark("measured until here")
        return tokens_per_s

    def learn(self, policy: str, slo: Slo, arrivals: Sequence[Arrival], duration_s: float) -> None:
        """Serve those of these requests that come within ``duration_s``, and measure nothing but what predictions rest
        on. That is all policies': who is measured first would else have least of it."""
        self._warm_up(self._partitions_of(policy))
        load = self._load([each for each in arrivals if each.due_s < duration_s], seed=0)
        watch, loop = self._begin(load, policy, slo)
        while load.now_s < duration_s:
            self._iterate(loop, watch)
        load.abort()
        self._become_idle(loop, watch)

    def trace(self, policy: str, slo: Slo, arrivals: Sequence[Arrival], duration_s: float, seed: int = 0) -> Cell:
        """These requests, open loop, for ``duration_s``. The policy goes on until each could have a first token and
        enough others to be judged by, or for ``ANSWERED_WITHIN_S``; who lacks some then is late, but for targets that
        leave longer than that, and gets them without training, which takes less time."""
        self._warm_up(self._partitions_of(policy))
        load = self._load(arrivals, seed)
        watch, loop = self._begin(load, policy, slo)
        account = self._account(f"{policy}, TPOT target {slo.tpot_ms:g} ms, {len(arrivals)} requests")
        with self._sampler() as utilisation:
            while load.now_s < duration_s:
                self._iterate(loop, watch)
        device_time = account.figures(load.now_s, self._alone_ms)
        self._mark("measured until here")
        until_s = duration_s + min(ANSWERED_WITHIN_S, (slo.ttft_ms + ENOUGH_TOKENS * slo.tpot_ms) / 1e3)
        while load.now_s < until_s and not load.done:
            self._iterate(loop, watch)
        last_watch, loop = self._begin(load, "inference-only", slo)
        unsettled = [answer for answer in load.answers if not is_settled(answer)]
        while not all(map(is_settled, unsettled)) and load.now_s <= duration_s + ANSWERED_WITHIN_S:
            self._iterate(loop, last_watch)
        load.abort()
        self._become_idle(loop, last_watch)
        figures = utilisation.figures
        return measured_cell(policy, slo, watch, 0.0, duration_s, figures, device_time, judged_until_s=until_s)

    def steady(self, policy: str, slo: Slo, batch_size: int, context: int, num_tokens: int, seed: int = 0) -> Cell:
        """``batch_size`` sequences that decode together: ``num_tokens`` tokens each, around ``context`` of them. The
        model takes ``steady_len`` tokens."""
        assert steady_len(batch_size, context, num_tokens) <= self._tenants.serving.max_model_len
        self._warm_up(self._partitions_of(policy))
        start, num_untimed = timed_from(context, num_tokens)
        aims = create_policy(policy, self._tenants.predictor).aims
        teacher = self._learn_margin(policy, slo, batch_size, seed) if aims else None
        load = self._steady_load(slo, batch_size, start - num_untimed, settled_from(num_untimed), seed)
        watch, loop = self._begin(load, policy, slo)
        if teacher is not None:
            loop.take_over_margin(teacher)
        self._decode(loop, watch, num_untimed - min(len(answer.token_s) for answer in load.answers))
        account = self._account(f"{policy}, TPOT target {slo.tpot_ms:g} ms, {batch_size} x {context}")
        with self._sampler() as utilisation:
            start_s, end_s = self._decode(loop, watch, num_tokens)
        device_time = account.figures(end_s - start_s, self._alone_ms)
        self._mark("measured until here")
        self._end_steady(loop, watch)
        return measured_cell(policy, slo, watch, start_s, end_s, utilisation.figures, device_time)

    def profile(self, room_ms: float, batch_size: int, context: int, num_tokens: int) -> Profiled:
        """Decode steps alone, as ``steady`` under `adaptive` on all SMs, where training's tasklets may make each so
        much longer, and again beside training in each partition."""
        partitions = self._tenants.serving.device.partitions
        self._warm_up(partitions)
        assert profile_len(batch_size, context, num_tokens) <= self._tenants.serving.max_model_len
        load = self._steady_load(_NO_TARGET, batch_size, timed_from(context, num_tokens)[0], SETTLED_TOKENS, 0)
        alone_s = min((answer.token_s for answer in load.answers), key=len)  # of who came last: all decode since then
        alone_ms = statistics.median(after_s - at_s for at_s, after_s in itertools.pairwise(alone_s)) * 1e3
        slo = replace(_NO_TARGET, itl_ms=alone_ms + room_ms)
        watch, loop = self._begin(load, "adaptive", slo, ())  # behind the steps: the partitions' turn comes
        start_s, end_s = self._decode(loop, watch, num_tokens)
        beside_ms = statistics.fmean(measured_cell("adaptive", slo, watch, start_s, end_s, None).tpot_ms)
        tasklets_per_step = watch.num_tasklets / num_tokens
        shared = []
        for partition in partitions:
            watch, loop = self._begin(load, "static", slo, (partition.online_share,))
            start_s, end_s = self._decode(loop, watch, num_tokens)
            step_ms = (end_s - start_s) * 1e3 / num_tokens
            shared.append(Shared(partition, step_ms, watch.timeline.tokens_per_s(start_s, end_s)))
        self._end_steady(loop, watch)
        return Profiled(alone_ms, beside_ms, tasklets_per_step, tuple(shared))

    def _partitions_of(self, policy: str) -> tuple[Partition, ...]:
        return nearest(self._tenants.serving.device.partitions, sm_shares(policy))

    def _warm_up(self, partitions: Iterable[Partition]) -> None:
        """Train in each of these in which nothing was trained yet, beside sequences that decode, as long as they may
        be: there, products are tried."""
        cold = [partition for partition in partitions if partition not in self._warm]
        if not cold:
            return
        training, longest = self._tenants.training, self._tenants.serving.max_model_len
        load = self._load([Arrival(0.0, 1, longest - 1)] * min(_WARM_SEQUENCES, self.max_num_seqs), seed=0)
        for partition in cold:
            self._warm.add(partition)
            watch, loop = self._begin(load, "static", _NO_TARGET, (partition.online_share,))
            for step in range(_MOST_WARM_STEPS):
                before, until = num_trials(), training.trained_tokens + self._workload.tokens_per_step
                while training.trained_tokens < until:
                    self._iterate(loop, watch)
                if step + 1 >= _WARM_STEPS_THERE and num_trials() == before:
                    break
        load.abort()
        self._become_idle(loop, watch)

    def _steady_load(self, slo: Slo, batch_size: int, input_len: int, least: int, seed: int) -> Load:
        """Sequences that decode, settled, with ``least`` tokens each behind prompts of ``input_len``."""
        if batch_size > self.max_num_seqs:
            raise InvalidInputError(
                f"--batch-sizes: {batch_size} is more than the {self.max_num_seqs} of a batch", param="batch-sizes"
            )
        output_len = self._tenants.serving.max_model_len - input_len
        load = self._load([Arrival(0.0, input_len, output_len)] * batch_size, seed)
        # Prompts come in fast and alone. Who came first has waited for the others' and needs time to catch up.
        watch, loop = self._begin(load, "inference-only", _NO_TARGET)
        while not are_settled(load.answers, slo, least):
            self._iterate(loop, watch)
        return load

    def _decode(self, loop: WorkerLoop, watch: Watch, num_tokens: int) -> tuple[float, float]:
        """So many tokens more of each sequence: when they began, and when their last iteration was noted, not a moment
        later: that would be a share of the next one."""
        answers, start_s = watch.load.answers, watch.load.now_s
        most = min(len(answer.token_s) for answer in answers) + num_tokens
        while min(len(answer.token_s) for answer in answers) < most:
            self._iterate(loop, watch)
        return start_s, watch.noted_s

    def _learn_margin(self, policy: str, slo: Slo, batch_size: int, seed: int) -> WorkerLoop:
        """A loop whose margin has come to rest with so many sequences, if there is room for them."""
        load, engine = self._steady_load(slo, batch_size, 1, SETTLED_TOKENS, seed), self._tenants.serving.engine
        watch, loop = self._begin(load, policy, slo)
        room = engine.num_pages // batch_size * self._page_tokens
        num_quiet, num_wanted = 0, 1
        for _ in range(most_learning(load.answers, min(engine.max_model_len, room))):
            before = loop.margin
            self._decode(loop, watch, LEARNING_TOKENS)
            if abs(loop.margin - before) >= LEAST_RISE:
                # Tokens that the machine itself made late teach nothing: a margin that moves may pause for them once.
                num_quiet, num_wanted = 0, 2
                continue
            num_quiet += 1
            if num_quiet == num_wanted:
                break
        self._end_steady(loop, watch)
        return loop

    def _end_steady(self, loop: WorkerLoop, watch: Watch) -> None:
        is_whole = not any(answer.done for answer in watch.load.answers)
        watch.load.abort()
        self._become_idle(loop, watch)
        assert is_whole, "a sequence ended before the others had their tokens"

    @property
    def _vocab_size(self) -> int:
        return self._tenants.serving.resolved.spec.vocab_size

    def _load(self, arrivals: Sequence[Arrival], seed: int) -> Load:
        """The same prompts whenever the seed is the same, but for the first token: none is in the prefix cache."""
        return Load(arrivals, self._vocab_size, seed, next(self._num_loads) % self._vocab_size)

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, JobFailed):
            self._failure = message

    def _begin(
        self, load: Load, policy: str, slo: Slo, shares: tuple[float, ...] | None = None
    ) -> tuple[Watch, WorkerLoop]:
        timeline = Timeline(self._tenants.serving.device.num_multiprocessors)
        # The step that is under way now has fewer tasklets left than a whole one has.
        step_tasklets = self._last_watch.step_tasklets if self._last_watch is not None else 0
        self._last_watch = watch = Watch(
            load, self._tenants, self._workload.tokens_per_step, timeline, step_tasklets=step_tasklets
        )
        return watch, self._tenants.loop(load, policy, slo, sm_shares(policy) if shares is None else shares)

    def _mark(self, text: str) -> None:
        """In the trace, if there is one."""
        if self._tenants.trace is not None:
            self._tenants.trace.mark(text)

    def _account(self, what: str) -> DeviceTime:
        """Of what ends from now on, which is measured."""
        self._mark(f"measured from here: {what}")
        device_time = self._tenants.executor.device_time = DeviceTime()
        return device_time

    def _sampler(self) -> UtilisationSampler:
        return UtilisationSampler(self._tenants.serving.device.torch_device)

    def _iterate(self, loop: WorkerLoop, watch: Watch) -> None:
        watch.note(loop.iterate())
        if self._failure is not None:
            raise CotenantError(f"the job failed: {self._failure.message}", code=self._failure.code)

    def _become_idle(self, loop: WorkerLoop, watch: Watch) -> None:
        while self._tenants.serving.engine.has_work or self._tenants.serving.engine.num_in_flight:
            self._iterate(loop, watch)
