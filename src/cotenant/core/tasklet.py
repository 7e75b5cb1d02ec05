"""A tasklet: the smallest piece of best-effort work that is launched whole."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class TaskletKind(StrEnum):
    """What a tasklet does. A training micro-batch runs FORWARD for each layer, LOSS, BACKWARD for each layer in
    reverse; a step ends with one OPTIMIZER tasklet, which is atomic. Where layers are captured they are cut into
    attention and MLP, and the MLP's backward before its last product, lest a GPU be busy with one for too long. EVAL_*
    are the same without gradients."""

    FORWARD = "forward"
    FORWARD_ATTENTION = "forward_attention"
    FORWARD_MLP = "forward_mlp"
    LOSS = "loss"
    BACKWARD = "backward"
    BACKWARD_DOWN = "backward_down"
    BACKWARD_UP = "backward_up"
    BACKWARD_ATTENTION = "backward_attention"
    OPTIMIZER = "optimizer"
    EVAL_FORWARD = "eval_forward"
    EVAL_LOSS = "eval_loss"


@dataclass(frozen=True, slots=True)
class TaskletShape:
    """What a tasklet's latency depends on: its kind, its tokens, and the longest sequence among them."""

    kind: TaskletKind
    num_tokens: int
    max_length: int = 0


@dataclass(frozen=True, slots=True)
class TaskletRun:
    """``count`` tasklets of one shape, one after the other."""

    shape: TaskletShape
    count: int
