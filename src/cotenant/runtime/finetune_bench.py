"""`cotenant bench finetune`: how fast a job trains alone in this process, and how soon it stops and gives memory back.

Tasklets are launched as the worker's executor does: the next one looked up, then launched through the device, which
keeps a bounded number in flight. Checkpoints, metrics files and evaluation are left out.
"""

from __future__ import annotations

import gc
import random
import resource
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch

from cotenant.config import ModelConfig
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.device import Device, create_device
from cotenant.device.base import FinishedTasklet
from cotenant.finetune.activations import Activations
from cotenant.finetune.captured import BACKWARD_PARTS
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.footprint import WAYS_OUT
from cotenant.finetune.job_setup import new_adapter
from cotenant.finetune.microbatch import split
from cotenant.finetune.order import DataOrder
from cotenant.finetune.progress import Progress
from cotenant.finetune.state import TrainingState, fingerprint
from cotenant.finetune.trainer import Trainer
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.registry import ResolvedModel, resolve_model
from cotenant.runtime.build import TASKLET_TOKENS, choose_dtype, spare_host_threads
from cotenant.runtime.engine_bench import Ceilings, measure_ceilings, spread
from cotenant.runtime.finetune_workload import Workload, flop_per_token, random_dataset

_BACKWARD_KINDS = (TaskletKind.BACKWARD, *BACKWARD_PARTS)


def open_bench(config: ModelConfig, workload: Workload) -> FinetuneBench:
    """Load the model, and measure the device. Raises CotenantError for what cannot be loaded."""
    device = create_device(config.device)
    resolved = resolve_model(config)
    dtype = choose_dtype(config.dtype, resolved.spec.dtype, device)
    decoder = load_decoder(resolved, device.torch_device, dtype, config.seed)
    ceilings = measure_ceilings(device.torch_device, dtype)
    if device.torch_device.type == "cuda":
        torch.cuda.empty_cache()  # what was measured with is no part of training's memory
        torch.cuda.reset_peak_memory_stats(device.torch_device)
    bench = FinetuneBench(device, resolved, decoder, ceilings, workload)
    spare_host_threads(device)
    gc.collect()
    gc.freeze()  # as in the worker
    return bench


class FinetuneBench:
    """One job that trains without end. Call ``steps`` first: the other measurements go by what it found."""

    def __init__(
        self, device: Device, resolved: ResolvedModel, decoder: Decoder, ceilings: Ceilings, workload: Workload
    ) -> None:
        self._device = device
        self._resolved = resolved
        self._decoder = decoder
        self._ceilings = ceilings
        self._workload = workload
        self._tasklet_tokens = workload.tasklet_tokens or TASKLET_TOKENS[device.torch_device.type]
        self._micro_batch_s = 0.0
        self._launch_cpu_s = 0.0
        self._random = random.Random(0)
        hyper = workload.hyperparameters()
        dataset = random_dataset(workload, resolved.spec.vocab_size)
        self._order = DataOrder(dataset.lengths, hyper)
        spec = JobSpec("bench", resolved.name, "", "", None, "bench", hyper)
        adapter = new_adapter(spec, resolved.spec).trainable_on(decoder.device)
        most = max(self._tasklet_tokens, self._order.longest)
        self._state = TrainingState(adapter, spec, fingerprint(spec, dataset))
        self._activations = Activations.for_job(
            decoder, self._state, device, most, recompute_all=hyper.gradient_checkpointing
        )
        self._trainer = self._make_trainer(dataset, hyper)
        self._micro_batches = split(dataset, self._order.step(0), self._trainer.max_tokens)
        self._trainer.start()

    def _make_trainer(self, dataset: Dataset, hyper: Hyperparameters) -> Trainer:
        try:
            return Trainer(
                self._decoder,
                self._state,
                dataset,
                self._order,
                None,
                hyper,
                max_tasklet_tokens=self._tasklet_tokens,
                pending=None,
                progress=Progress(time.monotonic),
                on_step=lambda metrics: None,
                free_bytes=self._workload.activation_bytes,
                activations=self._activations,
                num_multiprocessors=self._device.num_multiprocessors,
                limit_is_fixed=self._workload.tasklet_tokens > 0,
            )
        except CotenantError as error:
            if self._activations is not None:
                self._activations.close()
            lacking = error.message.removesuffix(WAYS_OUT)
            raise InvalidInputError(
                f"--activation-memory: {lacking}Raise it, or lower --seq-len or --r.", param="activation-memory"
            ) from error

    @property
    def has_arena(self) -> bool:
        """Whether activations lie in one, as they do where layers are captured."""
        return self._activations is not None

    @property
    def arena_gib(self) -> float:
        """Memory under it now."""
        return 0.0 if self._activations is None else self._activations.mapped_bytes / 2**30

    def description(self) -> dict[str, Any]:
        """What was measured on what."""
        return {
            "model": self._resolved.name,
            "dtype": str(self._decoder.dtype).removeprefix("torch."),
            "device": self._device.name,
            "ceilings": asdict(self._ceilings),
            **asdict(self._workload),
            "tasklet_tokens": self._tasklet_tokens,
            "micro_batch_tokens": self._micro_batches[0].num_tokens,
            "num_micro_batches": len(self._micro_batches),
            "num_recomputed_layers": self._trainer.num_recomputed,
            "captured": self.has_arena,
            "flop_per_token": flop_per_token(self._resolved.spec),
            "flop_per_token_multiplied": flop_per_token(self._resolved.spec, only_multiplied=True),
        }

    def warm_up(self, num_steps: int) -> None:
        """So many optimizer steps that are not timed. Raises InvalidInputError when memory runs out."""
        with self._memory_suffices():
            for _ in range(num_steps):
                self._run_step()
            self._device.synchronize()
            self._device.finished_tasklets()

    def steps(self, num_steps: int, num_warmup_steps: int = 0) -> dict[str, Any]:
        """Time ``num_steps`` optimizer steps. A step ends where the host has launched its optimizer tasklet, which
        waits for the gradient's norm.

        The shares of the matrix rate are of ``flop_per_token``. ``launching_thread``: the thread's CPU time by the
        wall time, all of it and what of it passed while tasklets were launched rather than waited for; ``process`` is
        that of all threads. On a CPU the launching thread computes as well. Raises InvalidInputError when memory runs
        out.
        """
        self.warm_up(num_warmup_steps)
        with self._memory_suffices():
            return self._timed_steps(num_steps)

    @contextmanager
    def _memory_suffices(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise InvalidInputError(
                f"micro-batches of {self._micro_batches[0].num_tokens} tokens do not fit into the device's memory: "
                f"lower --tasklet-tokens or --seq-len, or add --gradient-checkpointing ({error})",
                param="tasklet-tokens",
            ) from error

    def suspend(self, num_samples: int) -> dict[str, Any]:
        """From 'stop' at a random moment to the device idle.

        As in the executor, 'stop' is noticed between two launches: ``noticed_ms`` is how long that took, and part of
        ``latency_ms``. Tasklets that are in flight then run to their ends.
        """
        latencies_ms, noticed_ms = [], []
        for _ in range(num_samples):
            stop_s = self._run_until_random_moment()
            noticed_ms.append((time.perf_counter() - stop_s) * 1e3)
            self._device.synchronize()
            latencies_ms.append((time.perf_counter() - stop_s) * 1e3)
        return {"num_samples": num_samples, "latency_ms": spread(latencies_ms), "noticed_ms": spread(noticed_ms)}

    def discard(self, num_samples: int) -> dict[str, Any]:
        """From a random moment, as in ``suspend``, to the micro-batch in flight being given up: the device idle, and
        its memory there for another."""
        latencies_ms = []
        for _ in range(num_samples):
            start_s = self._run_until_random_moment()
            while not self._trainer.in_flight:  # between two micro-batches
                self._run_tasklet()
                start_s = time.perf_counter()
            self._device.wait_for_tasklets()
            self._trainer.discard()
            latencies_ms.append((time.perf_counter() - start_s) * 1e3)
        return {"num_samples": num_samples, "latency_ms": spread(latencies_ms)}

    def require(self, num_samples: int, num_bytes: int) -> dict[str, Any] | None:
        """From a random moment of a backward pass, as in ``suspend``, at which ``num_bytes`` are wanted, to another
        arena, on the online lane, having so much memory, cleared; ``unmapped_ms`` is how much of that passed until it
        was unmapped. A tasklet in flight that lies elsewhere may go on. The memory is then released, and training goes
        on. None where activations do not lie in an arena."""
        if self._activations is None:
            return None
        chunk_bytes = self._activations.chunk_bytes
        taker = self._device.create_arena(num_bytes, chunk_bytes)
        latencies_ms, unmapped_ms, unmapped_mib = [], [], []
        for _ in range(num_samples):
            start_s = self._run_until_random_moment()
            while self._next_kind() not in _BACKWARD_KINDS:
                start_s = self._run_until_random_moment()
            before = self._activations.mapped_bytes
            given = self._trainer.require(num_bytes)
            unmapped_ms.append((time.perf_counter() - start_s) * 1e3)
            unmapped = before - self._activations.mapped_bytes
            with self._device.online():
                taker.map(range(min(taker.num_chunks, unmapped // chunk_bytes)))
                if self._device.torch_device.type == "cuda":
                    torch.cuda.current_stream().synchronize()
            latencies_ms.append((time.perf_counter() - start_s) * 1e3)
            unmapped_mib.append(unmapped / 2**20)
            self._device.synchronize()
            taker.unmap(taker.mapped, keep=True)
            self._trainer.release(given)
            while self._activations.mapped_bytes < before:  # micro-batches grow at the next step
                self._run_tasklet()
        taker.close()
        return {
            "num_samples": num_samples,
            "num_bytes": num_bytes,
            "latency_ms": spread(latencies_ms),
            "unmapped_ms": spread(unmapped_ms),
            "mean_ms": round(statistics.fmean(latencies_ms), 4),
            "unmapped_mib": spread(unmapped_mib),
        }

    def uncut(self, num_steps: int) -> dict[str, Any]:
        """Pairs of steps: one whose tasklets are launched one by one, each when the one before is about to end; and one
        whose micro-batches are launched whole. ``difference``: by how much the former took longer, of the latter."""
        cut_s: list[float] = []
        uncut_s: list[float] = []
        for _ in range(num_steps):
            for times_s, run_step in ((cut_s, self._run_step), (uncut_s, self._run_step_uncut)):
                self._device.synchronize()
                start_s = time.perf_counter()
                run_step()
                self._device.synchronize()
                times_s.append(time.perf_counter() - start_s)
        self._device.finished_tasklets()
        return {
            "cut_ms": spread([seconds * 1e3 for seconds in cut_s]),
            "uncut_ms": spread([seconds * 1e3 for seconds in uncut_s]),
            "difference": round(
                statistics.median(cut / uncut for cut, uncut in zip(cut_s, uncut_s, strict=True)) - 1, 5
            ),
        }

    def close(self) -> None:
        self._device.synchronize()
        self._trainer.close()

    def _timed_steps(self, num_steps: int) -> dict[str, Any]:
        finished: list[FinishedTasklet] = []
        steps_s, tokens = [], []
        tokens_before = last_tokens = self._state.trained_tokens
        self._launch_cpu_s = 0.0
        process_s, thread_s = time.process_time(), time.thread_time()
        start_s = last_s = time.perf_counter()
        for _ in range(num_steps):
            self._run_step()
            finished += self._device.finished_tasklets()
            now_s = time.perf_counter()
            steps_s.append(now_s - last_s)
            tokens.append(self._state.trained_tokens - last_tokens)
            last_s, last_tokens = now_s, self._state.trained_tokens
        self._device.synchronize()
        wall_s = time.perf_counter() - start_s
        thread_s, process_s = time.thread_time() - thread_s, time.process_time() - process_s
        finished += self._device.finished_tasklets()
        self._micro_batch_s = statistics.median(steps_s) / len(self._micro_batches)
        trained_tokens = self._state.trained_tokens - tokens_before
        tokens_per_s = trained_tokens / wall_s
        return {
            "num_steps": num_steps,
            "trained_tokens": trained_tokens,
            "tokens_per_s": {
                "mean": round(tokens_per_s, 2),
                **spread([count / seconds for count, seconds in zip(tokens, steps_s, strict=True)]),
            },
            "share_of_matmul_rate": self._share(tokens_per_s, flop_per_token(self._resolved.spec)),
            "share_of_matmul_rate_multiplied": self._share(
                tokens_per_s, flop_per_token(self._resolved.spec, only_multiplied=True)
            ),
            "step_ms": spread([seconds * 1e3 for seconds in steps_s]),
            "tasklet_ms": _by_kind(finished),
            "cpu_share": {
                "launching_thread": round(thread_s / wall_s, 4),
                "launching": round(self._launch_cpu_s / wall_s, 4),
                "process": round(process_s / wall_s, 4),
            },
            "memory": self._peak_memory(),
        }

    def _share(self, tokens_per_s: float, flop: int) -> float:
        return round(tokens_per_s * flop / (self._ceilings.matmul_tflop_s * 1e12), 4)

    def _run_step(self) -> None:
        while self._run_tasklet() is not TaskletKind.OPTIMIZER:
            pass

    def _run_tasklet(self) -> TaskletKind:
        """Launch the next tasklet once the device takes it."""
        kind = self._next_kind()
        self._device.wait_for_room()
        self._device.run_tasklet(self._launch)
        return kind

    def _next_kind(self) -> TaskletKind:
        shape = self._trainer.next_shape
        assert shape is not None, "the job has no end"
        return shape.kind

    def _run_step_uncut(self) -> None:
        while self._next_kind() is not TaskletKind.OPTIMIZER:
            self._device.run_tasklet(self._launch_micro_batch)
        self._device.run_tasklet(self._launch)

    def _launch_micro_batch(self) -> TaskletShape:
        self._launch()
        while self._trainer.in_flight:
            shape = self._launch()
        return TaskletShape(shape.kind, self._micro_batches[0].num_tokens * self._decoder.spec.num_layers)

    def _launch(self) -> TaskletShape:
        start_s = time.thread_time()
        shape = self._trainer.run_tasklet()
        self._launch_cpu_s += time.thread_time() - start_s
        return shape

    def _run_until_random_moment(self) -> float:
        """Train for one to two micro-batches' time, so that every moment within a micro-batch is equally likely, even
        after a discard. Returns the moment, on time.perf_counter's clock; it has just passed."""
        moment_s = time.perf_counter() + self._random.uniform(1.0, 2.0) * self._micro_batch_s

        def has_come() -> bool:
            return time.perf_counter() >= moment_s

        while True:
            self._device.wait_for_room(has_come)  # asked as often as in the executor
            if has_come():
                break
            self._device.run_tasklet(self._launch)
        self._device.finished_tasklets()
        return moment_s

    def _peak_memory(self) -> dict[str, int]:
        """Since training began, the weights included. ``reserved``: with what torch's allocator kept for later. Both
        count all of the arena that activations may take. On a CPU the largest resident set of the process since its
        start."""
        device = self._device.torch_device
        if device.type == "cuda":
            arena = 0 if self._activations is None else self._trainer.left_bytes
            return {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(device) + arena,
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(device) + arena,
            }
        return {"peak_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def _by_kind(finished: Sequence[FinishedTasklet]) -> dict[str, dict[str, float]]:
    times_ms: dict[str, list[float]] = defaultdict(list)
    for tasklet in finished:
        times_ms[tasklet.shape.kind.value].append(tasklet.elapsed_ms)
    return {kind: {"count": len(values), **spread(values)} for kind, values in times_ms.items()}
