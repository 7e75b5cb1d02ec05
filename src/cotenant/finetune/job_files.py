"""What a job keeps in its folder: the metrics file, checkpoints and the finished adapter, written in the background."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch

from cotenant.core.job import JobSpec, StepMetrics
from cotenant.core.job_layout import CHECKPOINTS_FOLDER
from cotenant.finetune.checkpoint import CheckpointError, CheckpointStore, Snapshot, TrainerState
from cotenant.finetune.export import export_adapter, export_copy, exported_best_step, is_exported
from cotenant.finetune.metrics import MetricsLog
from cotenant.finetune.state import StateCopier
from cotenant.finetune.writer import FileWriter
from cotenant.wire.messages import CheckpointSaved, FromWorker, JobSucceeded

logger = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
ADAPTER_FOLDER = "adapter"
# Checkpoints that are being written or wait for it; each is a copy of the training state in memory.
_MOST_UNWRITTEN = 2


class JobFiles:
    """Reads at once; writes on a thread of its own, in the order of the calls. ``take`` gives what became of it.

    What is written is copied on another thread, for a disk may be slow, and while something ``is_copied`` it must stay
    as it is.
    """

    def __init__(self, spec: JobSpec, tokenizer_folder: Path | None) -> None:
        folder = Path(spec.folder)
        self.adapter_path = folder / ADAPTER_FOLDER
        self._spec = spec
        self._tokenizer_folder = tokenizer_folder
        self._log = MetricsLog(folder / METRICS_FILE)
        self._checkpoints = CheckpointStore(
            folder / CHECKPOINTS_FOLDER, spec.base_model, tokenizer_folder, spec.hyperparameters.save_total_limit
        )
        self._writer = FileWriter(spec.job_id)
        self._copier = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"copier-{spec.job_id}")
        self._copies: deque[Future[Snapshot]] = deque()  # oldest first
        self._unwritten: deque[Future[Sequence[FromWorker]]] = deque()  # checkpoints, oldest first

    # Reading

    @property
    def finished(self) -> bool:
        """Whether the finished adapter is there."""
        return is_exported(self.adapter_path)

    def steps(self) -> list[StepMetrics]:
        """The recorded steps, oldest first."""
        return self._log.read()

    def keep_steps(self, num_steps: int) -> list[StepMetrics]:
        """Forget the recorded steps after these."""
        return self._log.keep(num_steps)

    def newest_checkpoint(self) -> tuple[TrainerState, dict[str, torch.Tensor]] | None:
        """See ``CheckpointStore.newest``."""
        return self._checkpoints.newest()

    def tidy_checkpoints(self, step: int, best_step: int | None) -> None:
        """See ``CheckpointStore.tidy``. Call before anything is written."""
        self._checkpoints.tidy(step, best_step)

    def announced(self, up_to_step: int) -> list[CheckpointSaved]:
        """What was or should have been said of the checkpoints up to this step."""
        return [
            CheckpointSaved(self._spec.job_id, state.step, str(path), state.metrics)
            for state, path in self._checkpoints.announced()
            if state.step <= up_to_step
        ]

    def succeeded(self, total_steps: int, trained_tokens: int) -> JobSucceeded:
        """What is to be said of the finished adapter."""
        best_step = exported_best_step(self.adapter_path)
        return JobSucceeded(self._spec.job_id, str(self.adapter_path), trained_tokens, total_steps, best_step)

    # Writing

    def write_metrics(self, metrics: StepMetrics) -> None:
        """Record a step."""
        self._writer.submit(partial(self._write_metrics, metrics))

    def write_checkpoint(self, state: TrainerState, tensors: StateCopier, best_step: int | None) -> None:
        """Write a checkpoint; ``CheckpointStore.write`` says which of the earlier ones stay."""
        copied = self._copy(tensors)
        self._unwritten.append(self._writer.submit(partial(self._write_checkpoint, state, copied, best_step)))

    @property
    def is_copied(self) -> bool:
        """Whether something is being copied."""
        while self._copies and self._copies[0].done():
            self._copies.popleft()
        return bool(self._copies)

    def wait_until_copied(self) -> None:
        """Block until nothing is."""
        wait(self._copies)

    def _copy(self, tensors: StateCopier) -> Future[Snapshot]:
        self._copies.append(self._copier.submit(tensors.run))
        return self._copies[-1]

    @property
    def is_behind(self) -> bool:
        """Whether so many checkpoints are not written yet that there should not be another one before some are."""
        while self._unwritten and self._unwritten[0].done():
            self._unwritten.popleft()
        return len(self._unwritten) >= _MOST_UNWRITTEN

    def write_result(self, last: StateCopier, best_step: int | None, total_steps: int, trained_tokens: int) -> None:
        """Export the adapter of checkpoint ``best_step``, or the last one's where that is None or damaged."""
        copied = self._copy(last)
        self._writer.submit(partial(self._write_result, copied, best_step, total_steps, trained_tokens))

    def take(self) -> list[FromWorker]:
        """What may be said since the last call, in order. Raises WriteError as ``FileWriter.take`` does."""
        return self._writer.take()

    @property
    def idle(self) -> bool:
        """Whether nothing is being written or waiting to be taken."""
        return self._writer.idle

    def wait(self) -> None:
        """Block until everything that is being written is on disk (or has failed)."""
        self._writer.wait()

    def close(self) -> None:
        """End the threads, after what they were given."""
        self._copier.shutdown()
        self._writer.close()

    # On the writer's thread

    def _write_metrics(self, metrics: StepMetrics) -> list[FromWorker]:
        self._log.append(metrics)
        return []

    def _write_checkpoint(
        self, state: TrainerState, copied: Future[Snapshot], best_step: int | None
    ) -> list[FromWorker]:
        self._log.sync()  # the checkpoint's steps must be readable before the checkpoint is
        path = self._checkpoints.write(state, copied.result(), best_step)
        if not state.announced:
            return []
        return [CheckpointSaved(self._spec.job_id, state.step, str(path), state.metrics)]

    def _write_result(
        self, last: Future[Snapshot], best_step: int | None, total_steps: int, trained_tokens: int
    ) -> list[FromWorker]:
        if best_step is not None:
            try:
                export_copy(self._checkpoints.adapter_folder(best_step), self.adapter_path, best_step)
            except CheckpointError as error:
                logger.warning("Job %s exports its last step, not step %d: %s", self._spec.job_id, best_step, error)
                best_step = None
        if best_step is None:
            export_adapter(last.result().adapter, self.adapter_path, self._spec.base_model, self._tokenizer_folder)
        return [self.succeeded(total_steps, trained_tokens)]
