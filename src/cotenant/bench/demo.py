"""The main job in minutes: requests alone, training alone, both at once, what the model learned, and both at once again
under another policy."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console
from rich.table import Column, Table

from cotenant.bench import demo_folder
from cotenant.bench.client import (
    ServerError,
    all_events,
    ask,
    call,
    metric_by,
    metrics,
    new_client,
    upload,
    wait_healthy,
)
from cotenant.bench.live import Progress, View
from cotenant.bench.load import ChatLoad, run_load
from cotenant.bench.machine import cpu_name, versions
from cotenant.bench.report import caution, table_header, table_rows, write_html, write_json
from cotenant.bench.server import running_server
from cotenant.bench.summary import RequestResult, Targets, percentile, summarize

ASSETS = Path(__file__).parent.parent / "assets" / "demo"
TARGET_FACTOR = 4.0
_TRAINED = "cotenant:trained_tokens_total"
_ITERATIONS = "cotenant:iterations_total"
_START_TIMEOUT_S = 300.0  # where kernels are compiled for the first time, on a few cores
_FINISHED = ("succeeded", "failed", "cancelled")


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """How long each phase runs and how much traffic there is. ``beside``: the policy of the last phase, '' for none.
    ``fuse``: forward tasklets may run inside batches."""

    output: Path
    policy: str = "adaptive"
    beside: str = "whole-step"
    fuse: bool = True
    rate_per_s: float = 3.0
    max_tokens: int = 48
    alone_s: float = 20.0
    training_alone_s: float = 12.0
    corun_s: float = 60.0
    beside_s: float = 20.0
    seed: int = 0


# Enough for the built-in model to learn the lesson by heart.
_HYPERPARAMETERS = {"batch_size": 8, "learning_rate": 2e-3, "r": 16, "warmup_steps": 5, "eval_steps": 50}
_MIN_STEPS = 150
# More than any phase has time for: the job is cancelled after the measurement.
_ENDLESS_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class _Corun:
    """Training beside requests. ``iterations``: turns of the worker's loop, by mode."""

    tokens_per_s: float
    seconds: float
    iterations: dict[str, int]


@dataclass(frozen=True, slots=True)
class _Lesson:
    """What the model is taught: files, and a question whose right answer holds ``keyword``."""

    training: Path
    validation: Path
    question: str
    keyword: str


def _load_lesson() -> _Lesson:
    first = json.loads((ASSETS / "questions.json").read_text(encoding="utf-8"))[0]
    return _Lesson(ASSETS / "train.jsonl", ASSETS / "valid.jsonl", first["question"], first["keyword"])


class Demo:
    """Runs the phases in order. Raises ServerError when one of them cannot be measured."""

    def __init__(self, options: DemoOptions, console: Console) -> None:
        self._options = options
        self._console = console
        self._progress = Progress()
        self._view = View(console, self._progress)
        self._lesson = _load_lesson()
        self._data_folder = ""
        self._load = ChatLoad(
            model="tiny",
            prompts=json.loads((ASSETS / "prompts.json").read_text(encoding="utf-8")),
            rate_per_s=options.rate_per_s,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )

    async def run(self) -> dict[str, Any]:
        """All phases; writes the report files and returns the report. The servers' data folder, with all that is
        trained, is a temporary one. Raises OSError where something cannot be written."""
        output = self._options.output
        demo_folder.prepare(output)
        beside: list[RequestResult] = []
        # Whatever cannot be deleted there, as where a server had to be killed, is no reason to have measured nothing.
        with (
            tempfile.TemporaryDirectory(prefix="cotenant-demo-", ignore_cleanup_errors=True) as self._data_folder,
            self._view.shown(),
        ):
            alone, targets = await self._requests_alone()
            report, corun, loss = await self._with_job(alone, targets)
            if self._options.beside:
                alone_rate = report["finetune"]["alone_tokens_per_s"]
                report["beside"], beside = await self._with_job_beside(targets, alone_rate)
        write_json(output / demo_folder.REPORT, report)
        write_html(output / demo_folder.PAGE, report, alone, corun, loss, beside)
        return report

    async def _requests_alone(self) -> tuple[list[RequestResult], Targets]:
        async with self._server(self._options.policy) as client:
            await self._traffic(client, 2.0, "warming up")
            results = await self._traffic(client, self._options.alone_s, "requests alone")
        answered = [result for result in results if result.error is None]
        if not answered:
            raise ServerError(f"no request was answered: {results[0].error if results else 'none was sent'}")
        ttft_ms = percentile([result.ttft_ms for result in answered], 50)
        tpot_ms = percentile([result.tpot_ms for result in answered if result.num_tokens > 1], 50)
        return results, Targets(TARGET_FACTOR * ttft_ms, TARGET_FACTOR * tpot_ms)

    async def _with_job(
        self, alone: list[RequestResult], targets: Targets
    ) -> tuple[dict[str, Any], list[RequestResult], list[tuple[int, float]]]:
        async with self._server(self._options.policy, targets) as client:
            base_answer = await ask(client, "tiny", self._lesson.question)
            files = await self._upload_lesson(client)
            alone_rate, steps_per_s = await self._training_alone(client, files)
            await self._traffic(client, 2.0, "warming up")
            num_steps = max(_MIN_STEPS, round(steps_per_s * self._options.corun_s * 0.7))
            job = await self._create_job(client, files, num_steps)
            await self._wait_for_status(client, job["id"], ("running",))
            corun, measured = await self._both(client, job["id"], self._options.policy, self._options.corun_s)
            job = await self._finish(client, job["id"])
            tuned_answer = await ask(client, job["fine_tuned_model"], self._lesson.question)
            loss = await self._loss(client, job["id"])
        report = {
            "model": "tiny",
            "policy": self._options.policy,
            "machine": {"cpu": cpu_name(), "num_cores": os.cpu_count(), **versions()},
            "online": {
                "alone": summarize(alone, targets, self._options.alone_s),
                "corun": summarize(corun, targets, measured.seconds),
            },
            "iterations": measured.iterations,
            "finetune": {
                "alone_tokens_per_s": round(alone_rate, 2),
                **_corun_speed(measured.tokens_per_s, alone_rate),
                "num_steps": num_steps,
                "trained_tokens": job["trained_tokens"],
                "loss": [value for _, value in loss],
            },
            "answers": {
                "question": self._lesson.question,
                "keyword": self._lesson.keyword,
                "base": base_answer,
                "tuned": tuned_answer,
            },
        }
        return report, corun, loss

    async def _with_job_beside(self, targets: Targets, alone_rate: float) -> tuple[dict[str, Any], list[RequestResult]]:
        """The same traffic, for a shorter time, and a job of the same kind under the other policy: its part of the
        report, whose keys are those of the whole, and the results. ``alone_rate``: training alone, tokens a second."""
        policy = self._options.beside
        async with self._server(policy, targets) as client:
            files = await self._upload_lesson(client)
            await self._traffic(client, 2.0, "warming up")
            job = await self._create_job(client, files, _ENDLESS_STEPS)
            await self._wait_for_first_step(client, job["id"])
            duration_s = min(self._options.beside_s, self._options.corun_s)
            corun, measured = await self._both(client, job["id"], policy, duration_s)
            await self._cancel(client, job["id"])
        part = {
            "policy": policy,
            "online": {"corun": summarize(corun, targets, measured.seconds)},
            "iterations": measured.iterations,
            "finetune": _corun_speed(measured.tokens_per_s, alone_rate),
        }
        return part, corun

    @contextlib.asynccontextmanager
    async def _server(self, policy: str, targets: Targets | None = None) -> AsyncIterator[httpx.AsyncClient]:
        """A client of a fresh server that is up. All servers share a data folder, so what one has learned of the
        machine's speed the next one knows."""
        flags = ["--data-dir", self._data_folder, "--policy", policy]
        flags.append("--fuse" if self._options.fuse else "--no-fuse")
        if targets is not None:
            flags += ["--slo-ttft-ms", f"{targets.ttft_ms:.3f}", "--slo-tpot-ms", f"{targets.tpot_ms:.3f}"]
        with running_server("tiny", flags, self._options.output / demo_folder.LOG) as server:
            async with new_client(server.url) as client:
                self._progress.begin(f"starting the server, policy {policy}")
                self._progress.targets = targets
                self._view.refresh()
                await wait_healthy(client, _START_TIMEOUT_S, server.has_ended)
                yield client

    async def _upload_lesson(self, client: httpx.AsyncClient) -> tuple[str, str]:
        return await upload(client, self._lesson.training), await upload(client, self._lesson.validation)

    async def _traffic(self, client: httpx.AsyncClient, duration_s: float, phase: str) -> list[RequestResult]:
        self._progress.begin(phase)
        async with asyncio.TaskGroup() as group:
            refresher = group.create_task(self._keep_refreshing(None))
            results = await run_load(client, self._load, duration_s, on_result=self._progress.results.append)
            refresher.cancel()
        return results

    async def _create_job(self, client: httpx.AsyncClient, files: tuple[str, str], num_steps: int) -> dict[str, Any]:
        settings = {**_HYPERPARAMETERS, "max_steps": num_steps}
        body = {
            "model": "tiny",
            "training_file": files[0],
            "validation_file": files[1],
            "suffix": "demo",
            "seed": self._options.seed,
            "method": {"type": "supervised", "supervised": {"hyperparameters": settings}},
        }
        return await call(client, "POST", "/v1/fine_tuning/jobs", json=body)

    async def _training_alone(self, client: httpx.AsyncClient, files: tuple[str, str]) -> tuple[float, float]:
        """Tokens and optimizer steps a second of the same job with no requests; that job is then cancelled."""
        self._progress.begin("training alone")
        job = await self._create_job(client, files, _ENDLESS_STEPS)
        await self._wait_for_first_step(client, job["id"])
        async with asyncio.TaskGroup() as group:
            refresher = group.create_task(self._keep_refreshing(client, job["id"]))
            steps_before = await _num_steps(client, job["id"])
            start_s, tokens_before = await _read_trained(client)
            await asyncio.sleep(self._options.training_alone_s)
            end_s, tokens = await _read_trained(client)
            steps = await _num_steps(client, job["id"]) - steps_before
            refresher.cancel()
        await self._cancel(client, job["id"])
        return (tokens - tokens_before) / (end_s - start_s), steps / (end_s - start_s)

    async def _both(
        self, client: httpx.AsyncClient, job_id: str, policy: str, duration_s: float
    ) -> tuple[list[RequestResult], _Corun]:
        """Requests while the job runs. Ends early if the job ends."""
        self._progress.begin(f"requests and training together, policy {policy}")
        stop = asyncio.Event()
        before = await metric_by(client, _ITERATIONS, "mode")
        start_s, tokens_before = await _read_trained(client)
        async with asyncio.TaskGroup() as group:
            refresher = group.create_task(self._keep_refreshing(client, job_id))
            watcher = group.create_task(self._stop_with_job(client, job_id, stop))
            results = await run_load(client, self._load, duration_s, on_result=self._progress.results.append, stop=stop)
            end_s, tokens = watcher.result() if watcher.done() else await _read_trained(client)
            watcher.cancel()
            refresher.cancel()
        iterations = await metric_by(client, _ITERATIONS, "mode")
        counts = {mode: round(count - before.get(mode, 0.0)) for mode, count in iterations.items()}
        return results, _Corun((tokens - tokens_before) / (end_s - start_s), end_s - start_s, counts)

    async def _stop_with_job(self, client: httpx.AsyncClient, job_id: str, stop: asyncio.Event) -> tuple[float, float]:
        """Set ``stop`` when the job ends. Returns the time and the tokens trained by then."""
        await self._wait_for_status(client, job_id, _FINISHED)
        at_end = await _read_trained(client)
        stop.set()
        return at_end

    async def _finish(self, client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
        self._progress.begin("finishing the job")
        async with asyncio.TaskGroup() as group:
            refresher = group.create_task(self._keep_refreshing(client, job_id))
            job = await self._wait_for_status(client, job_id, _FINISHED)
            refresher.cancel()
        if job["status"] != "succeeded":
            raise ServerError(f"the fine-tuning job ended as {job['status']}: {job.get('error')}")
        return job

    async def _wait_for_first_step(self, client: httpx.AsyncClient, job_id: str) -> None:
        await self._wait_for_status(client, job_id, ("running",))
        while not await _num_steps(client, job_id):
            await self._wait_for_status(client, job_id, ("running",))
            await asyncio.sleep(0.1)

    async def _cancel(self, client: httpx.AsyncClient, job_id: str) -> None:
        await call(client, "POST", f"/v1/fine_tuning/jobs/{job_id}/cancel")
        await self._wait_for_status(client, job_id, _FINISHED)

    async def _wait_for_status(self, client: httpx.AsyncClient, job_id: str, wanted: tuple[str, ...]) -> dict[str, Any]:
        while True:
            job = await call(client, "GET", f"/v1/fine_tuning/jobs/{job_id}")
            if job["status"] in wanted:
                return job
            if job["status"] in _FINISHED:
                raise ServerError(f"the fine-tuning job is {job['status']}: {job.get('error')}")
            await asyncio.sleep(0.25)

    async def _keep_refreshing(self, client: httpx.AsyncClient | None, job_id: str = "") -> None:
        last_tokens, last_s = None, time.perf_counter()
        while True:
            if client is not None:
                last_tokens, last_s = await self._read_training(client, job_id, last_tokens, last_s)
            self._view.refresh()
            await asyncio.sleep(1.0)

    async def _read_training(
        self, client: httpx.AsyncClient, job_id: str, last_tokens: float | None, last_s: float
    ) -> tuple[float, float]:
        tokens, now = (await metrics(client)).get(_TRAINED, 0.0), time.perf_counter()
        if last_tokens is not None and now > last_s:
            self._progress.training_tokens_per_s = (tokens - last_tokens) / (now - last_s)
        job = await call(client, "GET", f"/v1/fine_tuning/jobs/{job_id}")
        self._progress.eta_s = seconds_to_go(job, time.time())
        page = await call(client, "GET", f"/v1/fine_tuning/jobs/{job_id}/events", params={"limit": 10})
        for event in page["data"]:
            if event["type"] == "metrics":
                data = event["data"]
                self._progress.training_loss = data["train_loss"]
                self._progress.training_step = f"step {data['step']}"
                break
        return tokens, now

    async def _loss(self, client: httpx.AsyncClient, job_id: str) -> list[tuple[int, float]]:
        events = await all_events(client, job_id)
        return [
            (int(event["data"]["step"]), float(event["data"]["train_loss"]))
            for event in events
            if event["type"] == "metrics"
        ]


def seconds_to_go(job: dict[str, Any], now_s: float) -> float | None:
    """Until the job is done; None where that is not known, and of one that is cancelled before."""
    finish_s: float | None = job.get("estimated_finish")
    is_endless = job["method"]["supervised"]["hyperparameters"].get("max_steps") == _ENDLESS_STEPS
    return None if finish_s is None or is_endless else max(0.0, finish_s - now_s)


def _corun_speed(tokens_per_s: float, alone_tokens_per_s: float) -> dict[str, float]:
    """How fast training went beside requests, as it stands in ``report.json``."""
    harvest = tokens_per_s / alone_tokens_per_s if alone_tokens_per_s else 0.0
    return {"corun_tokens_per_s": round(tokens_per_s, 2), "harvest": round(harvest, 4)}


async def _read_trained(client: httpx.AsyncClient) -> tuple[float, float]:
    """The time in seconds, and the tokens that the server has trained on by then."""
    tokens = (await metrics(client)).get(_TRAINED, 0.0)
    return time.perf_counter(), tokens


async def _num_steps(client: httpx.AsyncClient, job_id: str) -> int:
    page = await call(client, "GET", f"/v1/fine_tuning/jobs/{job_id}/events", params={"limit": 10})
    return max((int(event["data"]["step"]) for event in page["data"] if event["type"] == "metrics"), default=0)


def print_table(report: dict[str, Any], console: Console) -> None:
    """The short table that the demo ends with."""
    columns = (Column(name, overflow="fold") for name in table_header(report))
    table = Table(*columns, title="cotenant demo", title_justify="left")
    for row in table_rows(report):
        table.add_row(*row)
    console.print(table)
    if text := caution(report):
        console.print(text, highlight=False)
    answers = report["answers"]
    console.print(f"[bold]{answers['question']}[/bold]\n  base:  {answers['base']}\n  tuned: {answers['tuned']}")
