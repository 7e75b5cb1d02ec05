"""A tasklet: the smallest piece of best-effort work that is launched whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import NamedTuple

import msgspec


class TaskletKind(StrEnum):
    """What a tasklet does. A training micro-batch runs FORWARD for each layer, LOSS, BACKWARD for each layer in
    reverse; a step ends with one OPTIMIZER tasklet, which is atomic. RECOMPUTE comes before the BACKWARD of a layer
    that kept its input alone. Where layers are captured they are cut into attention and MLP, and the MLP's backward
    before its last product, lest a GPU be busy with one for too long. EVAL_* are the same without gradients;
    captured layers have the same forward parts for both."""

    FORWARD = "forward"
    FORWARD_ATTENTION = "forward_attention"
    FORWARD_MLP = "forward_mlp"
    LOSS = "loss"
    RECOMPUTE = "recompute"
    RECOMPUTE_ATTENTION = "recompute_attention"
    RECOMPUTE_UP = "recompute_up"
    BACKWARD = "backward"
    BACKWARD_DOWN = "backward_down"
    BACKWARD_UP = "backward_up"
    BACKWARD_ATTENTION = "backward_attention"
    OPTIMIZER = "optimizer"
    EVAL_FORWARD = "eval_forward"
    EVAL_LOSS = "eval_loss"


class TaskletShape(NamedTuple):
    """What a tasklet's latency depends on: its kind, its tokens, and the longest sequence among them."""

    kind: TaskletKind
    num_tokens: int
    max_length: int = 0


class TaskletRun(msgspec.Struct, frozen=True, gc=False):
    """``count`` tasklets of one shape, one after the other."""

    shape: TaskletShape
    count: int


class TaskletCycle(msgspec.Struct, frozen=True, gc=False):
    """``runs`` one after the other, and all of them ``count`` times: the layers of a micro-batch. Where a run is
    FORWARD, which may be fused, all are."""

    runs: tuple[TaskletRun, ...]
    count: int = 1

    @property
    def turn_size(self) -> int:
        """Tasklets in a turn."""
        size = 0
        for run in self.runs:  # few; planning asks often
            size += run.count
        return size

    @property
    def num_tasklets(self) -> int:
        return self.count * self.turn_size


def runs_of(cycles: Iterable[TaskletCycle]) -> Iterator[TaskletRun]:
    """All their runs, in order."""
    return (run for cycle in cycles for _ in range(cycle.count) for run in cycle.runs)
