"""A predictor that was taught fixed latencies, for tests of what is planned with them."""

from __future__ import annotations

from cotenant.core.plan import BatchShape, IterationRecord, Mode
from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor

FORWARD = TaskletShape(TaskletKind.FORWARD, 256, 64)
BACKWARD = TaskletShape(TaskletKind.BACKWARD, 256, 64)
DECODE = BatchShape(num_decode=4, context_tokens=400)


def taught_predictor(step_ms: float, forward_ms: float, backward_ms: float) -> LatencyPredictor:
    """Knows a decode step, a forward and a backward tasklet, all measured twenty times."""
    predictor = LatencyPredictor("test hardware", "test model")
    for _ in range(20):
        predictor.observe(
            IterationRecord(
                batch=DECODE,
                mode=Mode.TEMPORAL,
                online_ms=step_ms,
                total_ms=step_ms + forward_ms + backward_ms,
                tasklets=((TaskletRun(FORWARD, 1), forward_ms), (TaskletRun(BACKWARD, 1), backward_ms)),
            )
        )
    return predictor


def in_turn(*runs: TaskletRun) -> tuple[TaskletCycle, ...]:
    """What is upcoming where nothing comes again."""
    return tuple(TaskletCycle((run,)) for run in runs)
