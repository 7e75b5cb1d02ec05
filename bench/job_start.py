"""What the start of a job does to requests, its checkpoints and its end, and adapters that are read: sequences that
decode, without a job and beside one.

    python bench/job_start.py llama-3.1-8b --load-format dummy --slo-tpot-ms 15

The worker's loop in this process. ``--jobs`` come one after the other, and are cancelled: how far apart a sequence's
tokens are as each begins, goes on and ends, and what kept the loop's thread for longest when a job was made ready
(`start`) and its tasklets were launched. Before the first one the loop is idle, and so it rehearses; with ``--busy`` it
never is. ``--stacks 3``: of the three longest iterations, where the thread was, as another one saw it, which slows all
down a little. ``--save-steps 2``: checkpoints are copied and written meanwhile. ``--adapters 4``: so many of rank 16,
for all linear layers, are read one after the other, and none is used.

The longest iterations are shown with what was planned for them, "cut" where that was over before all tasklets had been
launched.
"""

from __future__ import annotations

import argparse
import collections
import gc
import itertools
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from cotenant.config import LOAD_FORMATS, BatchConfig, CoExecutionConfig, ModelConfig, ServerConfig
from cotenant.core.errors import CotenantError
from cotenant.core.job import LINEAR_MODULES, JobSpec
from cotenant.core.plan import IterationRecord, Mode, Slo
from cotenant.core.tasklet import TaskletShape
from cotenant.models.lora import LoraAdapter, save_adapter
from cotenant.runtime.finetune_workload import Workload, write_random_dataset
from cotenant.runtime.load import Arrival, Load
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.tenants import Tenants, build_tenants
from cotenant.runtime.worker_process import SWITCH_S
from cotenant.scheduler.space import sm_shares
from cotenant.wire.messages import (
    AdapterFailed,
    AdapterLoaded,
    FromWorker,
    JobFailed,
    LoadAdapter,
    StartJob,
    ToWorker,
)

_TTFT_MS = 500.0
_PROMPT_TOKENS = 256
_STEPS_PER_EPOCH = 64
_NUM_LONGEST = 8
_RANK = 16  # of adapters
_SAMPLE_S = 1e-3
_MOST_FRAMES = 8  # of a stack, the innermost


class JobLoad(Load):
    """A load that jobs come with, and adapters that are read."""

    num_asked = num_read = 0
    failure: AdapterFailed | None = None

    def send(self, message: FromWorker) -> None:
        if isinstance(message, AdapterFailed):
            self.failure = message
        self.num_read += isinstance(message, AdapterLoaded)
        super().send(message)

    def tell(self, message: ToWorker) -> None:
        self._messages.append(message)


@dataclass(frozen=True)
class Phase:
    """``launches``: what was launched or begun, and for how many ms that kept the thread. ``gaps_ms``: between two
    tokens of a sequence, sorted."""

    name: str
    gaps_ms: list[float]
    launches: list[tuple[str, float]]
    iterations: list[Iteration]  # the longest first


@dataclass(frozen=True)
class Iteration:
    begin_s: float
    end_s: float
    record: IterationRecord

    @property
    def took_ms(self) -> float:
        return (self.end_s - self.begin_s) * 1e3

    def __str__(self) -> str:
        mode, planned_ms = self.record.mode, self.record.predicted_ms
        planned = "cut" if planned_ms is None else f"{planned_ms:.1f} planned"
        return f"{self.took_ms:.1f}" if mode is Mode.NONE else f"{self.took_ms:.1f} ({mode}, {planned})"


class StackSampler:
    """Notes now and then where a thread is."""

    def __init__(self, thread_id: int) -> None:
        self._thread_id = thread_id
        self.samples: list[tuple[float, tuple[str, ...]]] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(_SAMPLE_S)
            self.samples.append((time.perf_counter(), _stack(sys._current_frames().get(self._thread_id))))


def _stack(frame: FrameType | None) -> tuple[str, ...]:
    found = []
    while frame is not None and len(found) < _MOST_FRAMES:
        found.append(f"{Path(frame.f_code.co_filename).stem}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--load-format", default="auto", choices=LOAD_FORMATS)
    parser.add_argument("--enforce-eager", action="store_true")
    parser.add_argument("--busy", action="store_true", help="no moment without requests before the first job")
    parser.add_argument("--policy", default="adaptive")
    parser.add_argument("--slo-tpot-ms", type=float, default=40.0)
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--seq-len", type=int, default=2048, help="of a row of packed examples")
    parser.add_argument("--min-len", type=int, default=64, help="of an example")
    parser.add_argument("--tokens-per-step", type=int, default=8192)
    parser.add_argument("--save-steps", type=int, default=0, help="a checkpoint after so many steps; 0: none meanwhile")
    parser.add_argument("--adapters", type=int, default=0, help="that are read before the first job")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each phase")
    parser.add_argument("--stacks", type=int, default=0, help="iterations of each phase that are shown")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="cotenant-bench-") as folder:
        try:
            Measurement(arguments, Path(folder)).run()
        except CotenantError as error:
            raise SystemExit(error.message) from error


class Measurement:
    """One server's worker, in this process."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self._arguments = arguments
        self._folder = folder
        self._failures: list[JobFailed] = []
        config = ServerConfig(
            model=ModelConfig(model=arguments.model, device=arguments.device, load_format=arguments.load_format),
            batch=BatchConfig(enforce_eager=arguments.enforce_eager),
            coexecution=CoExecutionConfig(arguments.policy),
            data_dir=str(folder),
        )
        self._tenants: Tenants = build_tenants(config, self._hear)
        self._tenants.lanes.finish()
        self._tenants.serving.engine.compile_the_rest()
        self._tenants.serving.engine.wait_for_kernels()
        self._launches: list[tuple[str, float]] = []
        self._sampler = StackSampler(threading.get_ident()) if arguments.stacks else None

    def run(self) -> None:
        """Measure and print, phase by phase."""
        arguments, serving, training = self._arguments, self._tenants.serving, self._tenants.training
        steps = "not captured" if arguments.enforce_eager else "captured"
        target = f"TPOT target {arguments.slo_tpot_ms:g} ms"
        print(f"{serving.resolved.name} on {serving.device.name}, {target}, decode steps {steps}", flush=True)
        self._rehearse()
        vocab_size = serving.resolved.spec.vocab_size
        workload = Workload(arguments.seq_len, arguments.tokens_per_step, 0, 16, False, arguments.min_len)
        dataset = self._folder / "train.safetensors"
        write_random_dataset(dataset, workload, vocab_size, _STEPS_PER_EPOCH)
        arrival = Arrival(0.0, _PROMPT_TOKENS, serving.max_model_len - _PROMPT_TOKENS)
        load = JobLoad([arrival] * arguments.sequences, vocab_size, seed=0)
        loop = self._loop(load)
        self._watch()
        self._until(loop, lambda: all(len(answer.token_s) > 8 for answer in load.answers))
        gc.collect()
        gc.freeze()  # as in the worker
        sys.setswitchinterval(SWITCH_S)
        self._show(self._phase(loop, load, "without a job"))
        if arguments.adapters:
            self._write_adapter()
            self._show(self._phase(loop, load, "adapters are read", lambda: self._all_are_read(load)))
        for number in range(1, arguments.jobs + 1):
            name = f"ftjob-{number}"
            folder = self._folder / name
            folder.mkdir()
            hyper = replace(workload.hyperparameters(), save_steps=arguments.save_steps)
            load.tell(StartJob(JobSpec(name, serving.resolved.name, str(folder), str(dataset), None, name, hyper)))
            before = training.trained_tokens
            self._show(self._phase(loop, load, f"job {number} begins"))
            self._show(self._phase(loop, load, f"job {number} goes on"))
            print(f"  {training.trained_tokens - before} tokens trained", flush=True)
            training.cancel(name)
            self._show(self._phase(loop, load, f"job {number} ends"))
            self._until(loop, lambda: self._tenants.training.job_id is None)

    def _loop(self, load: Load) -> WorkerLoop:
        policy = self._arguments.policy
        return self._tenants.loop(load, policy, Slo(_TTFT_MS, self._arguments.slo_tpot_ms), sm_shares(policy))

    def _hear(self, message: FromWorker) -> None:
        if isinstance(message, JobFailed):
            self._failures.append(message)

    def _write_adapter(self) -> None:
        serving = self._tenants.serving
        adapter = LoraAdapter.trainable(
            serving.resolved.spec, r=_RANK, alpha=2.0 * _RANK, target_modules=LINEAR_MODULES, seed=0
        )
        save_adapter(adapter, self._folder / "adapter", serving.resolved.name)

    def _all_are_read(self, load: JobLoad) -> bool:
        """If not, the next one is asked for when the one before is there."""
        if load.failure is not None:
            raise CotenantError(load.failure.message)
        if load.num_read == load.num_asked < self._arguments.adapters:
            load.num_asked += 1
            load.tell(LoadAdapter(f"adapter-{load.num_asked}", str(self._folder / "adapter")))
        return load.num_read == self._arguments.adapters

    def _rehearse(self) -> None:
        """In idle time, unless there is to be none; kernels are compiled in any case."""
        rehearsal = self._tenants.rehearsal
        if rehearsal is None:
            return
        while not rehearsal.is_compiled():
            time.sleep(0.1)
        if self._arguments.busy:
            return
        loop, took_ms = self._loop(Load((), 1, seed=0)), []
        while not rehearsal.done:
            begin_s = time.perf_counter()
            loop.iterate()
            took_ms.append((time.perf_counter() - begin_s) * 1e3)
        print(f"rehearsed in {sum(took_ms):.0f} ms, at most {max(took_ms):.0f} of them at once", flush=True)

    def _watch(self) -> None:
        """Note from now on how long tasklets' launches and jobs' beginnings keep the thread."""
        training = self._tenants.training
        run, start = training.run_tasklet, training.start_prepared

        def timed_run() -> TaskletShape:
            begin_s = time.perf_counter()
            shape = run()
            self._launches.append((shape.kind.value, (time.perf_counter() - begin_s) * 1e3))
            return shape

        def timed_start() -> None:
            begin_s, had_job = time.perf_counter(), training.is_preparing
            start()
            if had_job and not training.is_preparing:
                self._launches.append(("start", (time.perf_counter() - begin_s) * 1e3))

        training.run_tasklet = timed_run  # type: ignore[method-assign]
        training.start_prepared = timed_start  # type: ignore[method-assign]

    def _until(self, loop: WorkerLoop, is_there: Callable[[], bool]) -> None:
        while not is_there():
            self._iterate(loop)

    def _iterate(self, loop: WorkerLoop) -> IterationRecord:
        record = loop.iterate()
        if self._failures:
            raise CotenantError(self._failures[0].message)
        return record

    def _phase(self, loop: WorkerLoop, load: Load, name: str, ends: Callable[[], bool] | None = None) -> Phase:
        """``ends``: when, if not after the usual time."""
        first_s, iterations = load.now_s, []
        num_tokens = [len(answer.token_s) for answer in load.answers]
        self._launches.clear()

        def is_over() -> bool:
            if any(answer.done for answer in load.answers):
                raise CotenantError("the sequences ended before the last phase did: fewer --jobs, or --seconds")
            if not (load.now_s >= first_s + self._arguments.seconds if ends is None else ends()):
                return False
            return all(len(answer.token_s) > num + 1 for answer, num in zip(load.answers, num_tokens, strict=True))

        while not is_over():
            begin_s = time.perf_counter()
            record = self._iterate(loop)
            iterations.append(Iteration(begin_s, time.perf_counter(), record))
        last_s = load.now_s
        gaps_ms = sorted(
            (after_s - at_s) * 1e3
            for answer in load.answers
            for at_s, after_s in itertools.pairwise(answer.token_s)
            if first_s <= at_s and after_s <= last_s
        )
        return Phase(name, gaps_ms, list(self._launches), sorted(iterations, key=lambda each: -each.took_ms))

    def _show(self, phase: Phase) -> None:
        gaps_ms = phase.gaps_ms
        p99_ms = gaps_ms[min(len(gaps_ms) - 1, len(gaps_ms) * 99 // 100)]
        print(
            f"{phase.name}: ms between two tokens: p50 {statistics.median(gaps_ms):.1f}, p99 {p99_ms:.1f}, max "
            f"{gaps_ms[-1]:.1f}, of {len(gaps_ms)}",
            flush=True,
        )
        if phase.launches:
            # A job's beginning first, then the longest.
            longest = sorted(phase.launches, key=lambda launch: (launch[0] != "start", -launch[1]))[:_NUM_LONGEST]
            print("  longest launches, ms: " + ", ".join(f"{kind} {ms:.1f}" for kind, ms in longest))
        print("  longest iterations, ms: " + ", ".join(map(str, phase.iterations[:_NUM_LONGEST])), flush=True)
        if self._sampler is None:
            return
        for each in phase.iterations[: self._arguments.stacks]:
            print(f"  an iteration of {each.took_ms:.1f} ms:")
            samples = self._sampler.samples
            seen = collections.Counter(stack for at_s, stack in samples if each.begin_s <= at_s <= each.end_s)
            for stack, count in seen.most_common(3):
                print(f"    {count} x " + " < ".join(stack))


if __name__ == "__main__":
    main()
