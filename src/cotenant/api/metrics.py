"""``/metrics``: vLLM's names with our prefix, what co-execution adds, and the clock of each request.

Latencies are measured here, where the client's request arrives and its tokens leave, so they include the queues and the
wire. TPOT = (e2e - TTFT) / (tokens - 1).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Gauge, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from cotenant.api.tallies import LabelledTally, LatencyTally, Tally, cumulative
from cotenant.core.plan import Mode, Slo
from cotenant.core.request import FinishReason
from cotenant.wire.messages import ERROR_BOUNDS

if TYPE_CHECKING:
    from cotenant.api.worker_client import WorkerClient
    from cotenant.store.records import JobStatus

PREFIX = "cotenant:"
_FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
)  # fmt: skip
_PER_TOKEN_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5,
)  # fmt: skip
_REQUEST_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
)  # fmt: skip


class Metrics:
    """All figures of one server, in a registry of its own."""

    def __init__(self, model_name: str, worker: WorkerClient) -> None:
        self._model_name = model_name
        self._worker = worker
        self._registry = CollectorRegistry()
        self.prompt_tokens = self._tally("prompt_tokens", "Prompt tokens processed.")
        self.generation_tokens = self._tally("generation_tokens", "Tokens generated.")
        self.slo_requests = self._tally("slo_requests", "Finished requests that the targets apply to.")
        self.slo_attained = self._tally("slo_attained", "Finished requests that met both targets.")
        self._request_success = LabelledTally(
            PREFIX + "request_success", "Requests that ended, by reason.", ("finished_reason",), model_name
        )
        self._registry.register(self._request_success)
        self._refused = self._tally(
            "requests_refused", "HTTP requests answered 503, probes left out: no room, or no model that is ready."
        )
        self._jobs = Gauge(
            PREFIX + "fine_tuning_jobs",
            "Fine-tuning jobs in the data folder, by status.",
            ("model_name", "status"),
            registry=self._registry,
        )
        self._jobs_ended = LabelledTally(
            PREFIX + "fine_tuning_jobs_ended",
            "Fine-tuning jobs that ended, by status and error code.",
            ("status", "code"),
            model_name,
        )
        self._registry.register(self._jobs_ended)
        self.time_to_first_token = self._latencies(
            "time_to_first_token_seconds", "Arrival to first token.", _FIRST_TOKEN_BUCKETS_S
        )
        self.inter_token_latency = self._latencies(
            "inter_token_latency_seconds", "Gap between tokens.", _PER_TOKEN_BUCKETS_S
        )
        self.time_per_output_token = self._latencies(
            "request_time_per_output_token_seconds", "TPOT: mean gap of a request.", _PER_TOKEN_BUCKETS_S
        )
        self.e2e_latency = self._latencies("e2e_request_latency_seconds", "Arrival to last token.", _REQUEST_BUCKETS_S)
        self.queue_time = self._latencies(
            "request_queue_time_seconds", "Arrival to the first iteration that works on it.", _FIRST_TOKEN_BUCKETS_S
        )
        self._registry.register(_WorkerCollector(model_name, worker))

    def clock(self, arrival_s: float) -> RequestClock:
        """A clock for one sequence whose HTTP request arrived at ``arrival_s`` (``time.monotonic``)."""
        return RequestClock(self, self.slo, arrival_s)

    @property
    def slo(self) -> Slo | None:
        """The targets in force, also while a worker is restarted; None before the model was first loaded."""
        ready = self._worker.last_ready
        return None if ready is None else ready.slo

    def count_end(self, reason: str) -> None:
        self._request_success.counts[reason,] += 1

    def count_refused(self) -> None:
        """An HTTP request is answered 503."""
        self._refused.value += 1

    def render(self, num_jobs: Mapping[JobStatus, int], num_ended: Mapping[tuple[JobStatus, str], int]) -> bytes:
        """Everything in Prometheus's text format. ``num_jobs``: of each status. ``num_ended``: jobs that have ended so
        far, by status and error code."""
        for status, count in num_jobs.items():
            self._jobs.labels(self._model_name, status).set(count)
        for (status, code), count in num_ended.items():
            self._jobs_ended.counts[status, code] = count
        return generate_latest(self._registry)

    def _tally(self, name: str, text: str) -> Tally:
        tally = Tally(PREFIX + name, text, self._model_name)
        self._registry.register(tally)
        return tally

    def _latencies(self, name: str, text: str, bounds_s: tuple[float, ...]) -> LatencyTally:
        tally = LatencyTally(PREFIX + name, text, bounds_s, self._model_name)
        self._registry.register(tally)
        return tally


class RequestClock:
    """The clock of one sequence, from its request's arrival. ``begin`` once something of it has come, ``tokens`` for
    each output, ``finish`` at its end, and ``count_end`` when it will not be run again.

    A sequence that ends without ``finish`` (its client left, its worker died) counts in no latency. ``reason``: why it
    ended; None if it never began.
    """

    __slots__ = (
        "_arrival_s",
        "_first_token_s",
        "_last_token_s",
        "_metrics",
        "_num_counted",
        "_num_tokens",
        "_slo",
        "has_begun",
        "reason",
    )

    def __init__(self, metrics: Metrics, slo: Slo | None, arrival_s: float) -> None:
        self._metrics = metrics
        self._slo = slo
        self._arrival_s = arrival_s
        self._first_token_s: float | None = None
        self._last_token_s = self._arrival_s
        self._num_tokens = 0
        self._num_counted = 0  # of all runs
        self.has_begun = False
        self.reason: str | None = FinishReason.ABORT.value

    def begin(self, num_prompt_tokens: int, queue_s: float | None) -> None:
        """Something has come of it; counts once, however often it is run."""
        if self.has_begun:
            return
        self.has_begun = True
        self._metrics.prompt_tokens.value += num_prompt_tokens
        if queue_s is not None:
            self._metrics.queue_time.observe(queue_s)

    def begin_again(self) -> None:
        """All that has come is lost, and the sequence is run anew."""
        self._num_tokens = 0
        self.reason = FinishReason.ABORT.value

    def count_end(self) -> None:
        """The sequence has ended for ``reason``."""
        if self.reason is not None:
            self._metrics.count_end(self.reason)

    def tokens(self, count: int) -> None:
        """``count`` tokens came now."""
        if count == 0:
            return
        now_s = time.monotonic()
        if self._first_token_s is None:
            self._first_token_s = now_s
            self._metrics.time_to_first_token.observe(now_s - self._arrival_s)
        elif self._num_tokens:  # else it is run anew
            self._metrics.inter_token_latency.observe((now_s - self._last_token_s) / count, count)
        self._last_token_s = now_s
        self._num_tokens += count
        if self._num_tokens > self._num_counted:
            self._metrics.generation_tokens.value += self._num_tokens - self._num_counted
            self._num_counted = self._num_tokens

    def finish(self) -> None:
        """The sequence ended as it should."""
        if self._first_token_s is None:
            return
        ttft_s = self._first_token_s - self._arrival_s
        e2e_s = self._last_token_s - self._arrival_s
        self._metrics.e2e_latency.observe(e2e_s)
        tpot_s = time_per_output_token_s(ttft_s, e2e_s, self._num_tokens)
        if tpot_s is not None:
            self._metrics.time_per_output_token.observe(tpot_s)
        if self._slo is not None:
            self._metrics.slo_requests.value += 1
            if attains(self._slo, ttft_s, tpot_s):
                self._metrics.slo_attained.value += 1


def time_per_output_token_s(ttft_s: float, e2e_s: float, num_tokens: int) -> float | None:
    """TPOT in seconds; None for a single token, which has no gap after it."""
    return (e2e_s - ttft_s) / (num_tokens - 1) if num_tokens > 1 else None


def attains(slo: Slo, ttft_s: float, tpot_s: float | None) -> bool:
    """Whether a request met both targets; one of a single token has met the second."""
    return ttft_s * 1000 <= slo.ttft_ms and (tpot_s is None or tpot_s * 1000 <= slo.tpot_ms)


class _WorkerCollector(Collector):
    """The worker's last ``Stats``, read when Prometheus asks. Totals start again with a new worker."""

    def __init__(self, model_name: str, worker: WorkerClient) -> None:
        self._labels = [model_name]
        self._worker = worker

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats = self._worker.stats
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait for the batch.", stats.num_waiting)
        yield self._gauge("num_requests_live", "Requests admitted and not ended.", self._worker.num_live)
        yield self._gauge("kv_cache_usage_perc", "Share of KV pages in use, 0 to 1.", stats.kv_cache_usage)
        yield self._gauge(
            "model_ready", "1 while the worker has the model loaded and is heard of.", self._worker.serves
        )
        yield self._gauge("slo_margin_ratio", "Learned share of the TPOT target that the policy aims at.", stats.margin)
        yield self._gauge(
            "prediction_error_ratio", "Recent relative error of predicted latencies.", stats.prediction_error_ratio
        )
        yield self._gauge(
            "harvest_ratio",
            "Of late, with a job: time that its tasklets would have taken alone, per time.",
            stats.harvest_ratio,
        )
        yield self._counter("num_preemptions", "Sequences pushed out of the cache.", stats.num_preemptions)
        yield self._counter(
            "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries
        )
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits)
        yield self._gauge(
            "step_gap_microseconds", "Median time of late without work for the device between steps.", stats.step_gap_us
        )
        yield self._counter("fused_tasklets", "Tasklets that ran inside an online batch.", stats.num_fused_tasklets)
        yield self._counter("trained_tokens", "Tokens trained on.", stats.trained_tokens)
        yield self._counter("tasklet_busy_seconds", "Device time spent on tasklets.", stats.tasklet_busy_s)
        yield self._counter("online_busy_seconds", "Device time spent on online batches.", stats.online_busy_s)
        yield from self._labelled()

    def _labelled(self) -> Iterator[Metric]:
        stats = self._worker.stats
        tasklets = CounterMetricFamily(
            PREFIX + "tasklets", "Tasklets that ran, by kind.", labels=["model_name", "kind"]
        )
        for kind, count in sorted(stats.num_tasklets.items()):
            tasklets.add_metric([*self._labels, kind], count)
        yield tasklets
        iterations = CounterMetricFamily(
            PREFIX + "iterations", "Iterations with a batch or tasklets, by mode.", labels=["model_name", "mode"]
        )
        for name in Mode:
            iterations.add_metric([*self._labels, name], stats.num_iterations.get(name, 0))
        yield iterations
        errors = HistogramMetricFamily(
            PREFIX + "iteration_prediction_error",
            "Relative error of each iteration's predicted latency.",
            labels=["model_name", "kind"],
        )
        for kind, found in stats.prediction_errors.items():
            errors.add_metric([*self._labels, kind], cumulative(ERROR_BOUNDS, found.counts), found.total)
        yield errors
        mode = GaugeMetricFamily(
            PREFIX + "mode", "How the last iteration shared the device.", labels=["model_name", "mode"]
        )
        for name in Mode:
            mode.add_metric([*self._labels, name], float(stats.mode == name))
        yield mode
        slack = GaugeMetricFamily(
            PREFIX + "slack_ms", "Online slack before the last iteration, by target.", labels=["model_name", "kind"]
        )
        for kind, slack_ms in stats.slack_ms.items():
            slack.add_metric([*self._labels, kind], slack_ms)
        yield slack
        policy = InfoMetricFamily(PREFIX + "policy", "The policy that runs.", labels=["model_name"])
        targets = GaugeMetricFamily(PREFIX + "slo_target_ms", "The targets in force.", labels=["model_name", "kind"])
        ready = self._worker.last_ready
        if ready is not None:
            policy.add_metric(self._labels, {"policy": ready.policy})
            targets.add_metric([*self._labels, "ttft"], ready.slo.ttft_ms)
            targets.add_metric([*self._labels, "tpot"], ready.slo.tpot_ms)
            targets.add_metric([*self._labels, "itl"], ready.slo.max_gap_ms)
        yield policy
        yield targets

    def _gauge(self, name: str, text: str, value: float | None) -> Metric:
        family = GaugeMetricFamily(PREFIX + name, text, labels=["model_name"])
        if value is not None:
            family.add_metric(self._labels, float(value))
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(PREFIX + name, text, labels=["model_name"])
        family.add_metric(self._labels, value)
        return family
