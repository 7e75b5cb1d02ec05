"""Each policy as the pure function that it is."""

from __future__ import annotations

import pytest

from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import BatchShape, JobView, Plan, RequestView, Slo, Snapshot
from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler import create_policy
from taught import BACKWARD, DECODE, taught_predictor

JOB = JobView("job", (TaskletRun(BACKWARD, 6), TaskletRun(TaskletShape(TaskletKind.OPTIMIZER, 0), 1)))
RUNNING = RequestView("r", arrival_s=99.0, first_token_s=99.9, num_generated=40)
WAITING = RequestView("w", arrival_s=99.9, num_prompt_tokens_left=64)


def plan(policy: str, *, batch: BatchShape, requests: tuple[RequestView, ...], job: JobView | None = JOB) -> Plan:
    snapshot = Snapshot(100.0, Slo(100.0, 20.0), batch, requests, job)
    return create_policy(policy, taught_predictor(2.0, 1.0, 2.0)).plan(snapshot)


def test_every_policy_serves_alone_when_there_is_no_job() -> None:
    for name in ("multitask", "temporal", "whole-step", "inference-only"):
        assert plan(name, batch=DECODE, requests=(RUNNING,), job=None).run_online
        assert plan(name, batch=DECODE, requests=(RUNNING,), job=None).num_tasklets == 0


def test_multitask_takes_tasklets_along_with_a_decode_step() -> None:
    decided = plan("multitask", batch=DECODE, requests=(RUNNING,))
    assert decided.run_online
    assert 0 < decided.num_tasklets <= 7
    assert decided.interruptible


def test_multitask_suspends_training_for_a_prefill_and_for_those_who_wait() -> None:
    prefill = BatchShape(num_decode=4, context_tokens=400, prefill_tokens=64, prefill_context_tokens=64)
    assert plan("multitask", batch=prefill, requests=(RUNNING, WAITING)).num_tasklets == 0
    assert plan("multitask", batch=DECODE, requests=(RUNNING, WAITING)).num_tasklets == 0


def test_multitask_gives_nothing_when_a_request_is_late() -> None:
    late = RequestView("l", arrival_s=90.0, first_token_s=90.1, num_generated=3)
    assert plan("multitask", batch=DECODE, requests=(RUNNING, late)).num_tasklets == 0


def test_multitask_knows_nothing_and_harms_nobody() -> None:
    snapshot = Snapshot(100.0, Slo(100.0, 20.0), DECODE, (RUNNING,), JOB)
    decided = create_policy("multitask", LatencyPredictor("h", "m")).plan(snapshot)
    assert (decided.run_online, decided.num_tasklets) == (True, 0)


def test_with_nobody_to_serve_all_but_inference_only_train() -> None:
    for name in ("multitask", "temporal"):
        assert plan(name, batch=BatchShape(), requests=()).num_tasklets == 7
    assert plan("whole-step", batch=BatchShape(), requests=()).until_step_end
    idle = plan("inference-only", batch=BatchShape(), requests=())
    assert (idle.num_tasklets, idle.until_step_end) == (0, False)


def test_temporal_trains_only_while_no_request_is_live() -> None:
    assert plan("temporal", batch=DECODE, requests=(RUNNING,)).num_tasklets == 0
    assert plan("temporal", batch=BatchShape(), requests=(WAITING,)).num_tasklets == 0


def test_whole_step_cannot_be_interrupted() -> None:
    decided = plan("whole-step", batch=DECODE, requests=(RUNNING,))
    assert decided.run_online
    assert decided.until_step_end
    assert not decided.interruptible


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(InvalidInputError, match="'fastest' is not one of multitask"):
        create_policy("fastest", LatencyPredictor("h", "m"))
