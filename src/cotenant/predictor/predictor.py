"""The latency predictor: LLMStation section 4.2 (records, then a linear model), learned from every iteration run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from cotenant.core.plan import BatchShape, IterationRecord, Mode
from cotenant.core.tasklet import TaskletKind, TaskletShape
from cotenant.predictor.linear import OnlineLinearModel
from cotenant.predictor.records import Record, RecordCache

_ERROR_WEIGHT = 0.05
_VERSION = 1  # of exports
_TRUSTED = 5  # measurements that a record taken over counts as
_MOST_SAMPLES = 64  # of one shape that its kind's model learns from: they cost more than the record does
_PROMPT_TOKENS = 1024  # of the prompt that tells what a prompt token costs


@dataclass(frozen=True, slots=True)
class CoRun:
    """One tasklet beside one decode step: Equation 1's ``l_d0``, ``l_d`` and ``l_p``, in milliseconds."""

    decode_solo_ms: float
    decode_corun_ms: float
    tasklet_corun_ms: float


class _Export(msgspec.Struct):
    """``records``: (adapters, or nothing for tasklets alone; shape; mean, deviation, count)."""

    version: int
    of: tuple[str, str]
    records: list[tuple[tuple[int, ...], list[Any], float, float, int]]


def _as_tuple(shape: Any) -> Any:
    """JSON has lists where keys were tuples."""
    return tuple(map(_as_tuple, shape)) if isinstance(shape, list) else shape


def _known(predicted_ms: float) -> float | None:
    """A linear model says 0 where it is out of its range: work takes some time."""
    return predicted_ms if predicted_ms > 0 else None


def _bucket(tokens: int) -> int:
    """Token counts that differ by less than an eighth share a record."""
    if tokens < 16:
        return tokens
    shift = tokens.bit_length() - 4
    return (tokens >> shift) << shift


def _batch_key(batch: BatchShape) -> tuple[int, int, int, int]:
    return (
        batch.num_decode,
        _bucket(batch.context_tokens),
        _bucket(batch.prefill_tokens),
        _bucket(batch.prefill_context_tokens),
    )


def _batch_features(batch: BatchShape) -> tuple[float, ...]:
    return (
        1.0,
        float(batch.num_decode > 0),
        float(batch.num_decode),
        float(batch.context_tokens),
        float(batch.prefill_tokens),
        float(batch.prefill_context_tokens),
    )


def _tasklet_key(shape: TaskletShape) -> tuple[str, int, int]:
    return (shape.kind.value, _bucket(shape.num_tokens), _bucket(shape.max_length))


class LatencyPredictor:
    """Predicts online batches and tasklets; ``observe`` feeds it what was measured.

    Returns None where nothing is known yet: a policy then tries one tasklet and learns.
    """

    def __init__(self, hardware: str, model: str) -> None:
        self._base_group = (hardware, model)
        self._records = RecordCache()
        self._batch_model = OnlineLinearModel((1.0, 1.0, 8.0, 4096.0, 256.0, 4096.0))
        self._tasklet_models: dict[TaskletKind, OnlineLinearModel] = {}
        self.error_ratio: float | None = None

    def batch_ms(self, batch: BatchShape, *, beside_training: bool = False) -> float | None:
        """An online batch alone (``l_d0`` for a decode step); ``beside_training``: in an iteration with tasklets, until
        its tokens are known. It may have to wait for the end of the tasklet before it."""
        if batch.empty:
            return 0.0
        names = ("shared batch", "batch") if beside_training else ("batch", "shared batch")
        for name in names:
            record = self._records.find(self._group(batch), (name, _batch_key(batch)))
            if record is not None:
                return record.cautious_ms
        return _known(self._batch_model.predict(_batch_features(batch))) if self._batch_model.ready else None

    def prompt_tokens_within(self, num_decode: int, context_tokens: int, limit_ms: float) -> int | None:
        """How many tokens of fresh prompts fit into a batch beside its decodes, so that it takes ``limit_ms``. May be
        negative; None while it is not known what a prompt token costs."""
        if not self._batch_model.ready:
            return None
        alone = BatchShape(num_decode, context_tokens)
        with_prompt = BatchShape(num_decode, context_tokens, _PROMPT_TOKENS, _PROMPT_TOKENS)
        alone_ms = self._batch_model.predict(_batch_features(alone))
        per_token_ms = (self._batch_model.predict(_batch_features(with_prompt)) - alone_ms) / _PROMPT_TOKENS
        return int((limit_ms - alone_ms) / per_token_ms) if per_token_ms > 0 else None

    def tasklet_ms(self, shape: TaskletShape, *, beside: BatchShape | None = None, fused: bool = False) -> float | None:
        """What one tasklet adds to an iteration: beside a batch if that was measured, else alone."""
        if beside is not None and not beside.empty:
            kind = "fused" if fused else "beside"
            record = self._records.find(self._group(beside), (kind, _batch_key(beside), _tasklet_key(shape)))
            if record is not None:
                return record.cautious_ms
        record = self._records.find(self._base_group, ("tasklet", _tasklet_key(shape)))
        if record is not None:
            return record.cautious_ms
        model = self._tasklet_models.get(shape.kind)
        if model is None or not model.ready:
            return None
        return _known(model.predict((1.0, float(shape.num_tokens), float(shape.num_tokens * shape.max_length))))

    def corun(self, batch: BatchShape, shape: TaskletShape, *, fused: bool = False) -> CoRun | None:
        """Equation 1's three latencies for one tasklet beside this batch, or None if one of them is unknown.

        ``l_d`` is the iteration with one tasklet in it. Measured that way, one tasklet is done per ``l_d``, so ``l_p``
        equals it, whether the device overlaps the two or runs them in turn.
        """
        solo = self.batch_ms(batch)
        added = self.tasklet_ms(shape, beside=batch, fused=fused)
        if solo is None or added is None:
            return None
        return CoRun(solo, solo + added, solo + added)

    @property
    def num_records(self) -> int:
        return len(self._records)

    def export(self) -> bytes:
        """What was measured, for ``restore``: by this server when it starts again, or by another on such a machine."""
        records = [(group[2:], *rest) for group, *rest in self._records.export()]
        return msgspec.json.encode({"version": _VERSION, "of": self._base_group, "records": records})

    def restore(self, exported: bytes) -> int:
        """Take over what another predictor measured, where this one has not: how many records. They count little, so
        that a machine that has changed is noticed within some iterations.

        Raises ValueError for what is no export, or one of other hardware or another model.
        """
        try:
            found = msgspec.json.decode(exported, type=_Export)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        if found.version != _VERSION or found.of != self._base_group:
            raise ValueError(f"measured on {found.of}, version {found.version}, not on {self._base_group}")
        for rest, shape, mean_ms, deviation_ms, count in found.records:
            record = Record(mean_ms, deviation_ms, min(count, _TRUSTED))
            self._records.restore((*self._base_group, *rest), _as_tuple(shape), record)
        return len(found.records)

    def observe(self, record: IterationRecord) -> None:
        """Learn from one iteration."""
        if not record.batch.empty and record.fused is None:
            name = "batch" if record.mode is Mode.NONE else "shared batch"
            self._records.add(self._group(record.batch), (name, _batch_key(record.batch)), record.online_ms)
            self._batch_model.update(_batch_features(record.batch), record.online_ms)
        if record.fused is not None:
            self._observe_fused(record)
        for run, elapsed_ms in record.tasklets:
            self._observe_tasklets(record.batch, run.shape, elapsed_ms / run.count)
        if record.predicted_ms is not None and record.total_ms > 0:
            error = abs(record.predicted_ms - record.total_ms) / record.total_ms
            previous = self.error_ratio if self.error_ratio is not None else error
            self.error_ratio = previous + _ERROR_WEIGHT * (error - previous)

    def _observe_tasklets(self, batch: BatchShape, shape: TaskletShape, each_ms: float) -> None:
        each_ms = self._bounded(shape, each_ms)
        self._records.add(self._base_group, ("tasklet", _tasklet_key(shape)), each_ms)
        if not batch.empty:
            self._records.add(self._group(batch), ("beside", _batch_key(batch), _tasklet_key(shape)), each_ms)
        known = self._records.find(self._base_group, ("tasklet", _tasklet_key(shape)))
        if known is None or known.count <= _MOST_SAMPLES:  # the model is asked for shapes without a record alone
            model = self._tasklet_models.setdefault(shape.kind, OnlineLinearModel((1.0, 256.0, 256.0 * 256.0)))
            model.update((1.0, float(shape.num_tokens), float(shape.num_tokens * shape.max_length)), each_ms)

    def _observe_fused(self, record: IterationRecord) -> None:
        step_ms = self.batch_ms(record.batch, beside_training=True)
        if record.fused is None or step_ms is None:
            return
        added_ms = self._bounded(record.fused.shape, max(0.0, record.online_ms - step_ms) / record.fused.count)
        key = ("fused", _batch_key(record.batch), _tasklet_key(record.fused.shape))
        self._records.add(self._group(record.batch), key, added_ms)

    def _bounded(self, shape: TaskletShape, each_ms: float) -> float:
        """An outlier cut to what this tasklet may take at worst. Uncut, it would rule the tasklet out beside a batch
        where it was never measured before, and so keep it from being measured there again."""
        known = self._records.find(self._base_group, ("tasklet", _tasklet_key(shape)))
        return each_ms if known is None else known.bounded(each_ms)

    def _group(self, batch: BatchShape) -> tuple[str, str, int]:
        return (*self._base_group, batch.num_adapters)
