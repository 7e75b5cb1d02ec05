"""A step of DPO: the base's scores of its pairs, then the micro-batches of any training step.

The reference is the base with the adapter off, so there is no second model. Its scores are computed again in every
epoch: their last bits depend on what shares a micro-batch, and a job that is taken up again must get the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cotenant.core.job import PreferenceMetrics
from cotenant.core.tasklet import TaskletCycle, TaskletShape
from cotenant.finetune.activations import Activations
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.forward import ForwardPasses
from cotenant.finetune.microbatch import MicroBatch
from cotenant.finetune.preference import PreferenceLoss, PreferenceObjective, Scores, score, split_pairs
from cotenant.finetune.step import StepFigures, TrainingStep
from cotenant.models.decoder import Decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.tape import LayerTape


class PreferenceStep:
    """``TrainingStep`` for pairs; ``examples`` are their sequences, chosen before rejected.

    A discard keeps what is done: the scores of the reference's micro-batches, and the training micro-batches.
    """

    def __init__(
        self,
        decoder: Decoder,
        adapter: LoraAdapter,
        dataset: Dataset,
        examples: Sequence[int],
        loss: PreferenceLoss,
        *,
        step_index: int,
        seed: int,
        max_tasklet_tokens: int,
        num_recomputed: int = 0,
        activations: Activations | None = None,
    ) -> None:
        self._dataset = dataset
        self._examples = tuple(examples)
        self._scores: Scores = {}
        pairs = split_pairs(dataset, examples, max_tasklet_tokens)
        self._reference = ForwardPasses(decoder, None, dataset, [pairs], split_pairs, activations)
        self._objective = PreferenceObjective(loss, dataset, self._scores)
        self._step = TrainingStep(
            decoder,
            adapter,
            dataset,
            examples,
            step_index=step_index,
            seed=seed,
            max_tasklet_tokens=max_tasklet_tokens,
            num_recomputed=num_recomputed,
            objective=self._objective,
            activations=activations,
        )
        self.gradient_scale = self._step.gradient_scale
        self.num_tokens = self._step.num_tokens

    @property
    def num_forward_tokens(self) -> int:
        """Under the base, and with the adapter."""
        return 2 * self.num_tokens

    @property
    def num_tokens_done(self) -> int:
        """Of ``num_tokens``, those whose training micro-batches are done."""
        return self._step.num_tokens_done

    @property
    def upcoming(self) -> tuple[TaskletCycle, ...]:
        return (*self._reference.upcoming, *self._step.upcoming)

    @property
    def next_shape(self) -> TaskletShape:
        return self._step.next_shape if self._reference.done else self._reference.next_shape

    @property
    def done(self) -> bool:
        """Whether the gradient is complete."""
        return self._step.done

    @property
    def started(self) -> bool:
        return self._reference.started or self._step.started

    def figures(self, grad_norm: torch.Tensor) -> StepFigures:
        """The mean of the pairs' losses; the accuracy is that of the chosen answers' tokens."""
        return self._step.figures(grad_norm)

    @property
    def next_forward_layer(self) -> int | None:
        """The layer, if the next tasklet is a forward one of the adapter's pass."""
        return self._step.next_forward_layer if self._reference.done else None

    def run_tasklet(self) -> TaskletShape:
        return self._step.run_tasklet() if self._reference.done else self._reference.run_tasklet(self._take)

    def begin_forward(self) -> tuple[MicroBatch, torch.Tensor]:
        assert self._reference.done, "the reference comes first"
        return self._step.begin_forward()

    def end_forward(self, output: torch.Tensor, tape: LayerTape) -> TaskletShape:
        return self._step.end_forward(output, tape)

    def discard(self) -> None:
        """Drop the activations and gradients of the micro-batch in flight, which starts again."""
        self._reference.discard()
        self._step.discard()

    def limit(self, max_tasklet_tokens: int, *, num_recomputed: int) -> None:
        """As of ``TrainingStep``; what is left of the reference is cut as well."""
        self._reference.limit(max_tasklet_tokens)
        self._step.limit(max_tasklet_tokens, num_recomputed=num_recomputed)

    def preference(self) -> PreferenceMetrics | None:
        """The step's rewards. Waits for the device."""
        return self._objective.metrics(self._examples)

    def _take(self, micro_batch: MicroBatch, nll: torch.Tensor, correct: torch.Tensor) -> None:
        scores, _ = score(self._dataset, micro_batch, nll, correct)
        self._scores.update(scores)
