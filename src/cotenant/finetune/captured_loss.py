"""Cross entropy, with its gradient or without, at fixed addresses, a part of a micro-batch's targets at a time.

The whole of it would keep a GPU for as long as several layers do. A part is about as long as half a layer.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from cotenant.device.cuda.graphs import LaneGraphs
from cotenant.finetune.loss import chunks, empty_losses, losses, losses_and_gradient
from cotenant.finetune.microbatch import MicroBatch
from cotenant.models.decoder import Decoder

_MOST_PARTS = 8
_SMALLEST_PART = 256


def part_size(num_rows: int) -> int:
    """Targets of a part, in a frame of so many rows."""
    return max(_SMALLEST_PART, -(-num_rows // (_MOST_PARTS * 128)) * 128)


def num_parts(num_targets: int, num_rows: int) -> int:
    """At least one: it finds that there is nothing to do."""
    return max(1, -(-num_targets // part_size(num_rows)))


class CapturedLoss:
    """From ``hidden`` [rows, hidden], the last layer's output, to the targets' losses, and to ``gradient``, of the same
    shape; None: no gradients. ``pool``: as of ``CapturedLayers``."""

    def __init__(self, decoder: Decoder, hidden: torch.Tensor, gradient: torch.Tensor | None, pool: Any | None) -> None:
        self._decoder = decoder
        self._hidden = hidden
        self._gradient = gradient
        self._graphs = None if pool is None else LaneGraphs(pool)
        self._size = part_size(len(hidden))
        most = num_parts(len(hidden), len(hidden)) * self._size
        self._rows, self._targets = torch.zeros(2, most, dtype=torch.int64, device=hidden.device)
        self._scales = torch.zeros(most, device=hidden.device)
        self._nll, self._correct = empty_losses(most, hidden.device)
        self._count = 0  # targets
        self._num_begun = 0

    @property
    def num_graphs(self) -> int:
        return 0 if self._graphs is None else len(self._graphs)

    def take_graphs(self) -> list[torch.cuda.CUDAGraph]:
        """See ``LaneGraphs.take_all``."""
        return [] if self._graphs is None else self._graphs.take_all()

    def begin(self, micro_batch: MicroBatch, scales: torch.Tensor | None = None) -> None:
        """Take over the targets. ``scales`` [targets]: of their gradients, if there are any."""
        self._num_begun += 1
        count = self._count = len(micro_batch.rows)
        # What fills the last part up is the first target again, scaled by 0: it adds 0 to that row.
        for numbers, values in ((self._rows, micro_batch.rows), (self._targets, micro_batch.targets)):
            numbers[:count].copy_(values)
            numbers[count:].copy_(values[:1].expand(len(numbers) - count) if count else numbers[count:])
        if self._gradient is not None:
            assert scales is not None, "there are gradients to scale"
            self._scales[:count].copy_(scales)
            self._scales[count:].zero_()
            self._gradient.zero_()

    def run(self, part: int) -> None:
        function = partial(self._run, slice(part * self._size, (part + 1) * self._size))
        if self._graphs is None:
            function()
        else:
            self._graphs.run(part, None, function, may_capture=self._num_begun > 1)

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What ``token_losses`` gives, once all parts have run since ``begin``; until the next."""
        return self._nll[: self._count], self._correct[: self._count]

    @torch.no_grad()
    def _run(self, part: slice) -> None:
        if self._gradient is not None:
            rows, targets = self._rows[part], self._targets[part]
            inputs = self._hidden.index_select(0, rows)
            nll, correct, gradient = losses_and_gradient(self._decoder, inputs, targets, self._scales[part])
            self._gradient.index_add_(0, rows, gradient)
            self._nll[part].copy_(nll)
            self._correct[part].copy_(correct)
            return
        # Logits are float32 here, and there is nothing that takes their place.
        for piece in chunks(self._decoder, part.stop - part.start, torch.float32):
            at = slice(part.start + piece.start, part.start + piece.stop)
            inputs = self._hidden.index_select(0, self._rows[at])
            nll, correct = losses(self._decoder, inputs, self._targets[at])
            self._nll[at].copy_(nll)
            self._correct[at].copy_(correct)
