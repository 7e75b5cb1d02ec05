"""The latency predictor, learned from every iteration run: records first, then models, then a prior; of batches with
prompts, models first.

LLMStation section 4.2 on all SMs, Harli section 5 on a partition of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import partial

from cotenant.core.plan import BatchShape, IterationRecord, Mode, Partition
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.batch_times import ALONE, BatchTimes, stale_or_less
from cotenant.predictor.export import Export, as_tuple, decode, encode_parts
from cotenant.predictor.prior import Prior
from cotenant.predictor.records import Record, RecordCache
from cotenant.predictor.shapes import BatchKey, buckets
from cotenant.predictor.spatial import PartitionModels
from cotenant.predictor.tasklet_times import TaskletTimes

_TRUSTED = 5  # measurements that a record taken over counts as
_TRIALS = 5  # of decode steps in a partition, after which it is known
_BEHIND_BATCH = "beside"  # records of tasklets behind a batch; as old files have it


@dataclass(frozen=True, slots=True)
class CoRun:
    """One tasklet beside one decode step: Equation 1's ``l_d0``, ``l_d`` and ``l_p``, in milliseconds."""

    decode_solo_ms: float
    decode_corun_ms: float
    tasklet_corun_ms: float


class LatencyPredictor:
    """Predicts online batches and tasklets; ``observe`` feeds it what was measured.

    ``last_deviation_ratio``: of what the last iteration's batch and tasklets took on the device, the share by which
    their sum was expected to be more, below 0 if less; None where one of them could not be predicted.
    ``last_error_ratio``: without the sign.

    Returns None where nothing is known yet: a policy then tries one tasklet and learns. ``prior``: of this model on
    this hardware, where the device's rates are known.
    """

    def __init__(self, hardware: str, model: str, prior: Prior | None = None) -> None:
        self._base_group = (hardware, model)
        self._prior = prior
        self._records = RecordCache()
        self._batches = BatchTimes(self._records, self._base_group, prior)
        self._tasklets = TaskletTimes(self._records, self._base_group, prior)
        self._partitions = PartitionModels()
        self.last_deviation_ratio: float | None = None

    def trains(self, what: str) -> None:
        """Tasklets from now on are those of such a job: what it trains, as far as their times depend on it besides
        their shape. What was measured of other jobs' tells of them by way of the models alone."""
        self._tasklets.trains(what)

    @property
    def trained(self) -> str:
        """What ``trains`` said last."""
        return self._tasklets.trained

    def batch_ms(
        self,
        batch: BatchShape,
        *,
        beside_training: bool = False,
        partition: Partition | None = None,
        behind_tasklets: bool = False,
        cautious: bool = True,
    ) -> float | None:
        """An online batch alone (``l_d0`` for a decode step), from when it begins until its tokens are known.

        With ``partition`` on its online SMs; ``beside_training``: while tasklets run on its best-effort SMs.
        ``behind_tasklets``: see ``IterationRecord``; on a partition, and with prompts, that makes no difference.
        ``cautious``: what a record says counts with a deviation on top of its mean, for those who must not be late;
        what a model says is its mean.
        """
        assert partition is not None or not beside_training
        if batch.empty:
            return 0.0
        if partition is not None:
            return self._batch_on_partition_ms(batch, partition, beside_training=beside_training, cautious=cautious)
        return self._batches.batch_ms(batch, behind_tasklets=behind_tasklets, cautious=cautious)

    def shape_of(self, batch: BatchShape) -> Hashable:
        """What batches are told apart by."""
        return self._batches.keys(batch)

    def prompt_tokens_within(
        self, decodes: BatchShape, limit_ms: float, num_computed: int = 0, *, most: int
    ) -> int | None:
        """How many tokens of a prompt, at most ``most``, fit into a batch beside these decodes, so that it takes
        ``limit_ms``; they attend to the ``num_computed`` ones before them, too. May be negative; None while it is not
        known what a prompt token costs."""
        return self._batches.prompt_tokens_within(decodes, limit_ms, num_computed, most)

    def tasklet_ms(
        self,
        shape: TaskletShape,
        *,
        with_batch: BatchShape | None = None,
        fused: bool = False,
        partition: Partition | None = None,
        cautious: bool = True,
    ) -> float | None:
        """What one tasklet adds to an iteration: behind ``with_batch``, on all SMs, if that was measured, else alone.

        With ``partition``: what it takes on the best-effort SMs, beside a batch on the others. ``fused``: inside the
        batch, if that was measured in this or in others, and not long ago; what it takes alone tells nothing of that.
        """
        if partition is not None:
            return self._tasklet_on_partition_ms(shape, partition, cautious=cautious)
        key = self._tasklets.key(shape)
        if fused and with_batch is not None:
            group, batch_key = self._batches.keys(with_batch)
            fresh_ms = self._records.fresh_ms(group, ("fused", batch_key, key), cautious=cautious)
            if fresh_ms is None:
                fresh_ms = self._records.fresh_ms(self._base_group, ("fused", key), cautious=cautious)
            return fresh_ms
        specific: Record | None = None
        if with_batch is not None and not with_batch.empty:
            group, batch_key = self._batches.keys(with_batch)
            specific_key = (_BEHIND_BATCH, batch_key, key)
            fresh_ms = self._records.fresh_ms(group, specific_key, cautious=cautious)
            if fresh_ms is not None:
                return fresh_ms
            specific = self._records.find(group, specific_key)
        known_ms = self._tasklets.alone_ms(shape, cautious=cautious)
        return known_ms if specific is None else stale_or_less(specific.latency_ms(cautious=cautious), known_ms)

    def was_tried(self, partition: Partition) -> bool:
        """Whether what is said of a decode step beside training there rests on some that were."""
        return self._partitions.num_together(partition, self._records.iteration) >= _TRIALS

    def has_measured_decode(
        self, num_decode: int, least_context: int, most_context: int, partition: Partition | None = None
    ) -> bool:
        """Whether a decode step alone was measured, however long ago, of so many sequences and about so many context
        tokens; ``partition``: on its online SMs."""
        for context in buckets(least_context, most_context):
            group, key = self._batches.keys(BatchShape(num_decode, context))
            shape = (ALONE, key) if partition is None else _partition_key(key, partition, together=False)
            if self._records.find(group, shape) is not None:
                return True
        return False

    def may_have_changed(self, shape: TaskletShape) -> bool:
        """Whether such a tasklet is tried even if it is said to take too long: it was measured, but for long not again,
        behind whatever batch; or that is a guess, and for a while no tasklet has run."""
        return self._tasklets.may_have_changed(shape)

    def first_tasklet_ms(self, shape: TaskletShape) -> float:
        """What a tasklet that ``tasklet_ms`` does not know should take, as far as the prior goes; 0 without one."""
        return self._tasklets.first_ms(shape)

    def corun(self, batch: BatchShape, shape: TaskletShape, *, fused: bool = False) -> CoRun | None:
        """Equation 1's three latencies for one tasklet beside this batch, or None if one of them is unknown.

        ``l_d`` is the iteration with one tasklet in it. Measured that way, one tasklet is done per ``l_d``, so ``l_p``
        equals it, whether the device overlaps the two or runs them in turn.
        """
        solo = self.batch_ms(batch)
        added = self.tasklet_ms(shape, with_batch=batch, fused=fused)
        if solo is None or added is None:
            return None
        return CoRun(solo, solo + added, solo + added)

    @property
    def num_records(self) -> int:
        return len(self._records)

    def export(self) -> bytes:
        """What was learned, for ``restore``: by this server when it starts again, or by another on such a machine."""
        return b"".join(self.export_parts(len(self._records) + 1))

    def export_parts(self, most_records: int) -> Iterator[bytes]:
        """The same cut into parts of so many records at most. Between two parts it may go on learning."""
        head = Export(
            of=self._base_group,
            records=[],
            batches=self._batches.models.states(),
            tasklet_models={kind.value: model.state() for kind, model in self._tasklets.models.items()},
            partition_models=[(key, model.state()) for key, model in self._partitions.models.items()],
            partition_ratios=list(self._partitions.ratios.items()),
            prior_ratios={} if self._prior is None else self._prior.ratios,
        )
        parts = self._records.export(most_records)
        yield from encode_parts(head, ([(group[2:], *rest) for group, rest in part] for part in parts))

    def restore(self, exported: bytes) -> int:
        """Take over what another predictor learned, where this one has not: how many records. It counts little, so
        that a machine that has changed is noticed within some iterations.

        Raises ValueError for what is no export, or one of other hardware or another model.
        """
        found = decode(exported, self._base_group)
        models = [(self._tasklets.model(TaskletKind(kind)), state) for kind, state in found.tasklet_models.items()]
        models += [(self._partitions.model(key), state) for key, state in found.partition_models]
        self._batches.models.check(found.batches)
        for model, state in models:
            model.check(state)
        self._batches.restore(found.batches, _TRUSTED)
        for model, state in models:
            if model.num_samples == 0:
                model.restore(state)
        for key, ratio in found.partition_ratios:
            self._partitions.ratios.setdefault(key, ratio.less_trusted(_TRUSTED))
        if self._prior is not None:
            for kind, ratio in found.prior_ratios.items():
                self._prior.ratios.setdefault(kind, ratio.less_trusted(_TRUSTED))
        for rest, shape, mean_ms, deviation_ms, count in found.records:
            record = Record(mean_ms, deviation_ms, min(count, _TRUSTED))
            self._records.restore((*self._base_group, *rest), as_tuple(shape), record)
        return len(found.records)

    def observe(self, record: IterationRecord) -> None:
        """Learn from one iteration, having compared it with what was to be expected of it."""
        self.last_deviation_ratio = None if record.is_disturbed else self._deviation_of(record)
        if record.num_tasklets or not record.batch.empty:  # not a turn that found nothing to do: there may be many
            self._records.iteration += 1
        if record.num_tasklets:
            self._tasklets.ran()
        if record.partition is not None:
            self._observe_on_partition(record, record.partition)
        elif not record.batch.empty and record.fused is None:
            self._batches.observe(record)
        if record.fused is not None:
            self._observe_fused(record)
        # Behind a batch that had other SMs, tasklets are as alone as they can be.
        batch = record.batch if record.partition is None else BatchShape()
        for run, elapsed_ms in record.tasklets:
            self._observe_tasklets(batch, run, elapsed_ms / run.count)
        if record.num_tasklets:
            self._batches.trained()

    @property
    def last_error_ratio(self) -> float | None:
        return None if self.last_deviation_ratio is None else abs(self.last_deviation_ratio)

    def _deviation_of(self, record: IterationRecord) -> float | None:
        """By means: a cautious prediction is meant to be too high."""
        batch, partition = record.batch, record.partition
        is_shared = partition is not None and record.mode is not Mode.NONE
        behind = batch if partition is None and not batch.empty else None
        batch_ms = self.batch_ms(
            batch,
            beside_training=is_shared,
            partition=partition,
            behind_tasklets=record.behind_tasklets,
            cautious=False,
        )
        parts = [(batch_ms, 1)]
        parts += [
            (self.tasklet_ms(run.shape, with_batch=behind, cautious=False), run.count) for run, _ in record.tasklets
        ]
        if partition is not None:
            ended = [run for run, _ in record.beside]
            parts += [(self.tasklet_ms(run.shape, partition=partition, cautious=False), run.count) for run in ended]
        if record.fused is not None:
            each_ms = self.tasklet_ms(record.fused.shape, with_batch=batch, fused=True, cautious=False)
            parts.append((each_ms, record.fused.count))
        measured_ms = record.taken_ms
        if measured_ms <= 0 or any(each_ms is None for each_ms, _ in parts):
            return None
        expected_ms = sum(each_ms * count for each_ms, count in parts if each_ms is not None)
        return (expected_ms - measured_ms) / measured_ms

    def _observe_tasklets(self, batch: BatchShape, run: TaskletRun, each_ms: float) -> None:
        shape = run.shape
        each_ms = self._tasklets.bounded_ms(shape, each_ms)
        self._tasklets.observe(shape, each_ms, run.count)
        if not batch.empty and not batch.prefill_tokens:  # with prompts, hardly a shape comes again
            group, batch_key = self._batches.keys(batch)
            self._records.add(group, (_BEHIND_BATCH, batch_key, self._tasklets.key(shape)), each_ms, run.count)

    def _observe_fused(self, record: IterationRecord) -> None:
        step_ms = self.batch_ms(record.batch, cautious=False)
        if record.fused is None or step_ms is None:
            return
        each_ms = max(0.0, record.online_ms - step_ms) / record.fused.count
        added_ms = self._tasklets.bounded_ms(record.fused.shape, each_ms)
        (group, key), fused_key = self._batches.keys(record.batch), self._tasklets.key(record.fused.shape)
        self._records.add(group, ("fused", key, fused_key), added_ms)
        self._records.add(self._base_group, ("fused", fused_key), added_ms)

    def _observe_on_partition(self, record: IterationRecord, partition: Partition) -> None:
        """Where nothing shared the device with the batch, it is stage 1's measurement."""
        batch, online_ms, together = record.batch, record.online_ms, record.mode is not Mode.NONE
        if not batch.empty and not record.is_disturbed:
            group, key = self._batches.keys(batch)
            self._records.add(group, _partition_key(key, partition, together=together), online_ms)
            if not together:
                self._partitions.observe_alone(batch, partition.online_sms, online_ms)
            elif not batch.prefill_tokens:  # with prompts it is no trial of decode steps
                alone_ms = self._alone_on_partition_ms(batch, partition)
                self._partitions.observe_together(batch, partition, online_ms, alone_ms, self._records.iteration)
            if self._prior is not None:
                self._prior.observe_batch(batch, online_ms, partition, beside_training=together)
        for run, elapsed_ms in record.beside:
            self._observe_tasklet_on_partition(run, elapsed_ms / run.count, partition)

    def _observe_tasklet_on_partition(self, run: TaskletRun, each_ms: float, partition: Partition) -> None:
        shape, group = run.shape, self._base_group
        record = self._records.add(group, ("tasklet", self._tasklets.key(shape), partition), each_ms, run.count)
        each_ms = record.bounded(each_ms)
        alone_ms = self._tasklets.alone_ms(shape, cautious=False)
        if alone_ms is not None:
            self._partitions.observe_tasklet(partition.best_effort_sms, each_ms, alone_ms)
        if self._prior is not None:
            self._prior.observe_tasklet(shape, each_ms, partition)

    def _batch_on_partition_ms(
        self, batch: BatchShape, partition: Partition, *, beside_training: bool, cautious: bool
    ) -> float | None:
        group, key = self._batches.keys(batch)
        record_key = _partition_key(key, partition, together=beside_training)
        fresh_ms = self._records.fresh_ms(group, record_key, cautious=cautious)
        if fresh_ms is not None:
            return fresh_ms
        record = self._records.find(group, record_key)
        if beside_training:
            alone_ms = partial(self._alone_on_partition_ms, batch, partition)
            known_ms = self._partitions.together_ms(batch, partition, alone_ms)
        else:
            known_ms = self._partitions.alone_ms(batch, partition.online_sms)
            known_ms = known_ms or self._partitions.guessed_alone_ms(batch, partition)
        if record is not None:
            return stale_or_less(record.latency_ms(cautious=cautious), known_ms)
        if known_ms is None and self._prior is not None:
            return self._prior.batch_ms(batch, partition, beside_training=beside_training)
        return known_ms

    def _alone_on_partition_ms(self, batch: BatchShape, partition: Partition) -> float | None:
        """Stage 1, or better what was measured of this shape."""
        group, key = self._batches.keys(batch)
        record = self._records.find(group, _partition_key(key, partition, together=False))
        return self._partitions.alone_ms(batch, partition.online_sms) if record is None else record.mean_ms

    def _tasklet_on_partition_ms(self, shape: TaskletShape, partition: Partition, *, cautious: bool) -> float | None:
        record_key = ("tasklet", self._tasklets.key(shape), partition)
        fresh_ms = self._records.fresh_ms(self._base_group, record_key, cautious=cautious)
        if fresh_ms is not None:
            return fresh_ms
        record = self._records.find(self._base_group, record_key)
        factor = self._partitions.tasklet_factor(partition.best_effort_sms)
        alone_ms = self._tasklets.alone_ms(shape, cautious=False)
        known_ms = None if factor is None or alone_ms is None else factor * alone_ms
        if record is not None:
            return stale_or_less(record.latency_ms(cautious=cautious), known_ms)
        if known_ms is None and self._prior is not None:
            return self._prior.tasklet_ms(shape, partition)
        return known_ms


def _partition_key(key: BatchKey, partition: Partition, *, together: bool) -> Hashable:
    """A batch alone does not know whose the other SMs are."""
    return ("shared batch", key, partition) if together else (ALONE, key, partition.online_sms)
