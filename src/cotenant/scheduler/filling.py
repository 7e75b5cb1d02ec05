"""How many of a job's next tasklets fit into some room: what planning does most often.

Layers repeat, so a cycle's turns are counted at once: it takes as long however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import takewhile
from typing import NamedTuple

import msgspec

from cotenant.core.plan import BatchShape, Partition
from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor

LEAST_MS = 1e-3  # of a tasklet
# One table of costs is asked anew in every so many plans: what is learned in one iteration moves a record by a tenth.
_PLANS_PER_TABLE = 2


class Cost(NamedTuple):
    """A tasklet's: of the room that it is put into, what it adds to the step, and what it takes alone on all SMs."""

    used_ms: float
    added_ms: float
    alone_ms: float


class Turn(msgspec.Struct, frozen=True, gc=False):
    """Of a cycle: its number of tasklets and the sums of their costs, as far as these are known; the costs of each of
    ``runs``, up to the first that nobody knows. ``is_known``: there is none. ``rests``: what is left of ``runs`` after
    so many tasklets, as far as it was asked for: the same objects come again, and have a turn in the table."""

    num_tasklets: int
    used_ms: float
    added_ms: float
    alone_ms: float
    costs: tuple[tuple[TaskletRun, Cost], ...]
    is_known: bool
    runs: tuple[TaskletRun, ...]
    rests: dict[int, tuple[TaskletRun, ...]] = {}

    def rest(self, num_tasklets: int) -> tuple[TaskletRun, ...]:
        """Of the runs, after the first so many of their tasklets."""
        rest = self.rests.get(num_tasklets)
        if rest is None:
            rest = self.rests[num_tasklets] = tuple(_without(self.runs, num_tasklets))
        return rest


class CostTable:
    """What ``ask`` says of shapes, asked once of each until it is to ``forget``; None for what nobody knows, which is
    asked again. Planning asks for the same objects over and over: what is known is found by their identity, and holds
    them, so that no other object can have it. ``batch_ms``: what the batch takes beside these tasklets; None: not asked
    yet, or nobody knows."""

    __slots__ = ("_costs", "_turns", "ask", "batch_ms")

    def __init__(self, ask: Callable[[TaskletShape], Cost | None]) -> None:
        self.ask = ask
        self.batch_ms: float | None = None
        self._costs: dict[int, tuple[Cost, TaskletShape]] = {}
        self._turns: dict[int, Turn] = {}

    def turn(self, runs: tuple[TaskletRun, ...]) -> Turn:
        """Of a cycle with these runs."""
        return self._turns.get(id(runs)) or self._add(runs)

    def forget(self) -> None:
        self._costs.clear()
        self._turns.clear()

    def _add(self, runs: tuple[TaskletRun, ...]) -> Turn:
        costs: list[tuple[TaskletRun, Cost]] = []
        num_tasklets, used_ms, added_ms, alone_ms = 0, 0.0, 0.0, 0.0
        for run in runs:
            cost = self.cost(run.shape)
            if cost is None:
                break
            costs.append((run, cost))
            count = run.count
            each_ms, each_added_ms, each_alone_ms = cost
            num_tasklets += count
            used_ms += count * each_ms
            added_ms += count * each_added_ms
            alone_ms += count * each_alone_ms
        is_known = len(costs) == len(runs)
        turn = Turn(num_tasklets, used_ms, added_ms, alone_ms, tuple(costs), is_known, runs)
        if is_known:
            self._turns[id(runs)] = turn
        return turn

    def cost(self, shape: TaskletShape) -> Cost | None:
        found = self._costs.get(id(shape))
        if found is not None:
            return found[0]
        cost = self.ask(shape)
        if cost is not None:
            self._costs[id(shape)] = (cost, shape)
        return cost


class Taken(msgspec.Struct, frozen=True, gc=False):
    """``num_tasklets`` and the sums of their costs. ``stopped_at``: the first that was not taken, None if there was
    none; ``next_cost``: its, None also where that is not known."""

    num_tasklets: int
    used_ms: float
    added_ms: float
    alone_ms: float
    stopped_at: TaskletShape | None = None
    next_cost: Cost | None = None


NONE_TAKEN = Taken(0, 0.0, 0.0, 0.0)


def take(upcoming: tuple[TaskletCycle, ...], room_ms: float, table: CostTable, begun: Taken = NONE_TAKEN) -> Taken:
    """As many of the next tasklets as ``room_ms`` has room for, with those of ``begun``, which come first."""
    num_tasklets, used_ms, added_ms, alone_ms = begun.num_tasklets, begun.used_ms, begun.added_ms, begun.alone_ms
    for cycle in upcoming:
        turn, num_turns = table.turn(cycle.runs), 0
        if turn.is_known and used_ms + turn.used_ms <= room_ms:
            num = (room_ms - used_ms) / turn.used_ms
            num_turns = cycle.count if num >= cycle.count else int(num)
            num_tasklets += num_turns * turn.num_tasklets
            used_ms += num_turns * turn.used_ms
            added_ms += num_turns * turn.added_ms
            alone_ms += num_turns * turn.alone_ms
            if num_turns == cycle.count:
                continue
        # Of the next turn what there is room for.
        for run, cost in turn.costs:
            each_ms, each_added_ms, each_alone_ms = cost
            num = (room_ms - used_ms) / each_ms
            if num < 1.0:
                return Taken(num_tasklets, used_ms, added_ms, alone_ms, run.shape, cost)
            count = run.count if num >= run.count else int(num)
            num_tasklets += count
            used_ms += count * each_ms
            added_ms += count * each_added_ms
            alone_ms += count * each_alone_ms
            if count < run.count:
                return Taken(num_tasklets, used_ms, added_ms, alone_ms, run.shape, cost)
        if turn.is_known and num_turns + 1 == cycle.count:
            continue  # to the last bit, there was room for one more
        next_cost = turn.costs[0][1] if turn.is_known else None
        stopped_at = turn.runs[0 if turn.is_known else len(turn.costs)].shape
        return Taken(num_tasklets, used_ms, added_ms, alone_ms, stopped_at, next_cost)
    return Taken(num_tasklets, used_ms, added_ms, alone_ms)


def after(upcoming: tuple[TaskletCycle, ...], num_tasklets: int, table: CostTable) -> tuple[TaskletCycle, ...]:
    """What is left of a job's tasklets after the first so many, to be looked up in ``table``."""
    for index, cycle in enumerate(upcoming):
        turn_size = cycle.turn_size
        num_turns, num_begun = divmod(num_tasklets, turn_size)
        num_left = cycle.count - num_turns
        if num_left > 0:
            others = upcoming[index + 1 :]
            if num_begun:
                others = (TaskletCycle(cycle.runs, num_left - 1), *others) if num_left > 1 else others
                return (TaskletCycle(table.turn(cycle.runs).rest(num_begun)), *others)
            return (TaskletCycle(cycle.runs, num_left), *others)
        num_tasklets -= turn_size * cycle.count
    return ()


def _without(runs: tuple[TaskletRun, ...], num_tasklets: int) -> Iterator[TaskletRun]:
    """What is left after the first so many."""
    for run in runs:
        if num_tasklets < run.count:
            yield TaskletRun(run.shape, run.count - num_tasklets) if num_tasklets > 0 else run
        num_tasklets -= run.count


def is_untold(predictor: LatencyPredictor, shape: TaskletShape, cost: Cost | None) -> bool:
    """Whether a tasklet has to be tried to know what it takes: it was never measured, or took too long when it was, and
    that is long ago. Nothing behind it runs before it, so training would else stand for as long as requests come."""
    return cost is None or predictor.may_have_changed(shape)


def may_be_tried(predictor: LatencyPredictor, shape: TaskletShape, room_ms: float) -> bool:
    """Whether there is room for a tasklet of a shape that was never measured."""
    return room_ms > 0 and predictor.first_tasklet_ms(shape) <= room_ms


class Costs:
    """What a ``predictor`` says of tasklets and of one ``batch`` at a time, kept from plan to plan."""

    def __init__(self, predictor: LatencyPredictor, batch: BatchShape | None = None) -> None:
        self.predictor = predictor
        self.batch = batch or BatchShape()
        self._alone = CostTable(self._ask_alone)
        self._beside: dict[Partition, CostTable] = {}
        self.behind = CostTable(partial(self._ask_with_batch, fused=False))
        """Behind the batch, which has all SMs."""
        self.fused = CostTable(partial(self._ask_with_batch, fused=True))
        """Inside it."""
        self._shape = predictor.shape_of(self.batch)
        self._trained = predictor.trained
        self._num_renewed = 0

    def renew_for(self, batch: BatchShape) -> Costs:
        """Make this object, which is returned, one for another plan, of this batch: what it was for before is gone.
        What has to do with batches of another shape is forgotten, and a part of the rest, so that some plans later all
        of it is asked again."""
        self.batch, shape = batch, self.predictor.shape_of(batch)
        if shape != self._shape:
            self._shape = shape
            self.behind.forget()
            self.fused.forget()
            for table in self._beside.values():
                table.batch_ms = None
        if self.predictor.trained != self._trained:  # another job's tasklets may have the same shapes
            self._trained = self.predictor.trained
            self._alone.forget()
            self.behind.forget()
            self.fused.forget()
            self._beside.clear()
        self._num_renewed += 1
        if self._num_renewed % _PLANS_PER_TABLE == 0:
            self._renew_one(self._num_renewed // _PLANS_PER_TABLE)
        return self

    def _renew_one(self, turn: int) -> None:
        tables = (self._alone, self.behind, self.fused)
        place = turn % (len(tables) + len(self._beside))
        if place < len(tables):
            tables[place].forget()
        else:
            del self._beside[next(iter(self._beside))]

    def beside(self, partition: Partition) -> CostTable | None:
        """On the partition's best-effort SMs; None where that was not tried, or for long not again. What it adds to the
        batch is in the batch's own time."""
        table = self._beside.get(partition)
        if table is None and self.predictor.was_tried(partition):
            table = self._beside[partition] = CostTable(partial(self._ask_beside, partition))
        return table

    def _ask_alone(self, shape: TaskletShape) -> Cost | None:
        alone_ms = self.predictor.tasklet_ms(shape)
        return None if alone_ms is None else Cost(alone_ms, alone_ms, alone_ms)

    def _ask_beside(self, partition: Partition, shape: TaskletShape) -> Cost | None:
        each_ms, alone = self.predictor.tasklet_ms(shape, partition=partition), self._alone.cost(shape)
        if each_ms is None:
            return None
        # Where requests never cease, some policies run such a tasklet in partitions alone: it is known there even so.
        alone_ms = each_ms * (1.0 - partition.online_share) if alone is None else alone.alone_ms
        return Cost(each_ms if each_ms > LEAST_MS else LEAST_MS, 0.0, alone_ms)

    def _ask_with_batch(self, shape: TaskletShape, *, fused: bool) -> Cost | None:
        added_ms = self.predictor.tasklet_ms(shape, with_batch=self.batch, fused=fused)
        alone = self._alone.cost(shape)
        if added_ms is None or alone is None:
            return None
        # Inside a step one may have been measured as adding nothing; it has to end in time all the same.
        used_ms = added_ms if added_ms > 0 else max(alone.alone_ms, LEAST_MS)
        return Cost(used_ms, added_ms, alone.alone_ms)


class Filling(msgspec.Struct, frozen=True, gc=False):
    """``num_tasklets``, the first ``num_fused`` of them inside the step. Together they add ``added_ms`` to it;
    ``alone_ms`` is what they take by themselves: how far training gets. ``is_all``: no tasklet is left."""

    num_tasklets: int
    num_fused: int
    added_ms: float
    alone_ms: float
    is_all: bool = False


def fill(costs: Costs, upcoming: tuple[TaskletCycle, ...], slack_ms: float, *, fuse: bool = False) -> Filling:
    """As many of the next tasklets as ``slack_ms`` has room for beside one decode step; with ``fuse`` leading forward
    layers run inside it. A shape that was never measured, or is too long by what was measured long ago, gets one
    tasklet, and no other with it, if there is room for what a prior says that it needs: so it is measured."""
    if slack_ms <= 0:
        return Filling(0, 0, 0.0, 0.0)
    inside, left = NONE_TAKEN, upcoming
    if fuse:
        leading = tuple(takewhile(_may_be_fused, upcoming))
        inside, left = take(leading, slack_ms, costs.fused), upcoming[len(leading) :]
    taken = inside if inside.stopped_at is not None else take(left, slack_ms, costs.behind, inside)
    stopped_at = taken.stopped_at
    if taken.num_tasklets == 0 and stopped_at is not None and is_untold(costs.predictor, stopped_at, taken.next_cost):
        is_tried = may_be_tried(costs.predictor, stopped_at, slack_ms)
        return Filling(int(is_tried), int(is_tried and taken is inside), 0.0, 0.0)
    return Filling(taken.num_tasklets, inside.num_tasklets, taken.added_ms, taken.alone_ms, stopped_at is None)


def _may_be_fused(cycle: TaskletCycle) -> bool:
    return cycle.runs[0].shape.kind is TaskletKind.FORWARD
