"""Decode steps of a machine that takes a simple time for each."""

from __future__ import annotations

from cotenant.core.plan import BatchShape, IterationRecord, Mode
from cotenant.predictor.predictor import LatencyPredictor


def decode(num: int, context: int, adapters: int = 0) -> BatchShape:
    return BatchShape(num_decode=num, context_tokens=context, num_adapters=adapters)


def true_ms(batch: BatchShape) -> float:
    return 1.5 + 0.1 * batch.num_decode + 0.0005 * batch.context_tokens


def learn(predictor: LatencyPredictor, batch: BatchShape, online_ms: float, *, behind_tasklets: bool = False) -> None:
    predictor.observe(IterationRecord(batch, Mode.NONE, online_ms, online_ms, behind_tasklets=behind_tasklets))
