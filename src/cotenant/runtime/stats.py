"""Running totals of the loop, for `/metrics`."""

from __future__ import annotations

import statistics
from bisect import bisect_left
from collections import Counter

from cotenant.core.plan import IterationRecord, Mode
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.runtime.harvest import Harvest
from cotenant.runtime.training import TrainingTenant
from cotenant.wire.messages import ERROR_BOUNDS, ErrorCounts, Stats

_ERROR_WEIGHT = 0.05  # of the newest error in the mean that is told


class LoopStats:
    """Counts iterations; ``message`` joins the counts with the gauges of the moment."""

    def __init__(self, predictor: LatencyPredictor) -> None:
        """``predictor``: has observed each iteration that is counted."""
        self._predictor = predictor
        self._harvest = Harvest(predictor)
        self._num_iterations: Counter[str] = Counter()
        self._errors = {"alone": _Errors(), "corun": _Errors()}
        self._recent_error: float | None = None
        self._num_tasklets: Counter[str] = Counter()
        self._num_fused = 0
        self._tasklet_busy_ms = 0.0
        self._online_busy_ms = 0.0
        self._mode = Mode.NONE

    def count(self, record: IterationRecord, now_s: float, *, has_job: bool) -> None:
        """An iteration that ended at ``now_s``. One in which nothing ended, as while nobody asks, is not one more."""
        self._harvest.note(record, now_s, has_job=has_job)
        if not record.batch.empty or record.num_tasklets:
            self._num_iterations[record.mode.value] += 1
        self._mode = record.mode
        error_ratio = self._predictor.last_error_ratio
        if error_ratio is not None:
            is_alone = record.batch.empty or record.mode is Mode.NONE
            self._errors["alone" if is_alone else "corun"].add(error_ratio)
            previous = error_ratio if self._recent_error is None else self._recent_error
            self._recent_error = previous + _ERROR_WEIGHT * (error_ratio - previous)
        self._online_busy_ms += record.online_ms
        for run, elapsed_ms in (*record.tasklets, *record.beside):
            self._num_tasklets[run.shape.kind.value] += run.count
            self._tasklet_busy_ms += elapsed_ms
        for run in record.untimed:
            self._num_tasklets[run.shape.kind.value] += run.count
        if record.fused is not None:
            self._num_tasklets[record.fused.shape.kind.value] += record.fused.count
            self._num_fused += record.fused.count

    def message(
        self,
        engine: OnlineEngine,
        executor: Executor,
        training: TrainingTenant,
        slack_ms: dict[str, float],
        margin: float | None,
    ) -> Stats:
        gaps_ms = executor.gaps_ms
        return Stats(
            num_running=engine.num_running,
            num_waiting=engine.num_waiting,
            kv_cache_usage=engine.kv_cache_usage,
            num_preemptions=engine.num_preemptions,
            num_iterations=dict(self._num_iterations),
            num_tasklets=dict(self._num_tasklets),
            num_fused_tasklets=self._num_fused,
            trained_tokens=training.trained_tokens,
            tasklet_busy_s=self._tasklet_busy_ms / 1e3,
            online_busy_s=self._online_busy_ms / 1e3,
            mode=self._mode.value,
            slack_ms=slack_ms,
            margin=margin,
            prediction_error_ratio=self._recent_error,
            prediction_errors={kind: errors.counts() for kind, errors in self._errors.items()},
            harvest_ratio=None if training.job_id is None else self._harvest.ratio,
            job_id=training.job_id,
            prefix_cache_queries=engine.num_queried_tokens,
            prefix_cache_hits=engine.num_hit_tokens,
            step_gap_us=statistics.median(gaps_ms) * 1e3 if gaps_ms else None,
        )


class _Errors:
    """Relative errors, counted in buckets."""

    def __init__(self) -> None:
        self._counts = [0] * (len(ERROR_BOUNDS) + 1)
        self._total = 0.0

    def add(self, error_ratio: float) -> None:
        self._counts[bisect_left(ERROR_BOUNDS, error_ratio)] += 1
        self._total += error_ratio

    def counts(self) -> ErrorCounts:
        return ErrorCounts(tuple(self._counts), self._total)
