"""A training micro-batch cut into tasklets: one layer forward, the loss, one layer backward at a time.

A layer's forward leaves a tape and its backward reads it. Between the two lie tensors and attention's own small graph,
and no thread. So suspending is simply not running the next tasklet. (LLMStation, section 5.1, gets there with
coroutines.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import accumulate

import torch

from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape, runs_of
from cotenant.finetune.loss import LossSums, token_losses
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape
from cotenant.finetune.objective import Objective, loss_and_gradient
from cotenant.models.decoder import Decoder
from cotenant.models.layer_backward import layer_backward
from cotenant.models.tape import LayerTape


@contextmanager
def done_once() -> Iterator[None]:
    """Of a tasklet what cannot be done again: out of memory there, it is no tasklet that another try would help. Raises
    MemoryError instead."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryError(str(error)) from error


@lru_cache(maxsize=1024)
def _the_same(cycle: TaskletCycle) -> TaskletCycle:
    """One object for all equal cycles, of whichever micro-batch: planning finds what it knows of them by identity."""
    return cycle


@lru_cache(maxsize=1024)
def _rest_of(runs: tuple[TaskletRun, ...], place: int, within: int) -> TaskletCycle:
    """What is left of a turn of ``runs`` at the tasklet ``within`` of the run at ``place``; likewise one object."""
    shape, count = runs[place].shape, runs[place].count
    return TaskletCycle((TaskletRun(shape, count - within), *runs[place + 1 :]))


class Cursor:
    """A place in a fixed sequence of tasklets: ``run`` is the run that the next one belongs to, of all runs of all
    turns, ``within`` how many tasklets of it are done."""

    def __init__(self, cycles: tuple[TaskletCycle, ...]) -> None:
        cycles = tuple(map(_the_same, cycles))
        self._cycles = cycles
        self._runs = tuple(runs_of(cycles))
        lengths = [cycle.count * len(cycle.runs) for cycle in cycles]
        self._starts = [0, *accumulate(lengths)]  # of the cycles, as numbers of runs
        self._shape = self._runs[0].shape
        self.run = 0
        self.within = 0

    @property
    def remaining(self) -> tuple[TaskletCycle, ...]:
        """What is left to run, in order."""
        if self.done:
            return ()
        index = bisect_right(self._starts, self.run) - 1
        cycle = self._cycles[index]
        turn, place = divmod(self.run - self._starts[index], len(cycle.runs))
        left, after = cycle.count - turn, self._cycles[index + 1 :]
        if place == self.within == 0:
            return (TaskletCycle(cycle.runs, left), *after)
        whole = (TaskletCycle(cycle.runs, left - 1),) if left > 1 else ()
        return (_rest_of(cycle.runs, place, self.within), *whole, *after)

    @property
    def done(self) -> bool:
        return self.run == len(self._runs)

    @property
    def ends_run(self) -> bool:
        """Whether the next tasklet is the last of its run."""
        return self.within + 1 == self._runs[self.run].count

    @property
    def is_last(self) -> bool:
        """Whether the next tasklet is the last of all."""
        return self.run + 1 == len(self._runs) and self.ends_run

    @property
    def shape(self) -> TaskletShape:
        """The next tasklet."""
        return self._shape

    def advance(self) -> None:
        self.within += 1
        if self.within == self._runs[self.run].count:
            self.seek(self.run + 1)

    def seek(self, run: int, within: int = 0) -> None:
        """Move to a tasklet of a run, or with the number of runs to the end."""
        self.run, self.within = run, within
        if not self.done:
            self._shape = self._runs[run].shape


class TrainingPass:
    """Forward, loss and backward of one micro-batch. Its gradients are its own until ``commit``.

    ``num_recomputed``: so many layers, the first ones, keep their inputs alone; what their backward needs besides is
    computed again before it.
    """

    def __init__(self, decoder: Decoder, micro_batch: MicroBatch, *, num_recomputed: int = 0) -> None:
        self._decoder = decoder
        self._micro_batch = micro_batch
        self._num_recomputed = num_recomputed
        self._edge: torch.Tensor | None = None  # [tokens, hidden], the next layer's input
        self._kept: list[LayerTape | torch.Tensor] = []  # of the layers done: tapes or, where they suffice, inputs
        self._gradient: torch.Tensor | None = None  # [tokens, hidden], at the output of the last of them
        self._gradients: list[tuple[torch.Tensor, torch.Tensor]] = []  # LoRA matrices, each with its gradient

    @property
    def micro_batch(self) -> MicroBatch:
        return self._micro_batch

    @property
    def layer(self) -> int:
        """The layer that the next forward tasklet runs."""
        return len(self._kept)

    def begin_forward(self) -> torch.Tensor:
        """The next layer's input [tokens, hidden]."""
        if self._edge is None:
            self._edge = self._decoder.embed(self._micro_batch.batch.token_ids)
        return self._edge

    def end_forward(self, output: torch.Tensor, tape: LayerTape) -> None:
        """Keep a layer's output [tokens, hidden], and the tape that its forward filled."""
        self._kept.append(self.begin_forward() if self._keeps_input_alone else tape)
        self._edge = output

    @torch.no_grad()
    def forward(self) -> None:
        """Run the next layer."""
        tape, batch = self._new_tape(), self._micro_batch.batch
        filled = None if self._keeps_input_alone else tape
        self.end_forward(self._decoder.layer(self.layer, self.begin_forward(), batch, tape=filled), tape)

    @property
    def _keeps_input_alone(self) -> bool:
        """Of the next layer."""
        return self.layer < self._num_recomputed

    def run(self, kind: TaskletKind) -> None:
        """Run the next tasklet of the forward or the backward pass, which the caller knows to be of this kind."""
        if kind is TaskletKind.FORWARD:
            self.forward()
        elif kind is TaskletKind.RECOMPUTE:
            self.recompute()
        else:
            self.backward()

    def loss(self, objective: Objective, total_weight: float) -> LossSums:
        """Run the loss on the last layer's output; backward can begin. ``total_weight``: of the whole step."""
        assert self._edge is not None, "the layers come first"
        self._gradient = torch.zeros_like(self._edge)
        sums = loss_and_gradient(objective, self._decoder, self._edge, self._micro_batch, total_weight, self._gradient)
        self._edge = None
        return sums

    @torch.no_grad()
    def recompute(self) -> None:
        """Compute again what the next layer's backward needs; it has kept its input."""
        hidden = self._kept.pop()
        assert isinstance(hidden, torch.Tensor), "the layer's tape is there"
        tape = self._new_tape()
        self._decoder.layer(len(self._kept), hidden, self._micro_batch.batch, tape=tape)
        self._kept.append(tape)

    @torch.no_grad()
    def backward(self) -> None:
        """Run one layer's backward, from the last to the first, and free its activations."""
        assert self._gradient is not None, "the loss comes first"
        kept = self._kept.pop()
        assert isinstance(kept, LayerTape), "what it needs is computed again first"
        index = len(self._kept)
        # Nobody learns from the first layer's input: the embedding is frozen.
        self._gradient = layer_backward(
            self._decoder, index, kept, self._gradient, self._add_gradient, needs_input=index > 0
        )

    def commit(self) -> None:
        """Add the micro-batch's gradients to those in the adapter's weights; its backward is over."""
        for matrix, gradient in self._gradients:
            if matrix.grad is None:
                matrix.grad = gradient
            else:
                matrix.grad += gradient
        self._gradients = []

    def _new_tape(self) -> LayerTape:
        return LayerTape(slice(0, self._micro_batch.batch.num_tokens))

    def _add_gradient(self, matrix: torch.Tensor, gradient: torch.Tensor) -> None:
        self._gradients.append((matrix, gradient))


class EvaluationPass:
    """Forward of one micro-batch, a layer at a time, without gradients."""

    def __init__(self, decoder: Decoder, micro_batch: MicroBatch) -> None:
        self._decoder = decoder
        self.micro_batch = micro_batch
        self._num_done = 0  # layers
        self._hidden: torch.Tensor | None = None  # [tokens, hidden]

    @torch.no_grad()
    def forward(self) -> None:
        """Run the next layer."""
        batch = self.micro_batch.batch
        hidden = self._decoder.embed(batch.token_ids) if self._hidden is None else self._hidden
        self._hidden = self._decoder.layer(self._num_done, hidden, batch)
        self._num_done += 1

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``token_losses``."""
        assert self._hidden is not None, "the layers come first"
        return token_losses(self._decoder, self._hidden, self.micro_batch)


def loss_run(kind: TaskletKind, shape: MicroBatchShape) -> TaskletRun:
    """A micro-batch's loss, whose latency depends on the target tokens alone."""
    return TaskletRun(TaskletShape(kind, shape.num_targets), 1)
