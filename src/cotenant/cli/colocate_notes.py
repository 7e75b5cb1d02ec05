"""What nobody should overlook who reads a report of `cotenant bench colocate`: said at once, and in the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from cotenant.bench.traces import Trace
from cotenant.cli.colocate_grid import Grid
from cotenant.cli.output import say_phase
from cotenant.scheduler.base import STEP_BY_STEP
from cotenant.scheduler.space import NEED_PARTITIONS

if TYPE_CHECKING:
    from cotenant.runtime.colocate_bench import ColocateBench

_LONG_TASKLET = 0.7  # of a TPOT target: one beside a step is too much


def warn(notes: Sequence[str]) -> None:
    for note in notes:
        say_phase(f"warning: {note}")


def notes_on(traces: Mapping[str, Trace], limit: int) -> list[str]:
    """What of them is not served, for whoever takes what is measured for all of it. ``limit``: tokens of a request."""
    return [
        f"{name}: {trace.num_too_long} of {trace.num_too_long + len(trace.requests)} requests have more than {limit} "
        "tokens and are left out, of the rate as well"
        for name, trace in traces.items()
        if trace.num_too_long
    ]


def who_trains_little(bench: ColocateBench, grid: Grid) -> list[str]:
    """Whatever the load, so that nobody takes it for the policy's doing."""
    notes, tpot_ms = [], min(slo.tpot_ms for slo in grid.slos)
    divided = [] if bench.has_partitions else [name for name in grid.policies if name in NEED_PARTITIONS]
    if divided:
        notes.append(
            f"{', '.join(divided)}: no multiprocessors are divided here, so training runs only while nobody asks"
        )
    longest_ms = bench.longest_tasklet_ms
    hurried = [name for name in grid.policies if name in STEP_BY_STEP]
    if hurried and longest_ms > _LONG_TASKLET * tpot_ms:
        notes.append(
            f"{', '.join(hurried)}: training will get little or nothing beside requests where the TPOT target is "
            f"{tpot_ms:g} ms: a piece of training (a tasklet) takes up to {longest_ms:.1f} ms, and there each decode "
            "step has to end within the target together with its piece. A smaller --tasklet-tokens or --seq-len makes "
            "pieces shorter"
        )
    return notes
