"""What an unfinished job holds, and how it comes about: its state, its share of the device's memory, its trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from cotenant.core.job import JobSpec, StepMetrics
from cotenant.device import Device
from cotenant.finetune.activations import Activations
from cotenant.finetune.checkpoint import TrainerState
from cotenant.finetune.footprint import require_state
from cotenant.finetune.order import DataOrder
from cotenant.finetune.preparation import Prepared
from cotenant.finetune.progress import Progress
from cotenant.finetune.state import TrainingState
from cotenant.finetune.trainer import Trainer
from cotenant.models.decoder import Decoder


@dataclass(slots=True)
class Training:
    """See the module."""

    state: TrainingState
    trainer: Trainer
    order: DataOrder
    progress: Progress


Resume = Callable[[TrainingState, tuple[TrainerState, dict[str, torch.Tensor]] | None], StepMetrics | None]
"""Takes a checkpoint up, if there is one, and returns the metrics of a step that still awaits its evaluation."""


def make_training(
    decoder: Decoder,
    spec: JobSpec,
    prepared: Prepared,
    max_tasklet_tokens: int,
    *,
    resume: Resume,
    on_step: Callable[[StepMetrics], None],
    clock: Callable[[], float],
    free_bytes: int | None,
    device: Device | None,
    limit_is_fixed: bool,
) -> Training:
    """As of ``TrainingJob``. Raises CotenantError if nothing has room."""
    hyper, order = spec.hyperparameters, prepared.order
    measured = prepared.validation.longest if prepared.validation is not None else 0
    taken_bytes = 0
    if free_bytes is not None:
        num_weights = sum(matrix.numel() for matrix in prepared.adapter.parameters())
        taken_bytes = require_state(decoder.spec, decoder.dtype, num_weights, order.longest, measured, free_bytes)
    state = prepared.state
    if state is None:
        state = TrainingState(prepared.adapter.trainable_on(decoder.device), spec, prepared.fingerprint)
    pending = resume(state, prepared.checkpoint)
    progress = Progress(clock)
    activations = None
    if device is not None:
        activations = Activations.for_job(
            decoder,
            state,
            device,
            max(max_tasklet_tokens, order.longest),
            recompute_all=hyper.gradient_checkpointing,
            longest_measured=measured,
            pack=prepared.pack,
        )
    trainer = Trainer(
        decoder,
        state,
        prepared.dataset,
        order,
        prepared.validation,
        hyper,
        max_tasklet_tokens=max_tasklet_tokens,
        pending=pending,
        progress=progress,
        on_step=on_step,
        free_bytes=free_bytes,
        taken_bytes=taken_bytes,
        activations=activations,
        num_multiprocessors=device.num_multiprocessors if device is not None else None,
        limit_is_fixed=limit_is_fixed,
    )
    return Training(state, trainer, order, progress)
