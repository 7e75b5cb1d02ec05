"""Carries a plan out: the online batch, the tasklets fused into it, the tasklets beside it."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import msgspec
import torch

from cotenant.core.plan import BatchShape, InFlight, IterationRecord, Mode, Partition, Plan
from cotenant.core.request import SequenceOutput
from cotenant.core.tasklet import TaskletRun, TaskletShape
from cotenant.device import Device
from cotenant.device.base import FinishedTasklet
from cotenant.engine.engine import OnlineEngine
from cotenant.engine.flight import Collected, OnlineStep, RanLayers
from cotenant.models.decoder import Decoder
from cotenant.predictor.records import Record
from cotenant.runtime.device_time import DeviceTime
from cotenant.runtime.fused import FusedForward
from cotenant.runtime.tasklet_lanes import TaskletLanes
from cotenant.runtime.trace import Trace
from cotenant.runtime.training import NOTHING, TrainingTenant

Emit = Callable[[list[SequenceOutput]], None]

# So many times what was predicted an iteration may take before no more tasklets are launched in it: those that run for
# the first time, say, are launched one by one and more slowly than the device runs them, as no record tells.
_MOST_OVER = 1.05


class _Launched(NamedTuple):
    """A batch that was launched: by which plan, its shape, and the tasklets that were fused into it. ``with_tasklet``:
    as it began, a tasklet was in flight whose time its own does not exclude; said again where it begins as the one
    before it lands, which has other SMs. ``planned_s``: when its plan was there, if it has prompts and no batch was in
    flight then. ``is_behind``: it has all SMs and is timed from the end of tasklets, if that is later than its
    beginning."""

    plan: Plan
    shape: BatchShape
    with_tasklet: bool
    fused: TaskletRun | None
    planned_s: float | None
    is_behind: bool

    @property
    def shares(self) -> bool:
        """Whether it shares the device, in a partition or with training tokens in it."""
        return self.plan.partition is not None or self.fused is not None


class _Landed(NamedTuple):
    """A batch that was collected."""

    collected: Collected
    predicted_ms: float | None
    with_tasklet: bool
    behind_tasklets: bool


class Executor:
    """Runs one iteration at a time.

    ``emit`` gets the online outputs the moment they are known, before any tasklet behind the batch starts; where the
    device runs behind the host, the first one begins as the batch ends.
    ``interrupted`` is asked between tasklets; when it says yes, an interruptible plan ends there. Tasklets beside a
    batch in flight go on: whoever has come waits for its end in any case.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        engine: OnlineEngine,
        training: TrainingTenant,
        trace: Trace | None = None,
    ) -> None:
        self._device = device
        self._trace = trace
        self.device_time: DeviceTime | None = None  # told of what has ended, if somebody wants to know
        self._engine = engine
        self._training = training
        self._tasklets = TaskletLanes(device, engine, training)
        self._fused = FusedForward(decoder, engine, training)
        self.gaps_ms: deque[float] = deque(maxlen=256)  # between batches launched back to back, on the device
        self._launched: deque[_Launched] = deque()  # the batches in flight
        self._begun: tuple[Plan, float] | None = None  # what ``begun`` says, and since when
        self._wait_until_s = -math.inf  # when the device gets to the batch that was launched last, as was expected then
        self._planned_s = 0.0  # when the last plan came
        self._beginning: Record | None = None  # of a batch with prompts, see ``begins_after_ms``

    def execute(self, plan: Plan, emit: Emit, interrupted: Callable[[], bool]) -> IterationRecord:
        """Do what the plan says and tell how long it took.

        On a device that runs behind the host, a plan without tasklets that follow its batch leaves the batch in flight:
        the tokens that go out are those of the batch before, and the record is about that one. So does a plan whose
        batch goes elsewhere or has tasklets behind it, which is then ``begun``. One that cannot go on like that lets
        the batch in flight land, and nothing else: that is the record, and who planned it plans anew.
        """
        self._planned_s = time.perf_counter()
        if plan is not self.begun:
            self._give_up()
        if self._begun is None and self._launched:
            if not plan.run_online or plan.num_fused or plan.until_step_end:
                return self._land(plan, emit, interrupted)
            if plan.num_tasklets > plan.num_beside or plan.partition != self._launched[-1].plan.partition:
                return self._go_on(plan, emit, interrupted)
        return self._run(plan, emit, interrupted)

    def _run(self, plan: Plan, emit: Emit, interrupted: Callable[[], bool]) -> IterationRecord:
        """With nothing in flight, or a batch with the same SMs as the plan's and no tasklets behind either, or the
        plan's own."""
        begun, self._begun = self._begun, None
        num_behind = plan.num_tasklets - plan.num_beside  # or fused into the batch, the first of them
        runs_ahead = plan.run_online and self._device.overlaps and num_behind == 0 and not plan.until_step_end
        start = time.perf_counter() if begun is None else begun[1]
        fused, num_launched, num_left, is_launched = None, 0, 0, begun is not None
        behind = self._expect_tasklets_end() if plan.run_online and begun is None else None
        num_beside = 0
        if self._launched:
            num_beside = self._tasklets.top_up(plan, plan.num_beside, far_ahead=num_behind == 0)
        elif plan.run_online:
            num_beside = self._tasklets.begin_beside(plan)
        if plan.run_online and begun is None:
            step = self._schedule(plan)
            is_launched = step is not None
            fused = None if step is None else self._launch_online(plan, step, behind)
            num_launched = fused.count if fused else 0
            num_left = 1 if runs_ahead and is_launched else 0
        num_beside += self._tasklets.run_beside(plan, num_beside, num_left, interrupted, far_ahead=num_behind == 0)
        if is_launched and self._device.overlaps and fused is None and num_behind > 0:
            num_launched += self._tasklets.launch_behind(plan, _never if plan.hold_ms else interrupted)
        landed = self._collect(emit, num_left) if plan.run_online else None
        online_end = time.perf_counter()
        if num_behind == 0 and (landed is not None or not self._launched):
            num_beside += self._tasklets.run_awaited(plan, num_beside, interrupted)
        until_s = math.inf
        if plan.predicted_ms is not None and begun is not None:
            # It was counted before tasklets went on beside the batch before: others follow, and by time.
            until_s = start + plan.predicted_ms / 1e3
        elif plan.predicted_ms is not None and landed is not None:
            until_s = online_end + (_MOST_OVER * plan.predicted_ms - landed.collected.device_ms) / 1e3
        stops = _not_before(interrupted, online_end + plan.hold_ms / 1e3)
        num_launched += self._tasklets.run_behind(plan, num_launched, stops, until_s)
        end = time.perf_counter()
        record = self._record(plan, landed, shares=(num_beside + num_behind) > 0)
        if landed is not None and runs_ahead:
            return record
        # Where the host goes on meanwhile, a batch's time is the device's own: what else there is, it does while
        # tasklets run.
        is_host_timed = landed is not None and not self._device.overlaps
        online_ms = (online_end - start) * 1e3 if is_host_timed else record.online_ms
        return replace(
            record,
            online_ms=online_ms,
            total_ms=(end - start) * 1e3 if begun is None else online_ms + (end - online_end) * 1e3,
            fused=fused,
            predicted_ms=record.predicted_ms if num_launched == num_behind else None,
        )

    def _land(self, plan: Plan, emit: Emit, interrupted: Callable[[], bool]) -> IterationRecord:
        """Collect what is in flight, with training beside it as was planned for it. A tasklet of ``plan``, which cannot
        begin yet, keeps the device from waiting for the next plan."""
        launched = self._launched[-1].plan
        num_beside = self._tasklets.run_beside(launched, 0, 0, interrupted)
        if launched.partition is None and plan.num_tasklets > plan.num_beside:
            self._tasklets.launch_behind(plan, interrupted)
        landed = self._collect(emit, 0)
        return self._record(launched, landed, shares=num_beside > 0)

    @property
    def begun(self) -> Plan | None:
        """The plan whose batch is in flight and whose tasklets are to follow it: they do if it is the next to
        ``execute``."""
        return None if self._begun is None else self._begun[0]

    def _give_up(self) -> None:
        """What was begun has no tasklets behind its batch."""
        if self._begun is not None:
            plan, self._begun = self._begun[0], None
            mode = Mode.NONE if plan.partition is None else plan.mode
            plan = msgspec.structs.replace(plan, num_tasklets=plan.num_beside, mode=mode, predicted_ms=None)
            self._launched[-1] = self._launched[-1]._replace(plan=plan)

    def _go_on(self, plan: Plan, emit: Emit, interrupted: Callable[[], bool]) -> IterationRecord:
        """Launch the next batch behind the one in flight, and collect that one, with training beside it as was planned
        for it. Where it has all SMs, what is to run beside the next one waits for its end."""
        launched, in_flight, num_beside = self._launched[-1].plan, self._launched[-1].shape, 0
        step = self._schedule(plan)
        if launched.partition is not None:
            num_beside = self._tasklets.fill(launched, in_flight, BatchShape() if step is None else step.shape)
        elif not self._device.is_training():
            self._tasklets.begin_beside(plan, behind_online=True)
        if step is not None:
            self._launch_online(plan, step)
        num_left = 0 if step is None else 1
        num_beside += self._tasklets.run_beside(launched, num_beside, num_left, interrupted)
        landed = self._collect(emit, num_left)
        if step is not None:  # it begins now
            self._launched[-1] = self._launched[-1]._replace(with_tasklet=self._device.is_training())
            if plan.num_tasklets > plan.num_beside:
                self._begun = plan, time.perf_counter()
            else:
                self._tasklets.run_awaited(plan, 0, interrupted)
        return self._record(launched, landed, shares=num_beside > 0)

    def _record(self, plan: Plan, landed: _Landed | None, *, shares: bool) -> IterationRecord:
        """``landed``: the batch, whose time is the device's, and the whole iteration's. ``shares``: tasklets were
        launched with it."""
        # What came to nothing, half of a tasklet perhaps, tells nothing of any.
        finished = [each for each in self._device.finished_tasklets() if each.shape != NOTHING]
        if self._trace is not None:
            self._trace.tasklets(finished)
        if self.device_time is not None:
            self.device_time.ended(finished, beside=landed is not None or bool(self._launched))
        others = Counter(each.shape for each in finished if each.partition not in (None, plan.partition))
        beside = () if plan.partition is None else _group(finished, plan.partition)
        was_alone = not (shares or beside or (landed is not None and landed.with_tasklet))
        device_ms = 0.0 if landed is None else landed.collected.device_ms
        return IterationRecord(
            batch=BatchShape() if landed is None else landed.collected.shape,
            mode=Mode.NONE if plan.partition is not None and was_alone else plan.mode,
            online_ms=device_ms,
            total_ms=device_ms,
            tasklets=_group(finished, None),
            partition=plan.partition,
            beside=beside,
            untimed=tuple(TaskletRun(shape, count) for shape, count in others.items()),
            predicted_ms=None if landed is None else landed.predicted_ms,
            is_disturbed=(plan.mode is Mode.NONE and not was_alone)
            or (landed is not None and landed.collected.overtook),
            behind_tasklets=landed is not None and landed.behind_tasklets,
            with_tasklet=landed is not None and landed.with_tasklet,
        )

    @property
    def in_flight(self) -> InFlight | None:
        """The batch that a plan's can be launched ahead of the end of."""
        if not self._launched:
            return None
        plan, shape = self._launched[-1].plan, self._launched[-1].shape
        return InFlight(plan.partition, plan.predicted_ms if self._begun is None else None, shape)

    @property
    def wait_ms(self) -> float:
        """How long the batch in flight waits for tasklets on all SMs, or one that is launched now."""
        if self._launched:
            return max(0.0, (self._wait_until_s - time.perf_counter()) * 1e3)
        return self._device.tasklets_left_ms()

    @property
    def begins_after_ms(self) -> float:
        """From a plan until the device begins with its batch, where that has prompts and no other is in flight: what
        the host does before it can launch something, with a deviation on top."""
        return 0.0 if self._beginning is None else self._beginning.latency_ms(cautious=True)

    def _note_beginning(self, planned_s: float, began_s: float) -> None:
        took_ms = max(0.0, (began_s - planned_s) * 1e3)
        if self._beginning is None:
            self._beginning = Record(took_ms)
        else:
            self._beginning.add(took_ms)

    def _expect_tasklets_end(self) -> torch.cuda.Event | None:
        """The end of those that the batch to be launched waits for (None: of none), noting when that should be."""
        end = self._device.tasklets_end()
        if end is not None:
            self._wait_until_s = time.perf_counter() + self._device.tasklets_left_ms() / 1e3
        elif not self._launched:
            self._wait_until_s = -math.inf
        return end

    def tidy(self) -> None:
        """Give a piece of the memory back that one arena has kept for others and none has taken."""
        self._device.release_kept_memory(most_bytes=1)

    def _collect(self, emit: Emit, num_left: int) -> _Landed | None:
        """Wait for batches until no more than ``num_left`` are in flight; the last one."""
        landed = None
        while self._engine.num_in_flight > num_left:
            launched = self._launched.popleft()
            with self._device.online(launched.plan.partition):
                collected = self._engine.collect()
            if launched.planned_s is not None:
                self._note_beginning(launched.planned_s, collected.begun_s)
            is_behind = launched.is_behind and collected.waited
            landed = _Landed(collected, launched.plan.predicted_ms, launched.with_tasklet, is_behind)
            self._tasklets.batch_landed(collected.shape, launched.plan.partition, collected.device_ms)
            if self._trace is not None:
                end_s, partition = time.perf_counter(), launched.plan.partition
                self._trace.batch(collected.shape, end_s, collected.device_ms, partition, launched.fused)
            if self.device_time is not None:
                self.device_time.batch(collected.shape, collected.device_ms, shared=launched.shares)
            if collected.gap_ms is not None:
                self.gaps_ms.append(collected.gap_ms)
            emit(collected.outputs)
        return landed

    def _schedule(self, plan: Plan) -> OnlineStep | None:
        """The next batch, if there is one."""
        with self._device.online(plan.partition):
            return self._engine.schedule()

    def _launch_online(self, plan: Plan, step: OnlineStep, behind: torch.cuda.Event | None = None) -> TaskletRun | None:
        """Launch a batch: the tasklets that were fused into it. ``behind``: the end of tasklets that it waits for."""
        fused, is_behind, start_s = None, False, time.perf_counter()
        planned_s = self._planned_s if step.shape.prefill_tokens and not self._launched else None
        if step.shape.prefill_tokens:  # its products take the SMs of what is in flight, which ends all the later
            behind, self._wait_until_s = None, -math.inf
        # Where it is known when those it waits for end, it has all SMs to itself from then on.
        with_tasklet = self._device.is_training() and (behind is None or plan.partition is not None)
        if plan.num_fused > 0 and self._training.fusable_layer is not None:
            with torch.no_grad(), self._device.fused():
                ran, fused = self._fused.forward(step, plan.num_fused)
                self._launch(step, ran)
        else:
            is_behind = behind is not None and plan.partition is None and not self._launched
            with self._device.online(plan.partition):
                self._launch(step, behind=behind)
        self._launched.append(_Launched(plan, step.shape, with_tasklet, fused, planned_s, is_behind))
        # All else is launched while the device works at it.
        is_one_graph = fused is None and step.shape.prefill_tokens == 0
        self._tasklets.batch_was_launched(step.shape, time.perf_counter() - start_s, is_one_graph=is_one_graph)
        return fused

    def _launch(self, step: OnlineStep, ran: RanLayers | None = None, behind: torch.cuda.Event | None = None) -> None:
        """Again after each piece of memory that training gives back; the last try raises."""
        has_more = True
        while has_more:
            with suppress(torch.OutOfMemoryError):
                self._engine.launch(step, ran, behind)
                return
            has_more = self._training.discard()  # what the attempt held is freed with its frames
        self._engine.launch(step, ran, behind)


def _never() -> bool:
    return False


def _not_before(interrupted: Callable[[], bool], until_s: float) -> Callable[[], bool]:
    """``interrupted``, which says no until then."""
    return lambda: time.perf_counter() >= until_s and interrupted()


def _group(finished: list[FinishedTasklet], partition: Partition | None) -> tuple[tuple[TaskletRun, float], ...]:
    """Those of a partition. Tasklets of equal shape are one run with their summed time: each shape is learned from once
    in an iteration."""
    times_ms: defaultdict[TaskletShape, list[float]] = defaultdict(list)
    for tasklet in finished:
        if tasklet.partition == partition:
            times_ms[tasklet.shape].append(tasklet.elapsed_ms)
    return tuple((TaskletRun(shape, len(times)), sum(times)) for shape, times in times_ms.items())
