"""Latencies as they are defined, and the names that dashboards know."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.figures import figures
from cotenant.api.metrics import Metrics, attains, time_per_output_token_s
from cotenant.api.routes.metrics import metrics as answer_metrics
from cotenant.api.worker_client import WorkerClient
from cotenant.config import ModelConfig, ServerConfig
from cotenant.core.plan import Mode, Slo
from cotenant.store import JobStatus, StoreError
from cotenant.wire.messages import ERROR_BOUNDS, ErrorCounts, Ready, Stats

SLO = Slo(ttft_ms=100, tpot_ms=10)
MANUAL = Path(__file__).parents[2] / "docs" / "serving.md"


@pytest.fixture
def worker() -> WorkerClient:
    """A client whose worker was never started: it has no requests, and the statistics that a test gives it."""
    client = WorkerClient(ServerConfig(ModelConfig("tiny")))
    client.on_message(Ready(256, 2, 300, 8, 16, "cpu", "float32", "multitask", SLO, 0.1))
    return client


def test_tpot_is_the_mean_gap_after_the_first_token() -> None:
    assert time_per_output_token_s(ttft_s=0.5, e2e_s=2.5, num_tokens=5) == 0.5
    assert time_per_output_token_s(ttft_s=0.5, e2e_s=0.5, num_tokens=1) is None


@pytest.mark.parametrize(
    ("ttft_s", "tpot_s", "met"),
    [(0.1, 0.01, True), (0.1001, 0.01, False), (0.1, 0.0101, False), (0.1, None, True), (0.2, None, False)],
)
def test_attainment_needs_both_targets(ttft_s: float, tpot_s: float | None, met: bool) -> None:
    assert attains(SLO, ttft_s, tpot_s) is met


def test_a_finished_request_is_counted_once(worker: WorkerClient) -> None:
    metrics = Metrics("m", worker)
    clock = metrics.clock(time.monotonic() - 0.25)  # it arrived long before its first token
    clock.tokens(1)
    clock.tokens(2)
    clock.finish()
    seen = figures(metrics)
    label = '{model_name="m"}'
    assert seen[f"cotenant:generation_tokens_total{label}"] == 3
    assert seen[f"cotenant:time_to_first_token_seconds_count{label}"] == 1
    assert seen[f"cotenant:time_to_first_token_seconds_sum{label}"] >= 0.25
    assert seen[f"cotenant:inter_token_latency_seconds_count{label}"] == 2
    assert seen[f"cotenant:request_time_per_output_token_seconds_count{label}"] == 1
    assert seen[f"cotenant:e2e_request_latency_seconds_count{label}"] == 1
    assert seen[f"cotenant:slo_requests_total{label}"] == 1
    assert seen[f"cotenant:slo_attained_total{label}"] == 0


def test_a_request_that_did_not_finish_has_no_latency(worker: WorkerClient) -> None:
    metrics = Metrics("m", worker)
    metrics.clock(time.monotonic()).tokens(1)
    metrics.count_end("abort")
    seen = figures(metrics)
    assert seen['cotenant:e2e_request_latency_seconds_count{model_name="m"}'] == 0
    assert seen['cotenant:slo_requests_total{model_name="m"}'] == 0
    assert seen['cotenant:request_success_total{finished_reason="abort",model_name="m"}'] == 1


def test_a_request_that_comes_while_the_worker_is_restarted_counts(worker: WorkerClient) -> None:
    worker.on_lost("was killed by SIGKILL")
    metrics = Metrics("m", worker)
    clock = metrics.clock(time.monotonic() - 5.0)  # it waited for the next worker
    clock.tokens(1)
    clock.finish()
    seen = figures(metrics)
    assert seen['cotenant:slo_requests_total{model_name="m"}'] == 1
    assert seen['cotenant:slo_attained_total{model_name="m"}'] == 0
    assert seen['cotenant:model_ready{model_name="m"}'] == 0


def test_the_workers_statistics_are_there(worker: WorkerClient) -> None:
    worker.stats = Stats(
        num_running=3, num_waiting=2, kv_cache_usage=0.5, num_preemptions=1, num_tasklets={"forward": 7},
        trained_tokens=9, mode="temporal", slack_ms={"tpot": 4.5}, prediction_error_ratio=0.1, harvest_ratio=0.7,
        prefix_cache_queries=64, prefix_cache_hits=48, step_gap_us=12.5, num_iterations={"none": 5, "fused": 2},
        prediction_errors={"alone": ErrorCounts((3, 1, *[0] * (len(ERROR_BOUNDS) - 2), 1), 7.5)},
    )  # fmt: skip
    seen = figures(Metrics("m", worker))
    for name, value in {
        "num_requests_running": 3,
        "num_requests_waiting": 2,
        "kv_cache_usage_perc": 0.5,
        "num_preemptions_total": 1,
        "trained_tokens_total": 9,
        "prediction_error_ratio": 0.1,
        "harvest_ratio": 0.7,
        "prefix_cache_queries_total": 64,
        "prefix_cache_hits_total": 48,
        "step_gap_microseconds": 12.5,
    }.items():
        assert seen[f'cotenant:{name}{{model_name="m"}}'] == value
    assert seen['cotenant:tasklets_total{kind="forward",model_name="m"}'] == 7
    assert [seen[f'cotenant:iterations_total{{mode="{mode}",model_name="m"}}'] for mode in Mode] == [5, 2, 0, 0]
    assert seen['cotenant:slack_ms{kind="tpot",model_name="m"}'] == 4.5
    assert 'cotenant:slack_ms{kind="ttft",model_name="m"}' not in seen, "nobody waits"
    error = "cotenant:iteration_prediction_error"
    within = [seen[f'{error}_bucket{{kind="alone",le="{bound}",model_name="m"}}'] for bound in (*ERROR_BOUNDS, "+Inf")]
    assert within == [3, *[4] * (len(ERROR_BOUNDS) - 1), 5]
    assert seen[f'{error}_count{{kind="alone",model_name="m"}}'] == 5
    assert seen[f'{error}_sum{{kind="alone",model_name="m"}}'] == 7.5
    assert seen['cotenant:mode{mode="temporal",model_name="m"}'] == 1
    assert seen['cotenant:mode{mode="none",model_name="m"}'] == 0
    assert seen['cotenant:policy_info{model_name="m",policy="multitask"}'] == 1
    assert seen['cotenant:slo_target_ms{kind="ttft",model_name="m"}'] == 100
    assert seen['cotenant:slo_target_ms{kind="tpot",model_name="m"}'] == 10
    assert seen['cotenant:slo_target_ms{kind="itl",model_name="m"}'] == 30, "three TPOT targets"


def test_targets_are_unknown_before_the_model_is_loaded() -> None:
    seen = figures(Metrics("m", WorkerClient(ServerConfig(ModelConfig("tiny")))))
    assert not [
        name for name in seen if any(part in name for part in ("slo_target_ms", "policy", "step_gap", "harvest"))
    ]
    assert seen['cotenant:model_ready{model_name="m"}'] == 0


def test_jobs_are_those_of_now(worker: WorkerClient) -> None:
    metrics = Metrics("m", worker)
    for queued in (2, 0):
        text = metrics.render({JobStatus.QUEUED: queued, JobStatus.FAILED: 1}, {}).decode()
        assert f'cotenant:fine_tuning_jobs{{model_name="m",status="queued"}} {queued}.0' in text
        assert 'cotenant:fine_tuning_jobs{model_name="m",status="failed"} 1.0' in text


def test_a_store_that_cannot_be_read_hides_nothing_else(worker: WorkerClient) -> None:
    def counts() -> dict[JobStatus, int]:
        raise StoreError("the disk is gone")

    ends = {(JobStatus.FAILED, "disk_full"): 1}
    jobs, metrics = SimpleNamespace(counts=counts, ends=lambda: ends), Metrics("m", worker)
    metrics.render({JobStatus.FAILED: 1}, {})
    state = SimpleNamespace(store=SimpleNamespace(jobs=jobs), metrics=metrics)
    request: Any = SimpleNamespace(app=SimpleNamespace(state=SimpleNamespace(cotenant=state)))
    text = bytes(asyncio.run(answer_metrics(request)).body).decode()
    assert "cotenant:num_requests_live" in text
    assert 'cotenant:fine_tuning_jobs{model_name="m",status="failed"} 1.0' in text
    assert 'cotenant:fine_tuning_jobs_ended_total{code="disk_full",model_name="m",status="failed"} 1.0' in text


def test_every_metric_is_in_the_manual(worker: WorkerClient) -> None:
    rows = [line for line in MANUAL.read_text().splitlines() if line.startswith("| `")]
    named = {
        name.partition("{")[0] for row in rows for name in re.findall(r"`([a-z0-9_]+(?:{[\w,]+})?)`", row.split("|")[1])
    }
    metrics = Metrics("m", worker)
    metrics.count_end("stop")
    families = re.findall(r"^# TYPE cotenant:(\w+) (\w+)", metrics.render({}, {}).decode(), re.M)
    assert families
    assert {name for name, _ in families} <= named
