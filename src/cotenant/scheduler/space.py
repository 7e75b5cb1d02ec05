"""Sharing in space: what a partition of the SMs gets training while a decode step runs, and what it costs the step.

A step beside tasklets takes longer, for it has fewer SMs and shares the memory's bandwidth; training goes on meanwhile
at the speed of the SMs that it has. The rest of a request's slack is as good for tasklets on all SMs as before.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

import msgspec

from cotenant.core.plan import Mode, Partition, Plan
from cotenant.core.tasklet import TaskletCycle
from cotenant.scheduler.filling import Costs, take

# Of the SMs, for batches, where nothing else is said. Adaptive: about a third was best by a co-run map of one H200, and
# more where steps leave less of the target: 32, 48, 64 and 80 of 132. LLMStation's paper divides none; the same here.
# Harli: "coarse-grained steps (e.g., 5% or 10%)" (section 5.1). Static: its StaticMode (section 8.1).
_SM_SHARES = {
    "adaptive": (0.24, 0.36, 0.48, 0.6),
    "llmstation": (0.24, 0.36, 0.48, 0.6),
    "harli": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6),
    "static": (0.6,),
}
NEED_PARTITIONS = ("harli", "static")  # train beside requests in them alone
_PROMPTS_TOO = ("static",)  # run batches with prompts in them
# A step on a part of the SMs whose time nobody knows: as if it had nothing to do but compute, and so much more.
_UNKNOWN_RATIO = 1.25
# Beside a batch run this many tasklets more than are expected to end with it: its end is what ends them, and a few are
# in flight by then.
_SPARE = 4
_MOST_BESIDE = 64


def sm_shares(policy: str) -> tuple[float, ...]:
    """Of the SMs, that batches have under a policy while tasklets run on the others."""
    return _SM_SHARES.get(policy, ())


def prompt_shares(policy: str) -> tuple[float, ...]:
    """Of the SMs, that batches with prompts have under a policy while tasklets run on the others."""
    return sm_shares(policy) if policy in _PROMPTS_TOO else ()


def nearest(partitions: tuple[Partition, ...], shares: tuple[float, ...]) -> tuple[Partition, ...]:
    """Of some partitions those that come closest to these shares of the SMs for batches."""

    def closest(share: float) -> Partition:
        return min(partitions, key=lambda partition: abs(partition.online_share - share))

    found = {closest(share) for share in shares if partitions}
    return tuple(sorted(found))


class Beside(msgspec.Struct, frozen=True, gc=False):
    """A decode step in a partition. ``step_ms``: its time; ``num_tasklets`` end meanwhile on the other SMs, and with
    the part of another they would take ``alone_ms`` on all of them. That one's rest: ``rest_ms`` where it is,
    ``rest_alone_ms`` on all SMs. ``is_known``: these were measured, or follow from what was; a prior alone would keep
    what it thinks little of from ever being tried. ``is_all``: no tasklet is left then."""

    partition: Partition
    step_ms: float
    num_tasklets: int = 0
    alone_ms: float = 0.0
    rest_ms: float = 0.0
    rest_alone_ms: float = 0.0
    is_known: bool = False
    is_all: bool = False

    @property
    def most_beside(self) -> int:
        """How many tasklets to allow beside the batch."""
        return min(_MOST_BESIDE, self.num_tasklets + _SPARE)


def in_each(
    costs: Costs, partitions: tuple[Partition, ...], upcoming: tuple[TaskletCycle, ...], step_ms: float
) -> list[Beside]:
    """What comes of running the batch in each of the partitions; ``step_ms``: what it takes on all SMs."""
    return [_beside(costs, partition, upcoming, step_ms) for partition in partitions]


def _beside(costs: Costs, partition: Partition, upcoming: tuple[TaskletCycle, ...], step_ms: float) -> Beside:
    table = costs.beside(partition)
    known_ms = None if table is None else table.batch_ms
    if known_ms is None:
        known_ms = costs.predictor.batch_ms(costs.batch, beside_training=True, partition=partition)
        if table is not None:
            table.batch_ms = known_ms
    if known_ms is None or table is None:
        return Beside(partition, known_ms or step_ms / partition.online_share * _UNKNOWN_RATIO)
    taken = take(upcoming, known_ms, table)
    num_tasklets, alone_ms, next_cost = taken.num_tasklets, taken.alone_ms, taken.next_cost
    if next_cost is None:
        is_all = taken.stopped_at is None
        return Beside(partition, known_ms, num_tasklets, alone_ms, 0.0, 0.0, is_all or num_tasklets > 0, is_all)
    each_ms, _, each_alone_ms = next_cost
    alone_ms += (known_ms - taken.used_ms) / each_ms * each_alone_ms
    # Where the one in flight stands is not known: on average the step's end finds one half done.
    return Beside(partition, known_ms, num_tasklets, alone_ms, 0.5 * each_ms, 0.5 * each_alone_ms, True)


def to_try(found: Iterable[Beside], longest_ms: float) -> Beside | None:
    """Of steps in partitions the fastest that nobody knows, if one gap between two tokens may be so long."""
    unknown = [each for each in found if not each.is_known and each.step_ms <= longest_ms]
    return min(unknown, key=attrgetter("step_ms"), default=None)


def in_space(shared: Beside, num_behind: int = 0, behind_ms: float = 0.0, hold_ms: float = 0.0) -> Plan:
    """The batch in a partition, tasklets beside it, and so many behind it, which take ``behind_ms``."""
    num_beside = shared.most_beside
    return Plan(
        num_tasklets=num_beside + num_behind,
        num_beside=num_beside,
        partition=shared.partition,
        hold_ms=hold_ms,
        mode=Mode.SPATIAL,
        predicted_ms=shared.step_ms + behind_ms if shared.is_known else None,
    )
