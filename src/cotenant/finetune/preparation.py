"""What a job begins with that no other thread waits for: reading and checking its files, laying out its first step, and
laying out what it trains on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cotenant.core.errors import CotenantError
from cotenant.core.job import JobSpec, StepMetrics
from cotenant.device.transfer import to_device
from cotenant.durable import remove_leftovers
from cotenant.finetune.activations import can_capture
from cotenant.finetune.checkpoint import TrainerState
from cotenant.finetune.data import load_training, load_validation, unmeasured
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.evaluation import ValidationSet
from cotenant.finetune.footprint import require_state
from cotenant.finetune.job_files import METRICS_FILE, JobFiles
from cotenant.finetune.job_setup import new_adapter
from cotenant.finetune.order import DataOrder
from cotenant.finetune.preference_evaluation import PreferenceValidationSet
from cotenant.finetune.schedule import schedule_warnings
from cotenant.finetune.selection import best_of
from cotenant.finetune.state import TrainingState, fingerprint
from cotenant.finetune.writer import as_write_error
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.spec import ModelSpec
from cotenant.models.training_pack import TrainingPack
from cotenant.wire.messages import CheckpointSaved

_Checkpoint = tuple[TrainerState, dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class Prepared:
    """``adapter``: fresh. ``checkpoint``: the newest whole one with its tensors; None: there is none. ``recorded``: the
    steps up to there. ``validation``: None where nothing is measured. ``warnings``: for the job's owner. ``state``:
    what ``lay_out`` has made of the adapter, and ``pack`` of that, where layers are captured; None: not made.
    ``announced``: what there is to say of the checkpoints, up to the newest."""

    dataset: Dataset
    order: DataOrder
    fingerprint: str
    adapter: LoraAdapter
    checkpoint: _Checkpoint | None
    recorded: tuple[StepMetrics, ...]
    validation: ValidationSet | PreferenceValidationSet | None
    warnings: tuple[str, ...]
    state: TrainingState | None = None
    pack: TrainingPack | None = None
    announced: tuple[CheckpointSaved, ...] = ()

    @property
    def device_bytes(self) -> int:
        """Of the device's memory, what this has taken: a part of what the job needs, and a checkpoint, which it gives
        back as it begins."""
        tensors = [*self.adapter.parameters(), *(() if self.checkpoint is None else self.checkpoint[1].values())]
        tensors += () if self.state is None else (self.state.optimizer.gradient,)
        tensors += () if self.pack is None else self.pack.tensors()
        return sum(tensor.nbytes for tensor in tensors if tensor.device.type != "cpu")

    def on_cpu(self) -> Prepared:
        """The same, which takes none of it."""
        adapter, checkpoint = _moved(torch.device("cpu"), self.adapter, self.checkpoint)
        return replace(self, adapter=adapter, checkpoint=checkpoint, state=None, pack=None)


def prepare(spec: JobSpec, model: ModelSpec, max_tasklet_tokens: int) -> Prepared | None:
    """For a ``TrainingJob`` of the same arguments; None if it is finished. Takes seconds for a large file, and may run
    on any thread. It puts in order what a crash left undone, and begins the file of metrics.

    Raises:
        InvalidInputError: the data or the settings cannot be used.
        CotenantError: the job's folder cannot be read or written.
    """
    files = JobFiles(spec, None)
    try:
        remove_leftovers(Path(spec.folder))  # a checkpoint may be among them
    except OSError as error:
        raise as_job_error(error) from error
    if files.finished:
        return None
    dataset = load_training(spec, model)
    order = DataOrder(dataset.lengths, spec.hyperparameters)
    adapter = new_adapter(spec, model)
    job_fingerprint = fingerprint(spec, dataset)
    announced: tuple[CheckpointSaved, ...] = ()
    try:
        checkpoint = files.newest_checkpoint()
        recorded = _recorded(files, checkpoint, job_fingerprint)
        if checkpoint is not None and checkpoint[0].fingerprint == job_fingerprint:  # a kill may have come before
            files.tidy_checkpoints(checkpoint[0].step, best_of(recorded, spec.hyperparameters).result_step)
            announced = tuple(files.announced(checkpoint[0].step))
    except OSError as error:
        raise as_job_error(error) from error
    step = 0 if checkpoint is None else checkpoint[0].step
    if step < order.total_steps:
        order.step(step)  # which it then has at hand, with the whole epoch's
    validation = load_validation(spec, model, max_tasklet_tokens)
    warnings = _warnings(spec, model, order, len(dataset), has_validation=validation is not None)
    return Prepared(
        dataset, order, job_fingerprint, adapter, checkpoint, recorded, validation, warnings, announced=announced
    )


def lay_out(prepared: Prepared, spec: JobSpec, decoder: Decoder, free_bytes: int) -> Prepared:
    """The same with its training state on the decoder's device, and its checkpoint; as it is where the job would not
    fit into ``free_bytes`` of the device's memory. For an 8B model's adapter of rank 16 it takes tens of milliseconds,
    and may run on any thread."""
    measured = 0 if prepared.validation is None else prepared.validation.longest
    num_weights = sum(matrix.numel() for matrix in prepared.adapter.parameters())
    if prepared.checkpoint is not None:
        free_bytes -= sum(tensor.nbytes for tensor in prepared.checkpoint[1].values())
    try:
        require_state(decoder.spec, decoder.dtype, num_weights, prepared.order.longest, measured, free_bytes)
    except CotenantError:
        return prepared  # which the job says as it begins, if it is so then
    try:
        adapter, checkpoint = _moved(decoder.device, prepared.adapter, prepared.checkpoint)
        state = TrainingState(adapter, spec, prepared.fingerprint)
        pack = TrainingPack(adapter, decoder.dtype, state.optimizer.gradient) if can_capture(decoder) else None
    except torch.OutOfMemoryError:
        return prepared
    return replace(prepared, adapter=adapter, checkpoint=checkpoint, state=state, pack=pack)


def _recorded(files: JobFiles, checkpoint: _Checkpoint | None, job_fingerprint: str) -> tuple[StepMetrics, ...]:
    """The steps that the job does not take again; those behind them are forgotten. Of a checkpoint that is another
    job's, with which this one will not begin, nothing is."""
    if checkpoint is None:
        return tuple(files.keep_steps(0))
    state = checkpoint[0]
    if state.fingerprint != job_fingerprint:
        return ()
    num_steps = state.step - state.needs_evaluation
    steps = files.steps()
    if len(steps) < num_steps:  # going on would leave a hole, behind which nothing would ever be read
        raise CotenantError(
            f"{METRICS_FILE} in the job's folder is damaged: it tells of {len(steps)} steps, and the newest checkpoint "
            f"is of step {state.step}. Restore it and resume the job; without checkpoints the job begins anew.",
            code="io_error",
        )
    return tuple(files.keep_steps(num_steps))


def _moved(
    device: torch.device, adapter: LoraAdapter, checkpoint: _Checkpoint | None
) -> tuple[LoraAdapter, _Checkpoint | None]:
    adapter = adapter.with_weights(to_device(adapter.named_parameters(), device)).trainable_on(device)
    if checkpoint is not None:
        checkpoint = checkpoint[0], to_device(checkpoint[1], device)
    return adapter, checkpoint


def as_job_error(error: OSError) -> CotenantError:
    """What went wrong in the job's folder, for its owner."""
    failure = as_write_error(error)
    return CotenantError(failure.message, code=failure.code)


def _warnings(
    spec: JobSpec, model: ModelSpec, order: DataOrder, num_examples: int, *, has_validation: bool
) -> tuple[str, ...]:
    hyper = spec.hyperparameters
    warnings = []
    if hyper.packing and hyper.batch_size > order.num_units:
        warnings.append(
            f"packing makes {order.num_units} rows of the training file's {num_examples} examples, fewer than the "
            f"{hyper.batch_size} of a batch (batch_size, given or automatic): each step takes all of them"
        )
    if not has_validation and spec.validation_path is not None:
        warnings.append(unmeasured(spec, model))
    warnings += schedule_warnings(hyper, order.total_steps)
    return tuple(warnings)
