"""The training state of a job: what an optimizer step changes, and what a checkpoint keeps."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict

import msgspec
import torch

from cotenant.core.errors import ConflictError
from cotenant.core.job import Hyperparameters, JobSpec, StepMetrics
from cotenant.finetune.checkpoint import Snapshot, TrainerState
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.optimizer import Optimizer
from cotenant.models.lora import LoraAdapter

_MASTER = "master"


class TrainingState:
    """The adapter's master weights, the optimizer's moments, and how many steps and tokens went into them.

    ``before_step``: called before the optimizer changes them; it waits for whoever still reads them.
    """

    def __init__(self, adapter: LoraAdapter, spec: JobSpec, fingerprint: str) -> None:
        self.adapter = adapter
        self.step = 0
        self.trained_tokens = 0
        self.before_step: Callable[[], None] = _nothing
        self._fingerprint = fingerprint
        self._parameters = adapter.named_parameters()
        self.optimizer = Optimizer(self._parameters, spec.hyperparameters)

    def trainer_state(self, metrics: StepMetrics, *, announced: bool, needs_evaluation: bool) -> TrainerState:
        """All but the tensors, for a checkpoint of the last step, whose ``metrics`` these are."""
        return TrainerState(
            step=self.step,
            epoch=metrics.epoch,
            trained_tokens=self.trained_tokens,
            announced=announced,
            metrics=metrics,
            needs_evaluation=needs_evaluation,
            fingerprint=self._fingerprint,
        )

    def begin_copy(self) -> StateCopier:
        """Call on the thread that trains, in whose order of launches the tensors are copied as they are now. No step
        may be taken before that is over."""
        return StateCopier(self.adapter, self.optimizer)

    def restore(self, state: TrainerState, tensors: Mapping[str, torch.Tensor]) -> None:
        """Continue from a checkpoint.

        Raises:
            ConflictError: the checkpoint was written by a job with other settings or other data.
        """
        if state.fingerprint != self._fingerprint:
            raise ConflictError(
                f"The checkpoint at step {state.step} was written with other settings or training data than the job "
                "has now, so the job cannot go on from it. Create a new job.",
                code="checkpoint_mismatch",
            )
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(tensors[f"{_MASTER}.{name}"])
        self.optimizer.load_moments(tensors, state.step)
        self.step = state.step
        self.trained_tokens = state.trained_tokens


def fingerprint(spec: JobSpec, dataset: Dataset) -> str:
    """Tells jobs apart that would train differently: base model, settings and data (SHA-256)."""
    defaults, given = asdict(Hyperparameters()), asdict(spec.hyperparameters)
    # Settings with their default are left out: a later version that has more of them goes on with a job of this one.
    changed = {name: given[name] for name in sorted(given) if given[name] != defaults[name]}
    settings = msgspec.json.encode((spec.base_model, changed))
    return hashlib.sha256(settings + dataset.digest().encode()).hexdigest()


class StateCopier:
    """Copies a training state; ``run`` may be called on any thread. From a GPU it takes as long as some decode
    steps."""

    def __init__(self, adapter: LoraAdapter, optimizer: Optimizer) -> None:
        self._adapter = adapter
        self._optimizer = optimizer
        self._begins: torch.cuda.Event | None = None
        if optimizer.device.type == "cuda":
            self._begins = torch.cuda.Event()
            self._begins.record()

    def run(self) -> Snapshot:
        """The copy, when it is there."""
        masters, moments = self._optimizer.copied(self._begins)
        tensors = {f"{_MASTER}.{name}": tensor for name, tensor in masters.items()} | moments
        return Snapshot(self._adapter.with_weights(masters), tensors)


def _nothing() -> None:
    """Nobody reads them."""
