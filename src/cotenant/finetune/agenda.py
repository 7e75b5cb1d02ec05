"""What a job runs when: the step at an index, the evaluation after it, and how much of both is left."""

from __future__ import annotations

from cotenant.core.job import DPO, Hyperparameters
from cotenant.finetune.activations import Activations
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.divergence import FinalCheck, example_to_check
from cotenant.finetune.evaluation import Evaluation, ValidationSet
from cotenant.finetune.objective import CrossEntropy
from cotenant.finetune.order import DataOrder
from cotenant.finetune.preference import PreferenceLoss
from cotenant.finetune.preference_evaluation import PreferenceEvaluation, PreferenceValidationSet
from cotenant.finetune.preference_step import PreferenceStep
from cotenant.finetune.step import TrainingStep
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter


class Agenda:
    """``activations``: where layers are captured; None: they run eagerly."""

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        dataset: Dataset,
        order: DataOrder,
        validation: ValidationSet | PreferenceValidationSet | None,
        hyper: Hyperparameters,
        activations: Activations | None,
    ) -> None:
        self._decoder = decoder
        self._adapter = adapter
        self._dataset = dataset
        self._order = order
        self._validation = validation
        self._hyper = hyper
        self._activations = activations
        # Evaluations of the whole validation set: after so many steps, beside those at the ends of epochs.
        self._full_every = hyper.eval_steps if hyper.selects else 0

    def step(self, index: int, max_tokens: int, num_recomputed: int) -> TrainingStep | PreferenceStep:
        """In micro-batches of at most ``max_tokens`` tokens, of whose layers ``num_recomputed`` keep their inputs
        alone."""
        hyper, examples = self._hyper, self._order.step(index)
        inputs = (self._decoder, self._adapter, self._dataset, examples)
        if hyper.method == DPO:
            return PreferenceStep(
                *inputs,
                PreferenceLoss(hyper.beta, hyper.label_smoothing),
                step_index=index,
                seed=hyper.seed,
                max_tasklet_tokens=max_tokens,
                num_recomputed=num_recomputed,
                activations=self._activations,
            )
        return TrainingStep(
            *inputs,
            step_index=index,
            seed=hyper.seed,
            max_tasklet_tokens=max_tokens,
            num_recomputed=num_recomputed,
            objective=CrossEntropy(),
            activations=self._activations,
        )

    def evaluation_after(self, step: int, max_tokens: int) -> Evaluation | PreferenceEvaluation | FinalCheck | None:
        """The evaluation due after ``step`` steps: of all of the validation set where an epoch ends, or wherever the
        best step is looked for. Without a validation set the last step's weights are looked at, before they are
        exported."""
        if self._validation is None:
            if step < self._order.total_steps:
                return None
            example = example_to_check(self._dataset, self._order.step(step - 1))
            return FinalCheck(self._decoder, self._adapter, self._dataset, example, self._activations)
        if not self._order.evaluates(step, self._hyper.eval_steps):
            return None
        return self._validation.evaluation(
            self._decoder,
            self._adapter,
            full=self._order.evaluates(step, self._full_every),
            max_tokens=max_tokens,
            activations=self._activations,
        )

    def evaluated_tokens_after(self, step: int) -> int:
        """Of all evaluations that are due after later steps."""
        if self._validation is None:
            return 0
        order, every = self._order, self._hyper.eval_steps
        num_full = order.num_evaluations(self._full_every) - order.num_evaluations(self._full_every, step)
        num_all = order.num_evaluations(every) - order.num_evaluations(every, step)
        return self._validation.num_batch_tokens * (num_all - num_full) + self._validation.num_tokens * num_full
