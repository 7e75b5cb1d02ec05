"""What planning costs: one call of a policy's ``plan``, one of what sizes a prompt chunk, of what finds the turns of 64
prompts, most of which are late, and one of the predictor.

The snapshot has 32 running requests, four partitions, and a job with 161 runs of tasklets of six shapes up to the end
of its step: the micro-batch of a model with 32 captured layers. The slack is some 20 ms, and where that is said as much
as the longest gap allows, into which all tasklets fit. "within a layer": the plans of a step, each from where the one
before has ended, which mostly is within a layer. "256 requests": instead of 32. "a crowd": prompts take something off
what is aimed at. "all of it for 64 prompts": a chunk's size, the turns, and the plan for what comes of them. "half
done": the first prompt has less than a chunk to go, behind much that is computed, and another has the rest. "records":
each shape was measured beside the batch. "models": others were, so that linear models answer. "prior": one other shape
of each was, once, so that the roofline answers. "of prompts", and a chunk's size: each call is about another batch, as
each iteration's is.

A core may be half as fast for some seconds, where others have its twin. So all kinds are called in turn, in rounds, and
the fastest and the slowest of the rounds' medians are said, too.

    python bench/planner_cost.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import cycle

import msgspec

from cotenant.core.plan import (
    BatchShape,
    IterationRecord,
    JobView,
    Mode,
    Partition,
    Plan,
    RequestView,
    Slo,
    Snapshot,
    causal_pairs,
)
from cotenant.core.tasklet import TaskletCycle, TaskletKind, TaskletRun, TaskletShape
from cotenant.finetune.tasklets import Cursor
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.prior import Prior
from cotenant.predictor.roofline import RATES, ModelSizes, Roofline
from cotenant.scheduler import Policy
from cotenant.scheduler.base import prompts_of
from cotenant.scheduler.chunking import prompt_budget
from cotenant.scheduler.policies.adaptive import AdaptivePolicy
from cotenant.scheduler.policies.multitask import MultitaskPolicy
from cotenant.scheduler.turns import Turns, take_turns

NUM_LAYERS = 32
NUM_REQUESTS = 32
NOW_S = 1000.0
NUM_ROUNDS = 10
TASKLETS_PER_PLAN = 13
SLO = Slo(500.0, 40.0)
FORWARD_MS = {TaskletKind.FORWARD_ATTENTION: 0.4, TaskletKind.FORWARD_MLP: 0.9}
BACKWARD_MS = {
    TaskletKind.BACKWARD_DOWN: 0.5,
    TaskletKind.BACKWARD_UP: 0.8,
    TaskletKind.BACKWARD_ATTENTION: 0.6,
}
TASKLET_MS = {**FORWARD_MS, TaskletKind.LOSS: 0.8, **BACKWARD_MS}
BATCH = BatchShape(NUM_REQUESTS, NUM_REQUESTS * 1024)
PROMPTS = tuple(
    msgspec.structs.replace(BATCH, prefill_tokens=each, prefill_context_tokens=each, prefill_pairs=causal_pairs(each))
    for each in range(64, 2048, 64)
)
DECODES = tuple(msgspec.structs.replace(BATCH, context_tokens=BATCH.context_tokens + each) for each in range(2))
WAITING = RequestView("waiting", NOW_S, num_prompt_tokens_left=2000)
HALF_DONE = RequestView("half done", NOW_S, num_prompt_tokens_left=300, num_computed=3000)
CROWD = tuple(
    RequestView(f"w{index}", NOW_S - 0.4 + index / 1000, num_prompt_tokens_left=200 + 37 * index % 2000)
    for index in range(64)
)
PARTITION = Partition(48, 84)
PARTITIONS = (Partition(32, 100), PARTITION, Partition(64, 68), Partition(80, 52))
# Llama-3.1-8B in bf16.
SIZES = ModelSizes(32, 4096, 14336, 32, 8, 128, 128256, 2.0, 2.0)


@dataclass
class Row:
    """A kind of call, and how long each took, round by round."""

    name: str
    call: Callable[[], object]
    remark: str = ""
    rounds_us: list[list[float]] = field(default_factory=list)

    def run(self, num_calls: int) -> None:
        times_us = []
        for _ in range(num_calls):
            start = time.perf_counter_ns()
            self.call()
            times_us.append((time.perf_counter_ns() - start) / 1e3)
        self.rounds_us.append(times_us)

    def __str__(self) -> str:
        times_us = sorted(us for of_round in self.rounds_us for us in of_round)
        p50, p99 = (times_us[len(times_us) * percent // 100] for percent in (50, 99))
        medians_us = [statistics.median(of_round) for of_round in self.rounds_us]
        rounds = f"rounds {min(medians_us):.2f} to {max(medians_us):.2f}"
        return f"{self.name:40} p50 {p50:7.2f} us, p99 {p99:7.2f} us, {rounds} us  {self.remark}".rstrip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=500, help="of each kind, in each round")
    num_calls = parser.parse_args().calls
    if num_calls < 1:
        parser.error("--calls: at least 1")
    rows = list(_rows())
    for _ in range(NUM_ROUNDS):
        for row in rows:
            row.run(num_calls)
    for row in rows:
        print(row)


def _rows() -> Iterator[Row]:
    snapshot = _snapshot(num_generated=105)
    variants = {
        "": [snapshot],
        ", much slack": [_snapshot(num_generated=1000)],
        ", within a layer": list(_through_a_step(snapshot)),
        ", 256 requests": [_snapshot(num_generated=105, num_requests=256)],
        ", 256 requests, a crowd": [
            replace(_snapshot(num_generated=105, num_requests=256), margin=snapshot.margin - 0.3, taken_off=0.3)
        ],
    }
    predictors = {"records": _with_records(), "models": _with_models(), "prior": _with_prior()}
    for known, predictor in predictors.items():
        for policy in (AdaptivePolicy(predictor), MultitaskPolicy(predictor)):
            name = type(policy).__name__
            for variant, snapshots in variants.items():
                planned = policy.plan(snapshots[0])
                remark = f"plans {planned.num_tasklets} tasklets, {planned.mode.value}"
                yield Row(f"{name}, {known}{variant}", partial(_plan_next, policy, cycle(snapshots)), remark)
            crowded = [_with_crowd(snapshot, batch) for batch in PROMPTS]
            arrange = partial(_arrange_and_plan, predictor, policy, cycle(crowded))
            yield Row(f"{name}, {known}, all of it for 64 prompts", arrange)
        shape = snapshot.job.next_shape
        calls: dict[str, Callable[[], object]] = {
            "batch_ms": partial(predictor.batch_ms, BATCH),
            "batch_ms of prompts": partial(_ask_next, predictor, cycle(PROMPTS)),
            "prompt_budget": partial(_budget_next, predictor, cycle(DECODES), (*snapshot.requests, WAITING)),
            "prompt_budget, half done": partial(
                _budget_next, predictor, cycle(DECODES), (*snapshot.requests, HALF_DONE, WAITING)
            ),
            "take_turns": partial(_turns_next, predictor, cycle(DECODES)),
            "tasklet_ms": partial(predictor.tasklet_ms, shape, with_batch=BATCH),
            "batch_ms on a partition": partial(predictor.batch_ms, BATCH, beside_training=True, partition=PARTITION),
            "tasklet_ms on a partition": partial(predictor.tasklet_ms, shape, partition=PARTITION),
        }
        for name, call in calls.items():
            yield Row(f"{name}, {known}", call, "is not known" if call() is None else "")


def _shapes(num_tokens: int) -> list[TaskletShape]:
    return [TaskletShape(kind, num_tokens, num_tokens // 2) for kind in TASKLET_MS]


def _plan_next(policy: Policy, snapshots: Iterator[Snapshot]) -> Plan:
    return policy.plan(next(snapshots))


def _arrange_and_plan(predictor: LatencyPredictor, policy: Policy, snapshots: Iterator[Snapshot]) -> Plan:
    """What the worker does in an iteration while prompts wait, but for the engine's share."""
    snapshot = next(snapshots)
    decodes = msgspec.structs.replace(BATCH)
    prompts = prompts_of(snapshot.requests)
    budget = prompt_budget(predictor, decodes, snapshot.requests, prompts, SLO, NOW_S, 4096, 8)
    take_turns(predictor, decodes, prompts, SLO, NOW_S, budget)
    return policy.plan(snapshot)


def _with_crowd(snapshot: Snapshot, batch: BatchShape) -> Snapshot:
    return replace(snapshot, batch=batch, requests=(*snapshot.requests, *CROWD), num_ending=1)


def _ask_next(predictor: LatencyPredictor, batches: Iterator[BatchShape]) -> float | None:
    return predictor.batch_ms(next(batches))


def _budget_next(predictor: LatencyPredictor, batches: Iterator[BatchShape], requests: tuple[RequestView, ...]) -> int:
    return prompt_budget(predictor, next(batches), requests, prompts_of(requests), SLO, NOW_S, 4096, 8)


def _turns_next(predictor: LatencyPredictor, batches: Iterator[BatchShape]) -> Turns:
    return take_turns(predictor, next(batches), prompts_of(CROWD), SLO, NOW_S, 1024)


def _through_a_step(snapshot: Snapshot) -> Iterator[Snapshot]:
    cursor = Cursor(snapshot.job.upcoming)
    while not cursor.done:
        yield replace(snapshot, job=JobView("job", cursor.remaining))
        for _ in range(TASKLETS_PER_PLAN):
            if not cursor.done:
                cursor.advance()


def _snapshot(num_generated: int, num_requests: int = NUM_REQUESTS) -> Snapshot:
    runs = {shape.kind: TaskletRun(shape, 1) for shape in _shapes(2048)}
    forward, backward = (tuple(runs[kind] for kind in kinds) for kinds in (FORWARD_MS, BACKWARD_MS))
    loss = TaskletRun(runs[TaskletKind.LOSS].shape, 8)
    upcoming = (TaskletCycle(forward, NUM_LAYERS), TaskletCycle((loss,)), TaskletCycle(backward, NUM_LAYERS))
    requests = tuple(RequestView(f"r{index}", NOW_S - 5, NOW_S - 4, num_generated) for index in range(num_requests))
    job = JobView("job", upcoming)
    return Snapshot(NOW_S, SLO, BATCH, requests, job, can_fuse=True, partitions=PARTITIONS)


def _teach(predictor: LatencyPredictor, batch: BatchShape, num_tokens: int, times: int) -> None:
    share = num_tokens / 2048
    tasklets = tuple((TaskletRun(shape, 1), share * TASKLET_MS[shape.kind]) for shape in _shapes(num_tokens))
    step_ms = 4.0 + batch.num_decode / 40 + batch.context_tokens / 30_000
    for _ in range(times):
        predictor.observe(IterationRecord(batch, Mode.TEMPORAL, step_ms, 20.0, tasklets))
        for partition in PARTITIONS:
            alone_ms = step_ms * (1.0 + 14 / partition.online_sms)
            slower = tuple((run, 1.5 * time_ms) for run, time_ms in tasklets)
            for mode, batch_ms, beside in ((Mode.NONE, alone_ms, ()), (Mode.SPATIAL, 1.2 * alone_ms, slower)):
                predictor.observe(IterationRecord(batch, mode, batch_ms, batch_ms, partition=partition, beside=beside))


def _teach_prompts(predictor: LatencyPredictor, batches: Sequence[BatchShape], times: int) -> None:
    for batch in (each for _ in range(times) for each in batches):
        took_ms = 4.0 + (batch.num_decode + batch.prefill_tokens) / 40 + batch.context_tokens / 30_000
        predictor.observe(IterationRecord(batch, Mode.NONE, took_ms, took_ms))


def _with_records() -> LatencyPredictor:
    predictor = LatencyPredictor("hardware", "model")
    _teach(predictor, BATCH, 2048, times=20)
    _teach_prompts(predictor, PROMPTS, times=5)
    return predictor


def _with_models() -> LatencyPredictor:
    predictor = LatencyPredictor("hardware", "model")
    for num_decode in (4, 8, 16, 64):
        for num_tokens in (512, 768, 1024, 1536):
            _teach(predictor, BatchShape(num_decode, num_decode * num_tokens), num_tokens, times=3)
        of_so_many = {"num_decode": num_decode, "context_tokens": num_decode * 1024}
        others = [msgspec.structs.replace(each, **of_so_many) for each in PROMPTS]
        _teach_prompts(predictor, others, times=1)
    return predictor


def _with_prior() -> LatencyPredictor:
    predictor = LatencyPredictor("hardware", "model", Prior(Roofline(SIZES, RATES["NVIDIA H200"])))
    _teach(predictor, BatchShape(8, 4000), 512, times=3)
    return predictor


if __name__ == "__main__":
    main()
