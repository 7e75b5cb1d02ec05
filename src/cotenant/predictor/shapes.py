"""Shapes of work as keys of records and as features of linear models."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from cotenant.core.plan import BatchShape
from cotenant.core.tasklet import TaskletShape

# Rows of a tile of matrix products: a part of one costs as much as a whole one.
TILE = 128
TASKLET_SCALES = (1.0, 256.0, 256.0 * 256.0)

BatchKey = tuple[int, int, int, int]


def bucket(tokens: int) -> int:
    """Token counts that differ by less than an eighth share a record."""
    if tokens < 16:
        return tokens
    shift = tokens.bit_length() - 4
    return (tokens >> shift) << shift


def buckets(least: int, most: int) -> Iterator[int]:
    """All that the counts from ``least`` to ``most`` fall into."""
    each = bucket(least)
    while each <= most:
        yield each
        each += 1 << max(0, each.bit_length() - 4)


def size_of(batch: BatchShape) -> int:
    """Rows as products are padded, and of many about how many: batches of one size take about as long."""
    rows = batch.num_decode + batch.prefill_tokens
    return bucket(rows) if rows <= TILE else TILE * bucket(-(-rows // TILE))


def batch_key(batch: BatchShape) -> BatchKey:
    return (
        batch.num_decode,
        bucket(batch.context_tokens),
        size_of(batch) if batch.prefill_tokens else 0,
        bucket(batch.prefill_context_tokens),
    )


@lru_cache(maxsize=1024)
def tasklet_key(shape: TaskletShape, trained: str) -> tuple[str, int, int, str]:
    """``trained``: what a job trains, see ``LatencyPredictor.trains``."""
    return (shape.kind, bucket(shape.num_tokens), bucket(shape.max_length), trained)


def adapter_features(batch: BatchShape) -> tuple[float, ...]:
    """LoRA costs a batch something at once, and the more the more adapters there are, but ever less for each: 0.8 ms of
    a step of 64 rows on an H200 with one, 1.3 with 8, 2.8 with 64. The last features of a batch: none without LoRA."""
    return (1.0, math.sqrt(batch.num_adapters)) if batch.num_adapters else ()


def tasklet_features(shape: TaskletShape) -> tuple[float, ...]:
    return (1.0, float(shape.num_tokens), float(shape.num_tokens * shape.max_length))
