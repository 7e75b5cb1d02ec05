"""Direct preference optimisation: the loss over pairs of answers, and what is reported of it.

Rafailov et al., Direct Preference Optimization, equation 7, with TRL's label smoothing (conservative DPO: Mitchell,
A note on DPO with noisy preferences, 2023). For a pair with log-probabilities ``p`` under the adapter and ``r`` under
the base, ``z = beta * ((p_chosen - r_chosen) - (p_rejected - r_rejected))`` and the loss is
``-(1 - s) * log sigmoid(z) - s * log sigmoid(-z)``; a step's loss is the mean over its pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from cotenant.core.job import PreferenceMetrics
from cotenant.device.upload import upload
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.loss import LossSums
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape
from cotenant.finetune.order import pack

# Log-probabilities of whole answers, by their sequence in the dataset: float64 scalars on the decoder's device.
Scores = dict[int, torch.Tensor]


@dataclass(frozen=True, slots=True)
class PreferenceLoss:
    """The sigmoid loss. ``beta`` weighs staying near the base against preferring the chosen answers."""

    beta: float
    label_smoothing: float

    def losses(self, policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The loss of each pair [pairs]. Both arguments: [pairs, 2], chosen before rejected."""
        z = self._z(policy, reference)
        return -(1 - self.label_smoothing) * F.logsigmoid(z) - self.label_smoothing * F.logsigmoid(-z)

    def slopes(self, policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        """The derivative of each pair's loss in its two log-probabilities under the adapter [pairs, 2]."""
        z = self._z(policy, reference)
        slope = self.beta * (self.label_smoothing * torch.sigmoid(z) - (1 - self.label_smoothing) * torch.sigmoid(-z))
        return torch.stack([slope, -slope], dim=1)

    def metrics(self, policy: torch.Tensor, reference: torch.Tensor) -> PreferenceMetrics | None:
        """Means over pairs; None if one is not finite. Both arguments: [pairs, 2]."""
        rewards = self.beta * (policy - reference)  # [pairs, 2]
        margins = rewards[:, 0] - rewards[:, 1]  # [pairs]
        means = torch.stack([*rewards.mean(0), (margins > 0).double().mean(), margins.mean(), *policy.mean(0)])
        return PreferenceMetrics(*means.tolist()) if bool(torch.isfinite(means).all()) else None

    def _z(self, policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
        ratio = policy - reference
        return self.beta * (ratio[:, 0] - ratio[:, 1])


def pairs_of(scores: Mapping[int, torch.Tensor], sequences: Sequence[int]) -> torch.Tensor:
    """The scores of ``sequences`` (chosen, rejected, chosen, …) as [pairs, 2]."""
    return torch.stack([scores[sequence] for sequence in sequences]).view(-1, 2)


def split_pairs(dataset: Dataset, sequences: Sequence[int], max_tokens: int) -> tuple[MicroBatchShape, ...]:
    """Like ``microbatch.split``, with the two sequences of a pair together."""
    pairs = [(sequences[at], sequences[at + 1]) for at in range(0, len(sequences), 2)]
    bins = pack([sum(dataset.lengths[sequence] for sequence in pair) for pair in pairs], max_tokens)
    return tuple(_shape(dataset, [sequence for item in items for sequence in pairs[item]]) for items in bins)


def _shape(dataset: Dataset, sequences: Sequence[int]) -> MicroBatchShape:
    lengths = [dataset.lengths[sequence] for sequence in sequences]
    num_targets = sum(dataset.num_targets[sequence] for sequence in sequences)
    return MicroBatchShape(tuple(sequences), sum(lengths), num_targets, max(lengths))


def score(
    dataset: Dataset, micro_batch: MicroBatch, nll: torch.Tensor, correct: torch.Tensor
) -> tuple[Scores, LossSums]:
    """From what ``token_losses`` gives to the log-probability of each sequence's answer. The sums are of the chosen
    answers' tokens alone."""
    return _scores(dataset, micro_batch, nll), _chosen_sums(dataset, micro_batch, nll, correct)


class PreferenceObjective:
    """The loss of one step's pairs, given the base's scores; keeps the adapter's for the step's metrics."""

    def __init__(self, loss: PreferenceLoss, dataset: Dataset, reference: Mapping[int, torch.Tensor]) -> None:
        """``reference`` may be filled until the first micro-batch's loss runs."""
        self._loss = loss
        self._dataset = dataset
        self._reference = reference
        self._policy: Scores = {}

    def split(self, dataset: Dataset, examples: Sequence[int], max_tokens: int) -> tuple[MicroBatchShape, ...]:
        return split_pairs(dataset, examples, max_tokens)

    def total_weight(self, dataset: Dataset, examples: Sequence[int]) -> float:
        """The number of pairs."""
        return len(examples) / 2

    def scales(self, micro_batch: MicroBatch, total_weight: float) -> torch.Tensor:
        """1: what a token's loss counts depends on those of its pair."""
        return torch.ones_like(micro_batch.weights)

    def finish(
        self,
        micro_batch: MicroBatch,
        total_weight: float,
        nll: torch.Tensor,
        correct: torch.Tensor,
        gradient: torch.Tensor,
    ) -> LossSums:
        """The summed loss of the micro-batch's pairs. A pair's loss depends on its tokens through two sums, so each
        token's own gradient is scaled by the loss's slope in the sum that it belongs to."""
        scores = _scores(self._dataset, micro_batch, nll)
        self._policy.update(scores)
        policy, reference = (pairs_of(part, micro_batch.examples) for part in (scores, self._reference))
        sums = _chosen_sums(self._dataset, micro_batch, nll, correct)
        sums.weighted_nll = self._loss.losses(policy, reference).sum()
        slopes = self._loss.slopes(policy, reference).flatten() / total_weight  # [sequences]
        counts = upload(torch.tensor(_counts(self._dataset, micro_batch)), slopes.device)
        per_token = (
            -torch.repeat_interleave(slopes, counts, output_size=len(nll)).float() * micro_batch.weights
        )  # [targets]
        rows = micro_batch.rows
        gradient[rows] = (gradient[rows].float() * per_token.unsqueeze(1)).to(gradient.dtype)
        return sums

    def metrics(self, examples: Sequence[int]) -> PreferenceMetrics | None:
        """Of the step, once all its micro-batches' losses have run."""
        return self._loss.metrics(pairs_of(self._policy, examples), pairs_of(self._reference, examples))


def _counts(dataset: Dataset, micro_batch: MicroBatch) -> list[int]:
    """Target tokens of each sequence."""
    return [dataset.num_targets[sequence] for sequence in micro_batch.examples]


def _scores(dataset: Dataset, micro_batch: MicroBatch, nll: torch.Tensor) -> Scores:
    weighted = -(nll.double() * micro_batch.weights)  # [targets]
    parts = torch.split(weighted, _counts(dataset, micro_batch))
    return {sequence: part.sum() for sequence, part in zip(micro_batch.examples, parts, strict=True)}


def _chosen_sums(dataset: Dataset, micro_batch: MicroBatch, nll: torch.Tensor, correct: torch.Tensor) -> LossSums:
    sums = LossSums.zero(nll.device)
    counts = _counts(dataset, micro_batch)
    chosen = [
        (part_nll, part_weights, part_correct)
        for sequence, part_nll, part_weights, part_correct in zip(
            micro_batch.examples,
            torch.split(nll, counts),
            torch.split(micro_batch.weights, counts),
            torch.split(correct, counts),
            strict=True,
        )
        if sequence % 2 == 0
    ]
    for part in chosen:
        sums += LossSums.of(*part)
    return sums
