"""``cotenant bench serve``: measure an OpenAI-compatible server under an open-loop load, at one rate or several."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import httpx

from cotenant.bench.figures import Run, details, figures, is_sustained
from cotenant.bench.generator import Endpoint, Share, allow_many_connections, split, warm_up
from cotenant.bench.machine import machine, versions
from cotenant.bench.processes import run_loop, run_shares
from cotenant.bench.schedule import PlannedRequest, from_trace, synthetic
from cotenant.bench.summary import Targets
from cotenant.bench.traces import Trace
from cotenant.core.errors import CotenantError

KIND = "serve"
_SETUP_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """The trace called ``name`` at ``scales`` times its own rate, one run for each; lengths are the trace's."""

    name: str
    trace: Trace
    scales: Sequence[float]
    num_prompts: int | None = None
    duration_s: float | None = None

    variable = "time_scale"

    @property
    def values(self) -> Sequence[float]:
        return self.scales

    def plan(self, value: float, models: Sequence[str], seed: int) -> list[PlannedRequest]:
        planned = from_trace(self.trace, value, models, seed)[: self.num_prompts]
        return [request for request in planned if self.duration_s is None or request.due_s < self.duration_s]

    def notes(self) -> list[str]:
        """What a person should know of the file."""
        notes = []
        if self.trace.num_skipped:
            notes.append(f"{self.name}: skipped {self.trace.num_skipped} rows without a prompt or without an answer")
        if self.trace.window_s is not None:
            notes.append("{}: seconds {:.1f} to {:.1f}".format(self.name, *self.trace.window_s))
        return notes

    def describe(self) -> dict[str, Any]:
        window_s = self.trace.window_s
        return {
            "trace": self.name,
            "trace_format": self.trace.format,
            "trace_window_s": window_s and [_json_number(second) for second in window_s],
            "trace_skipped_rows": self.trace.num_skipped,
        }


@dataclass(frozen=True, slots=True)
class SyntheticLoad:
    """Requests of one shape at ``rates`` per second, one run for each; ``num_prompts`` or as many as ``duration_s``
    takes."""

    rates: Sequence[float]
    burstiness: float
    input_len: int
    output_len: int
    num_prompts: int | None
    duration_s: float | None

    variable = "request_rate"

    @property
    def values(self) -> Sequence[float]:
        return self.rates

    def plan(self, value: float, models: Sequence[str], seed: int) -> list[PlannedRequest]:
        count = self.num_prompts
        if self.duration_s is not None and math.isfinite(value):
            count = max(1, round(value * self.duration_s))
            count = count if self.num_prompts is None else min(count, self.num_prompts)
        assert count is not None
        return synthetic(
            count,
            value,
            self.burstiness,
            input_len=self.input_len,
            output_len=self.output_len,
            models=models,
            seed=seed,
        )

    def notes(self) -> list[str]:
        return []

    def describe(self) -> dict[str, Any]:
        return {
            "burstiness": _json_number(self.burstiness),
            "random_input_len": self.input_len,
            "random_output_len": self.output_len,
        }


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """What is sent where, and what is asked of it. Targets that are infinite are not set."""

    url: str
    load: TraceLoad | SyntheticLoad
    targets: Targets
    endpoint: str
    model: str | None
    lora_modules: Sequence[str]
    headers: dict[str, str]
    vocab_size: int
    seed: int
    num_warmup: int
    timeout_s: float
    num_processes: int
    stop_when_missed: bool
    save_detailed: bool
    label: str | None
    command: str


@dataclass(slots=True)
class ServeBench:
    """Runs a load. ``say`` gets a line for people before each run, ``on_run`` the figures after it; ``report`` has them
    by then."""

    options: ServeOptions
    say: Callable[[str], None]
    on_run: Callable[[dict[str, Any]], None]
    _model: str = ""
    _server_version: str | None = None
    _runs: list[dict[str, Any]] = field(default_factory=list)

    def measure(self) -> None:
        """Raises CotenantError when the server cannot be reached, wants another key or names no model, or when the
        warm-up fails."""
        options = self.options
        with httpx.Client(
            base_url=options.url, headers=options.headers, timeout=_SETUP_TIMEOUT_S, trust_env=False
        ) as client:
            self._model = options.model or _first_model(client)
            self._server_version = _server_version(client)
        for note in options.load.notes():
            self.say(note)
        models = options.lora_modules or (self._model,)
        if options.num_warmup:
            self._warm_up(models)
        for nonce, value in enumerate(options.load.values, start=1):
            measured = self._run(value, models, nonce)
            self._runs.append(measured)
            self.on_run(measured)
            if measured["interrupted"] or (options.stop_when_missed and not measured["sustained"]):
                break

    def report(self) -> dict[str, Any]:
        """Of the runs so far: one's figures at its top level, or under ``runs`` when there are several values."""
        options = self.options
        report = {
            "kind": KIND,
            "label": options.label,
            "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "command": options.command,
            "machine": machine(),
            "versions": versions(),
            "url": options.url,
            "server_version": self._server_version,
            "model_id": self._model,
            "lora_modules": list(options.lora_modules),
            "endpoint": options.endpoint,
            "vocab_size": options.vocab_size,
            "seed": options.seed,
            **options.load.describe(),
        }
        if len(options.load.values) == 1:
            return report | self._runs[0]
        sustained = [run[options.load.variable] for run in self._runs if run["sustained"]]
        return report | {
            "swept": options.load.variable,
            "highest_sustained": max(sustained, default=None),
            "runs": self._runs,
        }

    def _run(self, value: float, models: Sequence[str], nonce: int) -> dict[str, Any]:
        options = self.options
        planned = options.load.plan(value, models, options.seed)
        if not planned:
            raise CotenantError("there is nothing to send: the window or the duration holds no request")
        last_s = planned[-1].due_s
        self.say(f"{options.load.variable} {value:g}: {len(planned)} requests, the last due after {last_s:.1f} s")
        shares = [self._share(part, nonce) for part in split(planned, min(options.num_processes, len(planned)))]
        results, was_interrupted = run_loop(run_shares(shares))
        run = Run(len(planned), results, was_interrupted)
        measured: dict[str, Any] = {
            options.load.variable: _json_number(value),
            "offered_request_rate": len(planned) / last_s if last_s > 0 else None,
            **figures(run, options.targets),
        }
        measured["sustained"] = is_sustained(measured) if measured["request_goodput"] is not None else None
        measured["short_answers"] = _num_short(planned, run)
        return measured | (details(run) if options.save_detailed else {})

    def _warm_up(self, models: Sequence[str]) -> None:
        options = self.options
        planned = options.load.plan(options.load.values[0], models, options.seed)
        self.say(f"warm-up: {options.num_warmup} requests")
        requests = [
            PlannedRequest(index, 0.0, one.input_len, one.output_len, one.model)
            for index, one in enumerate(itertools.islice(itertools.cycle(planned), options.num_warmup))
        ]
        allow_many_connections()
        outcomes = run_loop(warm_up(self._share(requests, nonce=0)))
        failed = [outcome for outcome in outcomes if outcome.failure is not None]
        if failed:
            raise CotenantError(f"the warm-up failed: {failed[0].failure}: {failed[0].message}")

    def _share(self, requests: list[PlannedRequest], nonce: int) -> Share:
        options = self.options
        endpoint = Endpoint(options.url.rstrip("/") + options.endpoint, options.headers, options.timeout_s)
        return Share(endpoint, requests, options.vocab_size, options.seed, nonce)


def _num_short(planned: Sequence[PlannedRequest], run: Run) -> int:
    """Answers that ended before the length that was asked for: a server that does not take ``ignore_eos``."""
    asked = {request.index: request.output_len for request in planned}
    return sum(one.finished and one.output_tokens < asked[one.index] for one in run.outcomes)


def _first_model(client: httpx.Client) -> str:
    url = str(client.base_url).rstrip("/")
    try:
        response = client.get("/v1/models")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            has_key = "Authorization" in client.headers
            problem = "does not take this API key: check" if has_key else "asks for an API key: give"
            raise CotenantError(f"the server at {url} {problem} --api-key, COTENANT_API_KEY or OPENAI_API_KEY")
        if not response.is_success:
            raise ValueError(f"HTTP status {response.status_code}")
        return str(response.json()["data"][0]["id"])
    except httpx.TransportError as error:
        raise CotenantError(f"cannot reach a server at {client.base_url}: {error}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise CotenantError(f"{url}/v1/models names no model ({error}); name it with --model") from error


def _server_version(client: httpx.Client) -> str | None:
    """What ``/version`` says; None from a server that has none."""
    try:
        response = client.get("/version")
        return str(response.json()["version"]) if response.is_success else None
    except httpx.TransportError as error:
        raise CotenantError(f"cannot reach a server at {client.base_url}: {error}") from error
    except (ValueError, LookupError, TypeError):
        return None


def _json_number(value: float) -> float | str:
    return value if math.isfinite(value) else "inf"
