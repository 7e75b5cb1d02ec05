"""Snapshot and plan: what a policy sees before an iteration, and what it decides."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec

from cotenant.core.tasklet import TaskletCycle, TaskletRun, TaskletShape

# A gap between two tokens may be this many TPOT targets long, if nothing else is said.
MAX_GAP_TARGETS = 3.0
# The share of the TPOT target that is aimed at before any request has told how close is too close.
FIRST_MARGIN = 0.95


@dataclass(frozen=True, slots=True)
class Slo:
    """The online tenant's targets. ``ttft_ms``: arrival to first token; ``tpot_ms``: mean gap after it; ``itl_ms``: any
    gap that best-effort work is planned into (None: three times ``tpot_ms``). ``attainment``: the share of requests
    that should meet them."""

    ttft_ms: float
    tpot_ms: float
    itl_ms: float | None = None
    attainment: float = 0.99

    @property
    def max_gap_ms(self) -> float:
        return MAX_GAP_TARGETS * self.tpot_ms if self.itl_ms is None else self.itl_ms


class BatchShape(msgspec.Struct, frozen=True, gc=False):
    """What an online batch's latency depends on.

    ``context_tokens``: KV entries that the decoding sequences attend to, summed over them.
    ``prefill_context_tokens``: the same for the prefill chunks. ``num_adapters``: distinct LoRA adapters in the batch.
    ``prefill_pairs``: of a token of a prefill chunk and a KV entry that it attends to, summed over the chunks: what
    their attention computes. It is not to be told from the sums, for several prompts share a batch.

    Planning makes some for each batch, so it is of the kind that costs least.
    """

    num_decode: int = 0
    context_tokens: int = 0
    prefill_tokens: int = 0
    prefill_context_tokens: int = 0
    num_adapters: int = 0
    prefill_pairs: int = 0

    @property
    def empty(self) -> bool:
        return self.num_decode == 0 and self.prefill_tokens == 0


_NO_BATCH = BatchShape()


def causal_pairs(num_tokens: int, num_cached: int = 0) -> int:
    """Of so many tokens of a prompt, after those of it that are cached: pairs of one and an entry that it attends to,
    which are those before it and its own."""
    return num_tokens * num_cached + num_tokens * (num_tokens + 1) // 2


class Partition(NamedTuple):
    """Disjoint sets of SMs, as numbers of them: the online batch's, and those of the tasklets beside it."""

    online_sms: int
    best_effort_sms: int

    @property
    def num_sms(self) -> int:
        return self.online_sms + self.best_effort_sms

    @property
    def online_share(self) -> float:
        return self.online_sms / self.num_sms


class RequestView(msgspec.Struct, frozen=True, gc=False):
    """A live request as a policy sees it.

    ``first_token_s`` is None until its first token. ``num_generated`` counts tokens that were sent, of ``max_tokens``
    that it may have (None: not known). ``num_prompt_tokens_left``: those that are to be computed; what the prefix cache
    has of them is not. ``num_computed``: tokens before those, which they attend to. ``has_begun``: a batch has had some
    of its prompt. ``priority``: lower is served earlier. ``waits_for_adapter``: it cannot run before its adapter has
    been read, nor is it known till then what is cached.

    One of each request is made in every iteration, so it is of the kind that costs least.
    """

    request_id: str
    arrival_s: float
    first_token_s: float | None = None
    num_generated: int = 0
    num_prompt_tokens_left: int = 0
    max_tokens: int | None = None
    has_begun: bool = False
    priority: int = 0
    waits_for_adapter: bool = False
    num_computed: int = 0


@dataclass(frozen=True, slots=True)
class JobView:
    """A runnable job as a policy sees it: the tasklets up to the end of its current optimizer step, in order."""

    job_id: str
    upcoming: tuple[TaskletCycle, ...]

    @property
    def next_shape(self) -> TaskletShape:
        return self.upcoming[0].runs[0].shape

    @property
    def num_left(self) -> int:
        return sum(cycle.num_tasklets for cycle in self.upcoming)


@dataclass(frozen=True, slots=True)
class InFlight:
    """A batch that was launched and has not landed. ``partition``: of the SMs, that it has; None: all.
    ``predicted_ms``: what it takes from its beginning to its end, if its plan says so. ``batch``: its shape."""

    partition: Partition | None = None
    predicted_ms: float | None = None
    batch: BatchShape = _NO_BATCH


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All that a policy may look at. ``batch`` is what the online engine would run next if asked; with it end
    ``num_ending`` prompts, whose first tokens come then. ``margin``: the share of the TPOT target to be aimed at, by
    what came of requests so far; ``taken_off``: what prompts take off it for now. ``idle_s``: how long no request has
    been live. ``largest_gap_s``: between two batches while requests were live, lately. ``partitions``: those that
    ``batch`` can have. ``in_flight``: the batch before it, if that has not landed: this one begins as it ends.
    ``wait_ms``: until tasklets on all SMs have ended that the batch in flight waits for or, if there is none, this one;
    as far as is known. ``least_answer``: tokens that hardly any answer has fewer of; 0: not known. ``since_tokens_ms``:
    since tokens went out the last time. ``now_s``: of ``time.monotonic``, like the requests' times."""

    now_s: float
    slo: Slo
    batch: BatchShape
    requests: tuple[RequestView, ...] = ()
    job: JobView | None = None
    can_fuse: bool = False
    margin: float = FIRST_MARGIN
    taken_off: float = 0.0
    idle_s: float = math.inf
    largest_gap_s: float = 0.0
    partitions: tuple[Partition, ...] = ()
    num_ending: int = 0
    in_flight: InFlight | None = None
    wait_ms: float = 0.0
    least_answer: int = 0
    since_tokens_ms: float = 0.0

    @property
    def behind_tasklets(self) -> bool:
        """What ``IterationRecord.behind_tasklets`` is going to be, as far as is known, if the batch has all SMs and no
        prompts."""
        return self.wait_ms > 0 and self.in_flight is None


class Mode(StrEnum):
    """How best-effort work shared the device in one iteration."""

    NONE = "none"
    FUSED = "fused"
    TEMPORAL = "temporal"
    SPATIAL = "spatial"


class Plan(msgspec.Struct, frozen=True, gc=False):
    """One iteration's work: the online batch (or not), and ``num_tasklets`` with it.

    ``num_fused`` of the tasklets, the first ones, are forward layers that run inside the online batch.
    ``partition``: the batch has its online SMs, and at most ``num_beside`` of the tasklets run on the others meanwhile;
    the rest follow on all SMs. None: all SMs for both, and the tasklets follow. ``interruptible``: stop after the
    tasklets in flight when a request arrives, but for those beside a batch, which delay nobody. For ``hold_ms`` whoever
    comes does not stop them: from the end of the batch that they follow or, without one, from their beginning.
    ``until_step_end`` runs the whole training step, however many tasklets it takes. ``look_again_s``: with nothing to
    run, how long the worker waits at most before it plans anew.
    """

    run_online: bool = True
    num_tasklets: int = 0
    num_fused: int = 0
    num_beside: int = 0
    partition: Partition | None = None
    interruptible: bool = True
    hold_ms: float = 0.0
    until_step_end: bool = False
    look_again_s: float = math.inf
    mode: Mode = Mode.NONE
    predicted_ms: float | None = None


@dataclass(frozen=True, slots=True)
class IterationRecord:
    """What one iteration did and how long it took; the predictor learns from it.

    ``online_ms``: what the batch took (0 without one), from the start of the iteration until its tokens were known;
    where the host goes on while the device works, on the device, without what it waited for tasklets.
    ``tasklets``: the tasklets of each shape with their time in milliseconds, on all SMs; fused ones are in
    ``online_ms`` instead. ``beside``: those that ended on ``partition``'s best-effort SMs, beside the batch.
    ``untimed``: tasklets that ended and whose time tells nothing. ``is_disturbed``: the batch was planned alone, and it
    was not, or it ended before tasklets that it was to wait for. ``behind_tasklets``: a batch of decodes on all SMs was
    launched while tasklets had them, and is timed from their end: it has run beside the last of them a little, and
    comes out shorter than one that waits for nothing. ``with_tasklet``: one that it did not wait for was in flight as
    the batch began, and has taken SMs from it.
    """

    batch: BatchShape
    mode: Mode
    online_ms: float
    total_ms: float
    tasklets: tuple[tuple[TaskletRun, float], ...] = ()
    fused: TaskletRun | None = None
    partition: Partition | None = None
    beside: tuple[tuple[TaskletRun, float], ...] = ()
    untimed: tuple[TaskletRun, ...] = ()
    predicted_ms: float | None = None
    is_disturbed: bool = False
    behind_tasklets: bool = False
    with_tasklet: bool = False

    @property
    def taken_ms(self) -> float:
        """The batch's time and that of all tasklets that were timed, wherever they ran."""
        return self.online_ms + sum(time_ms for _, time_ms in (*self.tasklets, *self.beside))

    @property
    def num_tasklets(self) -> int:
        """All that ended in it, wherever they ran."""
        num_fused = 0 if self.fused is None else self.fused.count
        num_timed = sum(run.count for run, _ in (*self.tasklets, *self.beside))
        return num_fused + num_timed + sum(run.count for run in self.untimed)
