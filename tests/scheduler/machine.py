"""A machine of fixed latencies that carries plans out on a clock of its own: what a policy makes of a load. As in the
worker, the next batch is planned as one begins that no tasklets follow.

Latencies are like those of one H200 (Llama-3.1-8B, 32 sequences of about 1,024 tokens, training on 2,048): decode
beside training on the other SMs, and training's speed there as a share of its speed on all.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from cotenant.core.plan import (
    BatchShape,
    InFlight,
    IterationRecord,
    JobView,
    Mode,
    Partition,
    Plan,
    RequestView,
    Slo,
    Snapshot,
)
from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape, runs_of
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler import create_policy
from cotenant.scheduler.chunking import most_margin
from cotenant.scheduler.filling import CostTable, after
from cotenant.scheduler.margin import Margin

BATCH_SIZE, CONTEXT = 32, 1024
STEP_MS = 5.7
HOST_MS = 0.5  # that the device waits for the host where that has planned nothing ahead
# (decode beside training, training's speed)
CORUN = {
    Partition(16, 116): (18.7, 0.65),
    Partition(24, 108): (14.7, 0.64),
    Partition(32, 100): (12.0, 0.61),
    Partition(40, 92): (10.7, 0.59),
    Partition(48, 84): (10.1, 0.58),
    Partition(64, 68): (8.0, 0.50),
    Partition(80, 52): (7.7, 0.39),
}
ATTENTION = TaskletShape(TaskletKind.FORWARD_ATTENTION, 2048, 2048)
MLP = TaskletShape(TaskletKind.FORWARD_MLP, 2048, 2048)
DOWN = TaskletShape(TaskletKind.BACKWARD_DOWN, 2048, 2048)
UP = TaskletShape(TaskletKind.BACKWARD_UP, 2048, 2048)
BACKWARD = TaskletShape(TaskletKind.BACKWARD_ATTENTION, 2048, 2048)
LOSS = TaskletShape(TaskletKind.LOSS, 2048, 0)
OPTIMIZER = TaskletShape(TaskletKind.OPTIMIZER, 0, 0)
ALONE_MS = {ATTENTION: 0.5, MLP: 1.1, DOWN: 0.4, UP: 0.8, BACKWARD: 0.6, LOSS: 0.8, OPTIMIZER: 1.1}
_MICRO_BATCH = (
    TaskletCycle((TaskletRun(ATTENTION, 1), TaskletRun(MLP, 1)), 32),
    TaskletCycle((TaskletRun(LOSS, 8),)),
    TaskletCycle((TaskletRun(DOWN, 1), TaskletRun(UP, 1), TaskletRun(BACKWARD, 1)), 32),
)
CYCLES = (*_MICRO_BATCH, *_MICRO_BATCH, TaskletCycle((TaskletRun(OPTIMIZER, 1),)))
STEP = [run.shape for run in runs_of(CYCLES) for _ in range(run.count)]


@dataclass
class Outcome:
    """``harvest``: training's share of what it does alone. ``tpot_ms`` of each request that ended."""

    harvest: float = 0.0
    tpot_ms: list[float] = field(default_factory=list)
    longest_gap_ms: float = 0.0
    modes: dict[Mode, int] = field(default_factory=dict)
    partitions: dict[Partition, int] = field(default_factory=dict)
    num_changes: int = 0  # of the partition, from one iteration to the next

    def attainment(self, target_ms: float) -> float:
        return sum(tpot_ms <= target_ms for tpot_ms in self.tpot_ms) / len(self.tpot_ms)


class Machine:
    """Steady decoding beside one job. Requests are replaced between two iterations as they end."""

    def __init__(
        self,
        policy: str,
        slo: Slo,
        partitions: tuple[Partition, ...],
        lengths: tuple[int, int] = (100, 400),
        noise: float = 0.01,
    ) -> None:
        """``lengths``: of answers, the least and the most."""
        self.predictor = LatencyPredictor("simulated", "model")
        self._policy = create_policy(policy, self.predictor)
        self._slo = slo
        self._partitions = partitions
        self._rng = random.Random(0)
        self._noise = noise
        self._lengths = lengths
        self._margin = Margin(slo)
        self._now_s = 1000.0
        self._names = itertools.count()
        self._requests: list[list[float]] = []  # name, first token, tokens, last token, tokens wanted
        self._position, self._done_ms = 0, 0.0  # in the step; of the tasklet there, alone
        self._speed = 1.0  # where that one is
        self._ahead: Plan | None = None  # for the next batch
        self._last_partition: Partition | None = None
        self.stalls_ms: list[float] = []  # of the next steps beside training

    def run(self, warm_s: float, measured_s: float) -> Outcome:
        outcome, trained_ms = Outcome(), 0.0
        while len(self._requests) < BATCH_SIZE:
            self._add()
        for shape, alone_ms in ALONE_MS.items():  # a job has run alone before
            for _ in range(8):
                runs = ((TaskletRun(shape, 1), self._noisy(alone_ms)),)
                self.predictor.observe(IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, alone_ms, runs))
        start_s = self._now_s + warm_s
        while self._now_s < start_s + measured_s:
            is_measured = self._now_s >= start_s
            gained_ms = self._iterate(outcome if is_measured else Outcome())
            trained_ms += gained_ms if is_measured else 0.0
        outcome.tpot_ms += [
            (last_s - first_s) * 1e3 / (count - 1)
            for _, first_s, count, last_s, _ in self._requests
            if count > min(100, self._lengths[0])
        ]
        outcome.harvest = trained_ms / 1e3 / (self._now_s - start_s)
        return outcome

    def _begin_margin(self, batch: BatchShape) -> None:
        """As the worker's loop does before a plan."""
        if not batch.num_decode:
            return
        step_ms = self.predictor.batch_ms(BatchShape(batch.num_decode, batch.context_tokens)) or 0.0
        if not self._margin.has_learned:
            self._margin.begin_at(self._policy.first_margin(self._slo, step_ms))
        if batch.prefill_tokens:
            self._margin.expect_prompts(most_margin(self._slo, step_ms), self._now_s, step_ms)

    def _alone_ms(self, batch: BatchShape) -> float:
        return STEP_MS

    def _noisy(self, ms: float) -> float:
        return ms * (1.0 + self._noise * self._rng.uniform(-1, 1))

    def _add(self) -> None:
        self._requests.append([next(self._names), self._now_s, 1, self._now_s, self._rng.randint(*self._lengths)])
        self._margin.note(str(int(self._requests[-1][0])), 1, self._now_s, is_over=False)

    def _upcoming(self) -> tuple[TaskletCycle, ...]:
        return after(CYCLES, self._position, CostTable(lambda shape: None))

    def _plan(self, in_flight: InFlight | None) -> Plan:
        batch = BatchShape(BATCH_SIZE, BATCH_SIZE * CONTEXT)
        num_new = 0 if in_flight is None else 1
        views = tuple(
            RequestView(str(int(name)), first_s, first_s, int(count), 0, int(most))
            for name, first_s, count, _, most in self._requests
            if count + num_new < most
        )
        self._begin_margin(batch)
        snapshot = Snapshot(
            self._now_s, self._slo, batch, views, JobView("job", self._upcoming()), partitions=self._partitions,
            margin=self._margin.aim(self._now_s), in_flight=in_flight,
        )  # fmt: skip
        return self._policy.plan(snapshot)

    def _iterate(self, outcome: Outcome) -> float:
        if self._ahead is None:
            self._now_s += HOST_MS / 1e3
        plan = self._ahead or self._plan(None)
        batch = BatchShape(BATCH_SIZE, BATCH_SIZE * CONTEXT)
        in_flight = InFlight(plan.partition, plan.predicted_ms, batch)
        self._ahead = self._plan(in_flight) if plan.num_tasklets == plan.num_beside else None
        record, gained_ms, token_ms = self._carry_out(plan, batch)
        self.predictor.observe(record)
        outcome.modes[plan.mode] = outcome.modes.get(plan.mode, 0) + 1
        outcome.num_changes += plan.partition != self._last_partition
        self._last_partition = plan.partition
        if plan.partition is not None:
            outcome.partitions[plan.partition] = outcome.partitions.get(plan.partition, 0) + 1
        self._tokens(outcome, self._now_s + token_ms / 1e3)
        if plan.mode is not Mode.NONE:
            self._margin.trained(max(0.0, record.total_ms - STEP_MS), self._now_s)
        self._now_s += record.total_ms / 1e3
        while len(self._requests) < BATCH_SIZE:
            self._add()
        return gained_ms

    def _tokens(self, outcome: Outcome, at_s: float) -> None:
        for request in list(self._requests):
            name, first_s, count, last_s, most = request
            outcome.longest_gap_ms = max(outcome.longest_gap_ms, (at_s - last_s) * 1e3)
            request[2], request[3] = count + 1, at_s
            is_over = request[2] >= most
            self._margin.note(str(int(name)), 1, at_s, is_over)
            if is_over:
                outcome.tpot_ms.append((at_s - first_s) * 1e3 / (request[2] - 1))
                self._requests.remove(request)
        self._margin.settle(at_s)

    def _carry_out(self, plan: Plan, batch: BatchShape) -> tuple[IterationRecord, float, float]:
        beside: list[tuple[TaskletRun, float]] = []
        behind: list[tuple[TaskletRun, float]] = []
        alone_ms = self._alone_ms(batch)
        step_ms, gained_ms, waited_ms, behind_ms = self._noisy(alone_ms), 0.0, 0.0, 0.0
        if plan.partition is not None:
            corun_ms, self._speed = CORUN[plan.partition]
            step_ms = self._noisy(corun_ms * alone_ms / STEP_MS)
            gained_ms, beside = self._train(step_ms, self._speed, plan.num_beside)
        if plan.num_tasklets and self.stalls_ms:
            step_ms += self.stalls_ms.pop()
        num_behind = plan.num_tasklets - plan.num_beside
        if num_behind and self._done_ms:  # the one in flight ends where it began
            waited_ms = (ALONE_MS[STEP[self._position]] - self._done_ms) / self._speed
            more_ms, runs = self._train(waited_ms + 1e-6, self._speed, 1)
            gained_ms, beside = gained_ms + more_ms, beside + runs
        for _ in range(num_behind):
            after_ms = waited_ms + behind_ms
            if after_ms >= plan.hold_ms and self._interrupts(self._now_s + (step_ms + after_ms) / 1e3):
                break
            more_ms, runs = self._train(self._noisy(ALONE_MS[STEP[self._position]]), 1.0, 1)
            gained_ms, behind_ms = gained_ms + more_ms, behind_ms + sum(ms for _, ms in runs)
            behind += runs
        total_ms = step_ms + waited_ms + behind_ms
        record = IterationRecord(
            batch, plan.mode, step_ms, total_ms, tuple(behind), partition=plan.partition, beside=tuple(beside),
            predicted_ms=plan.predicted_ms if len(behind) == num_behind else None,
        )  # fmt: skip
        return record, gained_ms, step_ms

    def _interrupts(self, now_s: float) -> bool:
        """Whether somebody has come, for whom tasklets behind a batch end."""
        return False

    def _train(self, time_ms: float, speed: float, most: int) -> tuple[float, list[tuple[TaskletRun, float]]]:
        """So long at this speed, at most so many tasklets: what it would take alone, and those that ended."""
        gained_ms, ended = 0.0, []
        while time_ms > 1e-9 and len(ended) < most:
            shape = STEP[self._position]
            needed_ms = (ALONE_MS[shape] - self._done_ms) / speed
            part_ms = min(needed_ms, time_ms)
            gained_ms += part_ms * speed
            time_ms -= part_ms
            self._done_ms += part_ms * speed
            if part_ms >= needed_ms - 1e-9 or speed == 1.0:
                ended.append((TaskletRun(shape, 1), self._noisy(ALONE_MS[shape] / speed)))
                self._position, self._done_ms = (self._position + 1) % len(STEP), 0.0
        return gained_ms, ended
