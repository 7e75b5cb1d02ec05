"""What requests got and how far training came in a cell of `cotenant bench colocate`."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from cotenant.core.plan import IterationRecord, Slo

if TYPE_CHECKING:
    from cotenant.runtime.load import Answer

ENOUGH_TOKENS = 32  # to judge an answer by, whatever comes after them
NUM_FARTHEST_OFF = 10  # iterations that are told of


class Predicted(NamedTuple):
    """An iteration beside what was expected of it: ``LatencyPredictor.last_deviation_ratio``. ``at_s``: when its
    results were there, since the load began; ``apart_ms``: since those of the iteration before. ``run``: of several
    that were pooled, the number, from 0."""

    deviation_ratio: float
    at_s: float
    apart_ms: float
    record: IterationRecord
    run: int | None = None


@dataclass(slots=True)
class Errors:
    """Of iterations of one kind. ``ratios``: of each, without the sign. ``farthest_off``: a heap of those with the
    largest and their number, few enough for the rest not to be kept."""

    ratios: list[float] = field(default_factory=list)
    farthest_off: list[tuple[float, int, Predicted]] = field(default_factory=list)

    def add(self, predicted: Predicted) -> None:
        entry = (abs(predicted.deviation_ratio), len(self.ratios), predicted)
        self.ratios.append(entry[0])
        if len(self.farthest_off) < NUM_FARTHEST_OFF:
            heapq.heappush(self.farthest_off, entry)
        else:
            heapq.heappushpop(self.farthest_off, entry)

    def worst(self) -> list[Predicted]:
        """The worst first."""
        return [predicted for *_, predicted in sorted(self.farthest_off, reverse=True)]

    @classmethod
    def pooled(cls, errors: Sequence[Errors]) -> Errors:
        found = cls()
        for run, each in enumerate(errors):
            for predicted in each.worst():
                found.add(predicted._replace(run=run))
        found.ratios = [ratio for each in errors for ratio in each.ratios]
        return found


@dataclass(frozen=True, slots=True)
class Cell:
    """What one policy did under one load. Requests' figures are lists in milliseconds, for whoever sums them up:
    ``itl_ms`` of all gaps between two tokens. ``attained``: requests that met both targets, of those answered or
    failed. ``modes``: iterations with a batch, by how training shared them. ``errors``: of those that were predicted,
    alone and with training. ``timeline``: ``Timeline.figures``. ``utilisation``:
    ``UtilisationSampler.figures``. ``device_time``: ``DeviceTime.figures``. What has a default is not known of a server
    and a training process that are seen from outside, but for the tokens trained. ``trained_in_runs``: tokens/s of
    each run, where it was measured more than once (``pooled``); ``attained_in_runs``: the share of its requests that
    met both targets."""

    policy: str
    slo: Slo
    duration_s: float
    num_requests: int
    num_failed: int
    num_attained: int
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    output_tokens_per_s: float
    train_tokens_per_s: float = 0.0
    modes: dict[str, int] = field(default_factory=dict)
    errors: dict[str, Errors] = field(default_factory=lambda: {"alone": Errors(), "co_run": Errors()})
    timeline: dict[str, Any] = field(default_factory=dict)
    utilisation: dict[str, float] | None = None
    device_time: dict[str, float] | None = None
    trained_in_runs: tuple[float, ...] = ()
    attained_in_runs: tuple[float, ...] = ()


def pooled(runs: Sequence[Cell]) -> Cell:
    """What was measured several times as one: requests, iterations and errors of all runs, speeds and shares of the
    time on average, and the timeline of the run whose training was the median (of two the faster)."""
    if len(runs) == 1:
        return runs[0]
    shares = [run.duration_s / sum(each.duration_s for each in runs) for run in runs]
    modes: Counter[str] = Counter()
    for run in runs:
        modes.update(run.modes)
    by_training = sorted(runs, key=lambda run: run.train_tokens_per_s)
    return replace(
        runs[0],
        duration_s=sum(run.duration_s for run in runs),
        num_requests=sum(run.num_requests for run in runs),
        num_failed=sum(run.num_failed for run in runs),
        num_attained=sum(run.num_attained for run in runs),
        ttft_ms=[value for run in runs for value in run.ttft_ms],
        tpot_ms=[value for run in runs for value in run.tpot_ms],
        itl_ms=[value for run in runs for value in run.itl_ms],
        output_tokens_per_s=_mean([run.output_tokens_per_s for run in runs], shares),
        train_tokens_per_s=_mean([run.train_tokens_per_s for run in runs], shares),
        modes=dict(modes),
        errors={kind: Errors.pooled([run.errors[kind] for run in runs]) for kind in runs[0].errors},
        timeline=by_training[len(runs) // 2].timeline,
        utilisation=_mean_of_each([run.utilisation for run in runs], shares),
        device_time=_pooled_time(runs, shares),
        trained_in_runs=tuple(run.train_tokens_per_s for run in runs),
        attained_in_runs=tuple(run.num_attained / run.num_requests for run in runs if run.num_requests),
    )


def _pooled_time(runs: Sequence[Cell], shares: Sequence[float]) -> dict[str, float] | None:
    """``Cell.device_time`` of all, in which a step's time is a mean over all steps."""
    times = [run.device_time for run in runs]
    pooled_time = _mean_of_each(times, shares)
    if pooled_time is not None and pooled_time.get("decode_steps_per_s"):
        known = [each for each in times if each is not None]
        parts = [each["decode_steps_per_s"] / pooled_time["decode_steps_per_s"] for each in known]
        weights = [part * share for part, share in zip(parts, shares, strict=True)]
        pooled_time["decode_step_ms"] = round(_mean([each["decode_step_ms"] for each in known], weights), 3)
    return pooled_time


def _mean(values: Sequence[float], shares: Sequence[float]) -> float:
    return sum(value * share for value, share in zip(values, shares, strict=True))


def _mean_of_each(figures: Sequence[dict[str, float] | None], shares: Sequence[float]) -> dict[str, float] | None:
    """Under each name, if all runs have it."""
    known = [each for each in figures if each is not None]
    if len(known) < len(figures):
        return None
    names = [name for name in known[0] if all(name in each for each in known)]
    return {name: round(_mean([each[name] for each in known], shares), 4) for name in names}


def judge(
    policy: str,
    slo: Slo,
    answers: Sequence[Answer],
    start_s: float,
    end_s: float,
    *,
    with_ttft: bool,
    until_s: float = math.inf,
) -> Cell:
    """What requests got: of those whose tokens came in this time; ``with_ttft``: of all requests, from their
    beginning. ``until_s``: then by the tokens until there, or as many as it takes to tell a TPOT. Where each had time
    for so many within both targets until there, those that came later make nobody in time."""
    ttfts_ms, tpots_ms, gaps_ms = [], [], []
    num_attained = num_failed = num_tokens = 0
    for answer in answers:
        inside = [at_s for at_s in answer.token_s if start_s <= at_s <= end_s]
        times = _judged_by(answer.token_s, until_s) if with_ttft else inside
        num_tokens += len(inside)
        if not times or answer.failure is not None or (with_ttft and not is_settled(answer)):
            num_failed += 1
            continue
        ttft_ms = (times[0] - answer.arrival.due_s) * 1e3
        tpot_ms = (times[-1] - times[0]) * 1e3 / (len(times) - 1) if len(times) > 1 else 0.0
        if with_ttft:
            ttfts_ms.append(ttft_ms)
        if len(times) > 1:
            tpots_ms.append(tpot_ms)
        gaps_ms += [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
        num_attained += tpot_ms <= slo.tpot_ms and (not with_ttft or ttft_ms <= slo.ttft_ms)
    return Cell(
        policy=policy,
        slo=slo,
        duration_s=end_s - start_s,
        num_requests=len(answers),
        num_failed=num_failed,
        num_attained=num_attained,
        ttft_ms=ttfts_ms,
        tpot_ms=tpots_ms,
        itl_ms=gaps_ms,
        output_tokens_per_s=num_tokens / (end_s - start_s),
    )


def is_settled(answer: Answer) -> bool:
    """Whether nothing is still to come that it is judged by, once that time is over."""
    return answer.done or len(answer.token_s) >= ENOUGH_TOKENS


def _judged_by(token_s: list[float], until_s: float) -> list[float]:
    return token_s[: max(ENOUGH_TOKENS, sum(at_s <= until_s for at_s in token_s))]
