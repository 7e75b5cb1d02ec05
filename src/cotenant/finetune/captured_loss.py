"""Cross entropy and its gradient at fixed addresses, a part of a micro-batch's targets at a time.

The whole of it would keep a GPU for as long as several layers do. A part is about as long as half a layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cotenant.device.cuda.graphs import LaneGraphs
from cotenant.finetune.loss import LossSums, losses_and_gradient
from cotenant.finetune.microbatch import MicroBatch
from cotenant.models.decoder import Decoder

_MOST_PARTS = 8
_SMALLEST_PART = 256


def part_size(num_rows: int) -> int:
    """Targets of a part, in a frame of so many rows."""
    return max(_SMALLEST_PART, -(-num_rows // (_MOST_PARTS * 128)) * 128)


class CapturedLoss:
    """From ``hidden`` [rows, hidden], the last layer's output, to ``gradient``, of the same shape. ``pool``: as of
    ``CapturedLayers``."""

    def __init__(self, decoder: Decoder, hidden: torch.Tensor, gradient: torch.Tensor, pool: Any | None) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._gradient = gradient
        self._graphs = None if pool is None else LaneGraphs(pool)
        self._size = part_size(len(hidden))
        most = -(-len(hidden) // self._size) * self._size
        self._rows, self._targets = torch.zeros(2, most, dtype=torch.int64, device=hidden.device)
        self._scales, self._weights = torch.zeros(2, most, device=hidden.device)
        self._sums = LossSums.zero(hidden.device)
        self._num_begun = 0

    def begin(self, micro_batch: MicroBatch, total_weight: float) -> None:
        """Take over the targets. ``total_weight``: see ``loss.loss_and_gradient``."""
        self._num_begun += 1
        count = len(micro_batch.rows)
        scales = micro_batch.weights / total_weight if total_weight > 0 else micro_batch.weights
        # What fills the last part up is the first target again, with weight 0: it adds 0 to that row.
        for numbers, values in ((self._rows, micro_batch.rows), (self._targets, micro_batch.targets)):
            numbers[:count].copy_(values)
            numbers[count:].copy_(values[:1].expand(len(numbers) - count) if count else numbers[count:])
        for factors, values in ((self._scales, scales), (self._weights, micro_batch.weights)):
            factors[:count].copy_(values)
            factors[count:].zero_()
        self._gradient.zero_()
        self._sums.weighted_nll.zero_()
        self._sums.num_correct.zero_()
        self._sums.num_targets = count

    def run(self, part: int) -> None:
        function = partial(self._run, slice(part * self._size, (part + 1) * self._size))
        if self._graphs is None:
            function()
        else:
            self._graphs.run(part, None, function, may_capture=self._num_begun > 1)

    def sums(self) -> LossSums:
        """Of the parts that have run since ``begin``."""
        sums = self._sums
        return LossSums(sums.weighted_nll.clone(), sums.num_correct.clone(), sums.num_targets)

    def _run(self, part: slice) -> None:
        rows, weights = self._rows[part], self._weights[part]
        nll, correct, gradient = losses_and_gradient(
            self._decoder, self._hidden.index_select(0, rows), self._targets[part], self._scales[part]
        )
        self._gradient.index_add_(0, rows, gradient)
        self._sums.weighted_nll += torch.where(weights != 0, nll.double() * weights, 0.0).sum()
        self._sums.num_correct += (correct & (weights != 0)).sum()
