"""What is not known, or known wrong, keeps neither a job from training nor requests from their target for ever."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cotenant.core.plan import BatchShape, IterationRecord, JobView, Mode, Partition, Plan, RequestView, Slo, Snapshot
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler import create_policy
from cotenant.scheduler.base import prompts_of
from cotenant.scheduler.chunking import prompt_budget
from taught import in_turn

BATCH = BatchShape(4, 800)
STEP_MS = 5.0
SLO = Slo(500.0, 20.0)
PARTITIONS = tuple(Partition(online_sms, 132 - online_sms) for online_sms in (32, 48, 63, 79))
BACKWARD = [
    TaskletShape(kind, 2048, 512)
    for kind in (TaskletKind.BACKWARD_DOWN, TaskletKind.BACKWARD_UP, TaskletKind.BACKWARD_ATTENTION)
]


def forward(num_tokens: int) -> TaskletShape:
    return TaskletShape(TaskletKind.FORWARD, num_tokens, num_tokens // 2)


def knows_steps(step_ms: float = STEP_MS) -> LatencyPredictor:
    predictor = LatencyPredictor("test hardware", "test model")
    for _ in range(20):
        predictor.observe(IterationRecord(BATCH, Mode.NONE, step_ms, step_ms))
    return predictor


def running(now_s: float, num_generated: int = 50) -> tuple[RequestView, ...]:
    """Requests that had their tokens in half the time."""
    first_token_s = now_s - num_generated * SLO.tpot_ms / 2e3
    return tuple(RequestView(f"r{place}", first_token_s, first_token_s, num_generated) for place in range(4))


def iterations_with_tasklets(
    predictor: LatencyPredictor, policy_name: str, shape: TaskletShape, takes_ms: float
) -> list[int]:
    """Of 2,000 iterations in which requests never cease."""
    policy, job, found, now_s = (
        create_policy(policy_name, predictor),
        JobView("job", in_turn(TaskletRun(shape, 8))),
        [],
        10.0,
    )
    for number in range(2000):
        plan = policy.plan(Snapshot(now_s, SLO, BATCH, running(now_s), job, margin=0.9))
        took_ms = plan.num_tasklets * takes_ms
        ran = ((TaskletRun(shape, plan.num_tasklets), took_ms),) if plan.num_tasklets else ()
        mode = Mode.TEMPORAL if ran else Mode.NONE
        predictor.observe(IterationRecord(BATCH, mode, STEP_MS, STEP_MS + took_ms, ran))
        now_s += (STEP_MS + took_ms) / 1e3
        if ran:
            found.append(number)
    return found


def job_before(predictor: LatencyPredictor, each_ms: float) -> None:
    """Ran while nobody asked, and trained much more than the next one does."""
    predictor.trains("r=256")
    for number in range(60):
        shape = forward((96, 112, 128, 144)[number % 4])
        record = IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, each_ms, ((TaskletRun(shape, 1), each_ms),))
        predictor.observe(record)
    predictor.trains("r=4")


@pytest.mark.parametrize("policy", ["multitask", "adaptive"])
def test_a_job_is_not_kept_from_training_by_what_another_ones_tasklets_took(policy: str) -> None:
    predictor = knows_steps()
    job_before(predictor, 60.0)
    assert (predictor.tasklet_ms(forward(128)) or 0.0) > 3 * SLO.tpot_ms - STEP_MS
    found = iterations_with_tasklets(predictor, policy, forward(128), 6.0)
    assert len(found) > 500  # of those that are left after the first few tries


@pytest.mark.parametrize("policy", ["multitask", "adaptive"])
def test_tasklets_that_do_take_that_long_are_hardly_tried(policy: str) -> None:
    predictor = knows_steps()
    job_before(predictor, 60.0)
    found = iterations_with_tasklets(predictor, policy, forward(128), 60.0)
    assert 1 <= len(found) <= 3
    assert all(later - earlier > 100 for earlier, later in pairwise(found))


def test_one_stall_says_little_of_tasklets_of_other_sizes() -> None:
    predictor = knows_steps()
    for number in range(60):
        shape = forward((40, 52, 64, 80, 100, 120)[number % 6])
        each_ms = 0.05 * shape.num_tokens
        predictor.observe(
            IterationRecord(BATCH, Mode.TEMPORAL, STEP_MS, STEP_MS + each_ms, ((TaskletRun(shape, 1), each_ms),))
        )
    stall = ((TaskletRun(forward(140), 1), 30_000.0),)
    predictor.observe(IterationRecord(BATCH, Mode.TEMPORAL, STEP_MS, 30_005.0, stall))
    guess_ms = predictor.tasklet_ms(forward(180))
    assert guess_ms is not None
    assert guess_ms < 100.0


@pytest.mark.parametrize("policy", ["multitask", "adaptive", "llmstation"])
def test_who_waits_for_an_adapter_does_not_keep_tasklets_from_running(policy: str) -> None:
    predictor, shape = knows_steps(), forward(100)
    for _ in range(20):
        record = IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, 2.0, ((TaskletRun(shape, 1), 2.0),))
        predictor.observe(record)
    job = JobView("job", in_turn(TaskletRun(shape, 8)))
    waiting = RequestView("waits", 9.9, num_prompt_tokens_left=20, waits_for_adapter=True)

    def plan(*others: RequestView) -> Plan:
        snapshot = Snapshot(10.0, SLO, BATCH, (*running(10.0), *others), job, margin=0.9)
        return create_policy(policy, predictor).plan(snapshot)

    assert plan(waiting).num_tasklets == plan().num_tasklets > 0


def test_who_waits_for_an_adapter_makes_no_chunk_smaller() -> None:
    predictor = LatencyPredictor("test hardware", "test model")
    for num_tokens in (128, 256, 384, 512, 640, 768, 896, 1024) * 4:
        batch = BatchShape(4, 800, num_tokens, num_tokens, 0, num_tokens * (num_tokens + 1) // 2)
        predictor.observe(IterationRecord(batch, Mode.NONE, 5 + num_tokens / 40, 5 + num_tokens / 40))
        predictor.observe(IterationRecord(BATCH, Mode.NONE, STEP_MS, STEP_MS))
    others = (*running(10.0, num_generated=3), RequestView("next", 9.99, num_prompt_tokens_left=300))
    waiting = RequestView("waits", 1.0, num_prompt_tokens_left=4000, num_computed=3000, waits_for_adapter=True)

    def budget(*requests: RequestView) -> int:
        return prompt_budget(predictor, BATCH, requests, prompts_of(requests), SLO, 10.0, 4096, 40)

    assert budget(waiting, *others) == budget(*others) < 4096


@pytest.mark.parametrize("policy_name", ["harli", "llmstation", "adaptive"])
def test_a_target_is_kept_though_no_tasklet_was_ever_measured_on_all_sms(policy_name: str) -> None:
    """In no partition is a step fast enough; while requests never cease, these policies try tasklets there first."""
    predictor = knows_steps(8.0)
    policy, slo, job = (
        create_policy(policy_name, predictor),
        Slo(500.0, 10.0),
        JobView("job", in_turn(*(TaskletRun(each, 8) for each in BACKWARD))),
    )
    now_s, last_partitions = 10.0, []
    for number in range(1000):
        requests = tuple(RequestView(f"r{place}", 0.0, 0.0, int(now_s * 100)) for place in range(4))
        plan = policy.plan(Snapshot(now_s, slo, BATCH, requests, job, margin=0.95, partitions=PARTITIONS))
        step_ms, tasklets, beside = 8.0, (), ()
        if plan.partition is not None:
            step_ms = 14.0 * PARTITIONS[-1].online_sms / plan.partition.online_sms
            beside = tuple((TaskletRun(each, 1), 4.0) for each in BACKWARD)
        elif plan.num_tasklets:
            tasklets = ((TaskletRun(BACKWARD[0], plan.num_tasklets), 1.0 * plan.num_tasklets),)
        total_ms = step_ms + sum(time_ms for _, time_ms in tasklets)
        predictor.observe(
            IterationRecord(BATCH, plan.mode, step_ms, total_ms, tasklets, partition=plan.partition, beside=beside)
        )
        now_s += total_ms / 1e3
        if number >= 900:
            last_partitions.append(plan.partition)
    assert not any(last_partitions)
