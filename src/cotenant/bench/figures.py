"""Figures of a run under the names that `vllm bench serve` gives them, and what it does not have: SLO attainment, the
generator's own lag, failures by kind.

TTFT runs from sending to the first chunk, e2e latency to the last one; TPOT = (e2e − TTFT) / (tokens − 1). Failed
requests are in no latency, and count as missed in attainment and goodput. None stands where nothing was measured.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cotenant.bench.generator import Outcome, ShareResult
from cotenant.bench.summary import Targets

Floats = npt.NDArray[np.float64]

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
MAX_LAG_P99_MS = 10.0
_EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Run:
    """One measured run: what was planned, what came of it, and how long the whole took."""

    num_planned: int
    shares: Sequence[ShareResult]
    was_interrupted: bool

    @property
    def outcomes(self) -> list[Outcome]:
        """Of all processes, in the order of the schedule."""
        return sorted((outcome for share in self.shares for outcome in share.outcomes), key=lambda one: one.index)


@dataclass(frozen=True, slots=True)
class _Answered:
    """Arrays over the requests that were answered in full; times in seconds."""

    sent: Floats
    first: Floats
    last: Floats
    tokens: Floats
    chunk_times: list[Floats]

    @classmethod
    def of(cls, outcomes: Sequence[Outcome]) -> _Answered:
        chunk_times = [np.frombuffer(outcome.chunk_times_s) for outcome in outcomes]
        return cls(
            np.array([outcome.sent_s for outcome in outcomes]),
            np.array([times[0] for times in chunk_times]),
            np.array([times[-1] for times in chunk_times]),
            np.array([outcome.output_tokens for outcome in outcomes], dtype=np.float64),
            chunk_times,
        )

    @property
    def ttft_ms(self) -> Floats:
        return (self.first - self.sent) * 1e3

    @property
    def e2el_ms(self) -> Floats:
        return (self.last - self.sent) * 1e3

    @property
    def tpot_ms(self) -> Floats:
        """0 where there is one token, as vLLM has it for goodput."""
        more = np.maximum(self.tokens - 1, 1)
        return np.where(self.tokens > 1, (self.last - self.first) * 1e3 / more, 0.0)

    @property
    def itl_ms(self) -> list[Floats]:
        return [np.diff(times) * 1e3 for times in self.chunk_times]


def figures(run: Run, targets: Targets) -> dict[str, object]:
    """All figures of a run. A target that is infinite was not set; with neither there is no attainment."""
    outcomes = run.outcomes
    finished = [outcome for outcome in outcomes if outcome.finished]
    failed = [outcome for outcome in outcomes if outcome.failure is not None]
    answered = _Answered.of(finished)
    duration_s = _duration_s(outcomes, answered)
    total_input = sum(outcome.input_tokens for outcome in finished)
    total_output = sum(outcome.output_tokens for outcome in finished)
    has_slo = math.isfinite(targets.ttft_ms) or math.isfinite(targets.tpot_ms)
    num_good = int(np.sum((answered.ttft_ms <= targets.ttft_ms) & (answered.tpot_ms <= targets.tpot_ms)))
    num_judged = len(finished) + len(failed)
    cached = [outcome.cached_tokens for outcome in finished if outcome.cached_tokens is not None]
    return {
        "num_prompts": run.num_planned,
        "interrupted": run.was_interrupted,
        "duration": duration_s,
        "completed": len(finished),
        "failed": len(failed),
        "unfinished": run.num_planned - num_judged,
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "total_cached_tokens": sum(cached) if cached else None,
        "request_throughput": _per(len(finished), duration_s),
        "request_goodput": _per(num_good, duration_s) if has_slo else None,
        "slo_attainment": _per(num_good, num_judged) if has_slo else None,
        "slo": {"ttft_ms": _finite(targets.ttft_ms), "tpot_ms": _finite(targets.tpot_ms)},
        "output_throughput": _per(total_output, duration_s),
        "total_token_throughput": _per(total_input + total_output, duration_s),
        **_peaks(answered),
        **_latencies(answered),
        "generator": _generator(run, outcomes, duration_s),
        "failures": dict(Counter(str(outcome.failure) for outcome in failed).most_common()),
        "failure_examples": dict(
            Counter(f"{outcome.failure}: {outcome.message}" for outcome in failed).most_common(_EXAMPLES)
        ),
    }


def is_sustained(measured: dict[str, object]) -> bool:
    """True if p99 of TTFT and of TPOT are within the targets, and nothing failed or was left unfinished."""
    slo = measured["slo"]
    assert isinstance(slo, dict)
    if measured["failed"] or measured["unfinished"] or not measured["completed"]:
        return False
    for name in ("ttft", "tpot"):
        target, value = slo[f"{name}_ms"], measured[f"p99_{name}_ms"]
        if target is not None and isinstance(value, float) and value > target:
            return False
    return True


def details(run: Run) -> dict[str, object]:
    """Per-request arrays, vLLM's names first; seconds, as there. A request without an answer has None or no entries."""
    outcomes = run.outcomes
    times = [np.frombuffer(outcome.chunk_times_s) for outcome in outcomes]
    return {
        "input_lens": [outcome.input_tokens for outcome in outcomes],
        "output_lens": [outcome.output_tokens if outcome.finished else 0 for outcome in outcomes],
        "ttfts": [
            float(seen[0]) - outcome.sent_s if len(seen) else None
            for outcome, seen in zip(outcomes, times, strict=True)
        ],
        "itls": [np.diff(seen).tolist() for seen in times],
        "start_times": [outcome.sent_s for outcome in outcomes],
        "errors": [f"{outcome.failure}: {outcome.message}" if outcome.failure else "" for outcome in outcomes],
        "due_times": [outcome.due_s for outcome in outcomes],
    }


def _duration_s(outcomes: Sequence[Outcome], answered: _Answered) -> float:
    """From the start to the last chunk or, when nothing was answered, to the last request sent."""
    last = max((float(value) for value in answered.last), default=0.0)
    return max(last, max((outcome.sent_s for outcome in outcomes), default=0.0))


def _latencies(answered: _Answered) -> dict[str, float | None]:
    itl = np.concatenate(answered.itl_ms) if answered.chunk_times else np.empty(0)
    values = {
        "ttft": answered.ttft_ms,
        "tpot": answered.tpot_ms[answered.tokens > 1],
        "itl": itl,
        "e2el": answered.e2el_ms,
    }
    figures: dict[str, float | None] = {}
    for name in LATENCIES:
        figures |= _distribution(name, values[name])
    return figures


def _distribution(name: str, values: Floats) -> dict[str, float | None]:
    keys = [f"mean_{name}_ms", f"median_{name}_ms", f"std_{name}_ms", *(f"p{p}_{name}_ms" for p in PERCENTILES)]
    if not len(values):
        return dict.fromkeys(keys)
    found = [values.mean(), np.median(values), values.std(), *np.percentile(values, PERCENTILES)]
    return {key: float(value) for key, value in zip(keys, found, strict=True)}


def _peaks(answered: _Answered) -> dict[str, float | int | None]:
    """vLLM's: tokens in the fullest second since the first send, and requests alive at any time in the same second. Of
    less than a second there is no fullest one."""
    if not answered.chunk_times:
        return {"max_output_tokens_per_s": 0.0, "max_concurrent_requests": 0}
    start = answered.sent.min()
    took_s = answered.last.max() - start
    num_seconds = int(took_s) + 1
    tokens = np.zeros(num_seconds)
    for times, count in zip(answered.chunk_times, answered.tokens, strict=True):
        # A chunk may carry several tokens; taken to be as many in each.
        np.add.at(tokens, (times - start).astype(int), count / len(times))
    alive = np.zeros(num_seconds + 1, dtype=int)
    np.add.at(alive, (answered.sent - start).astype(int), 1)
    np.add.at(alive, (answered.last - start).astype(int) + 1, -1)
    fullest = float(tokens.max()) if took_s >= 1.0 else None
    return {"max_output_tokens_per_s": fullest, "max_concurrent_requests": int(np.cumsum(alive).max())}


def _generator(run: Run, outcomes: Sequence[Outcome], duration_s: float) -> dict[str, object]:
    """How late the generator itself was (sent − due), and how much of its cores it needed."""
    lags = np.array([(outcome.sent_s - outcome.due_s) * 1e3 for outcome in outcomes])
    p50, p99, most = (np.percentile(lags, (50, 99, 100))) if len(lags) else (math.nan,) * 3
    return {
        "lag_ms": {"p50": _finite(float(p50)), "p99": _finite(float(p99)), "max": _finite(float(most))},
        "num_processes": len(run.shares),
        "cpu_share_of_busiest": _per(max(share.cpu_s for share in run.shares), duration_s),
        "chunks_per_s": _per(sum(share.num_chunks for share in run.shares), duration_s),
    }


def _per(count: float, whole: float) -> float | None:
    return count / whole if whole > 0 else None


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
