"""The HTTP side of files and jobs over a real store, with a worker that only writes down what it is told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import uvloop
from fastapi import FastAPI

import cotenant
from cotenant.api import openapi
from cotenant.api.errors import install_handlers
from cotenant.api.jobs.manager import JobManager
from cotenant.api.metrics import Metrics
from cotenant.api.models import ModelCard, ModelList, ModelNames
from cotenant.api.routes import files, fine_tuning, models
from cotenant.api.routes import metrics as metrics_route
from cotenant.config import ApiConfig, CoExecutionConfig, LoraConfig, ModelConfig, ServerConfig
from cotenant.core.job import StepMetrics
from cotenant.core.plan import Slo
from cotenant.store import Store, open_store
from cotenant.wire.messages import (
    CancelJob,
    FromWorker,
    JobCancelled,
    JobMetrics,
    JobPaused,
    JobStarted,
    JobSucceeded,
    PauseJob,
    Ready,
    StartJob,
    Stats,
    ToWorker,
)

JOBS = "/v1/fine_tuning/jobs"
TINY = Path(cotenant.__file__).parent / "assets" / "tiny"
READY = Ready(
    max_model_len=512,
    num_layers=4,
    vocab_size=2048,
    num_pages=64,
    page_tokens=16,
    device="cpu",
    dtype="float32",
    policy="multitask",
    slo=Slo(100, 10),
    load_s=1.0,
)
MAX_UPLOAD_BYTES = 3 << 20


@dataclass
class RecordingWorker:
    """Stands where the worker's client is. ``obedient``: it answers pause and cancel as the worker does."""

    ready: Ready | None = READY
    last_ready: Ready | None = READY
    stats: Stats = field(default_factory=Stats)
    num_live: int = 0
    obedient: bool = True
    sent: list[ToWorker] = field(default_factory=list)
    jobs: JobManager | None = None
    answers: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def serves(self) -> bool:
        return self.ready is not None

    def post(self, message: ToWorker) -> bool:
        if self.ready is None:
            return False
        self.sent.append(message)
        if self.obedient and isinstance(message, PauseJob | CancelJob):
            kind = JobPaused if isinstance(message, PauseJob) else JobCancelled
            self._answer(kind(message.job_id, 3))
        return True

    def _answer(self, message: FromWorker) -> None:
        assert self.jobs is not None
        task = asyncio.ensure_future(self.jobs.on_worker_message(message))
        self.answers.add(task)
        task.add_done_callback(self.answers.discard)

    @property
    def started(self) -> list[str]:
        """The jobs that it was told to start, in order."""
        return [message.spec.job_id for message in self.sent if isinstance(message, StartJob)]


@dataclass
class Server:
    """One life of the API process."""

    store: Store
    worker: RecordingWorker
    jobs: JobManager
    http: httpx.AsyncClient

    async def upload(self, content: bytes, purpose: str = "fine-tune") -> str:
        answer = await self.http.post(
            "/v1/files", files={"file": ("examples.jsonl", content)}, data={"purpose": purpose}
        )
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    async def create(self, **fields: Any) -> dict[str, Any]:
        if "training_file" not in fields:
            fields["training_file"] = await self.upload(examples())
        answer = await self.http.post(JOBS, json={"model": "tiny", **fields})
        assert answer.status_code == 200, answer.text
        job: dict[str, Any] = answer.json()
        return job

    async def job(self, job_id: str) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.get(f"{JOBS}/{job_id}")).json()
        return answer

    async def post(self, job_id: str, action: str) -> dict[str, Any]:
        answer: dict[str, Any] = (await self.http.post(f"{JOBS}/{job_id}/{action}")).json()
        return answer

    async def models(self) -> list[str]:
        return [card["id"] for card in (await self.http.get("/v1/models")).json()["data"]]

    async def checkpoints(self, job_id: str) -> list[str]:
        """Names, newest first."""
        page = (await self.http.get(f"{JOBS}/{job_id}/checkpoints", params={"limit": 1000})).json()
        return [checkpoint["fine_tuned_model_checkpoint"] for checkpoint in page["data"]]

    async def wait(self, job_id: str, *statuses: str) -> dict[str, Any]:
        async with asyncio.timeout(60):
            while (job := await self.job(job_id))["status"] not in statuses:
                await asyncio.sleep(0.01)
        return job

    async def wait_started(self, *job_ids: str) -> None:
        async with asyncio.timeout(60):
            while self.worker.started[-len(job_ids) :] != list(job_ids):
                await asyncio.sleep(0.01)

    async def started_job(self, **fields: Any) -> str:
        """A job that the worker was told to start, and has started."""
        job_id = str((await self.create(**fields))["id"])
        await self.wait_started(job_id)
        await self.say(JobStarted(job_id, total_steps=6, resumed_step=0, step_tokens=40.0))
        return job_id

    async def events(self, job_id: str) -> list[dict[str, Any]]:
        """Oldest first."""
        page = (await self.http.get(f"{JOBS}/{job_id}/events", params={"limit": 1000})).json()
        return list(reversed(page["data"]))

    async def messages(self, job_id: str) -> list[str]:
        return [event["message"] for event in await self.events(job_id)]

    async def say(self, *messages: FromWorker) -> None:
        for message in messages:
            await self.jobs.on_worker_message(message)


@asynccontextmanager
async def server(
    data_dir: Path,
    worker: RecordingWorker | None = None,
    base: str = "tiny",
    policy: str = "adaptive",
    max_lora_rank: int = 64,
    model: str = "tiny",
) -> AsyncIterator[Server]:
    """Start on a data folder, and stop as a crash would: nothing is told to anybody. ``base``: the fingerprint of the
    model that is served. ``model``: as it was named to be served as "tiny"."""
    worker = worker or RecordingWorker()
    config = ServerConfig(
        ModelConfig(model, served_model_names=("tiny",)),
        api=ApiConfig(max_upload_bytes=MAX_UPLOAD_BYTES, organization="acme"),
        data_dir=str(data_dir),
        coexecution=CoExecutionConfig(policy=policy),
        lora=LoraConfig(max_lora_rank=max_lora_rank),
    )
    store = open_store(data_dir)
    jobs = JobManager(store, worker, config, TINY, base)
    worker.jobs = jobs
    app = FastAPI()
    names = ModelNames(config, TINY, base, worker, store)  # type: ignore[arg-type]
    app.state.cotenant = SimpleNamespace(
        config=config, base_folder=TINY, worker=worker, store=store, jobs=jobs, models=names,
        metrics=Metrics("tiny", worker),  # type: ignore[arg-type]
    )  # fmt: skip
    for module in (files, fine_tuning, metrics_route, models):
        app.include_router(module.router)
    openapi.install(app, (*files.DOCUMENTED, *fine_tuning.DOCUMENTED, *models.DOCUMENTED, ModelCard, ModelList))
    install_handlers(app, lambda: None)
    transport = httpx.ASGITransport(app=app)
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as http:
            await jobs.start()
            await names.log_unserved()
            yield Server(store, worker, jobs, http)
    finally:
        await jobs.stop()
        store.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # the server's loop
        runner.run(asyncio.wait_for(scenario(), 240))  # type: ignore[arg-type]


def examples(num_examples: int = 12) -> bytes:
    """A training file."""
    return b"".join(example(f"What is {number}?", f"It is {number}.") for number in range(num_examples))


def example(question: str, answer: str) -> bytes:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages}).encode() + b"\n"


def metrics(*steps: int, valid: bool = False) -> tuple[StepMetrics, ...]:
    return tuple(
        StepMetrics(
            step=step,
            epoch=step / 3,
            train_loss=2.0 / step,
            train_mean_token_accuracy=0.5,
            learning_rate=1e-4,
            grad_norm=0.1,
            tokens=40,
            valid_loss=1.5 if valid else None,
            valid_mean_token_accuracy=0.25 if valid else None,
        )
        for step in steps
    )


def report(job_id: str, *steps: int, remaining_s: float | None = 60.0, valid: bool = False) -> JobMetrics:
    return JobMetrics(job_id, metrics(*steps, valid=valid), trained_tokens=40 * steps[-1], remaining_s=remaining_s)


def write_adapter(store: Store, job_id: str, *parts: str) -> str:
    """A folder below the job's that looks like an adapter of the worker's."""
    folder = store.jobs.folder(job_id).joinpath(*parts)
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return str(folder)


def success(server: Server, job_id: str) -> JobSucceeded:
    path = write_adapter(server.store, job_id, "adapter")
    return JobSucceeded(job_id, path, trained_tokens=240, total_steps=6)


def stops(worker: RecordingWorker) -> list[tuple[type, str]]:
    """What it was told to stop, in order."""
    return [(type(message), message.job_id) for message in worker.sent if isinstance(message, PauseJob | CancelJob)]


async def die(there: Server) -> None:
    """The worker dies; the next one becomes ready."""
    there.worker.ready = None
    await asyncio.sleep(0)
    there.worker.ready = READY
    await there.jobs.on_worker_ready()


async def die_and_start_again(there: Server, job_id: str) -> None:
    """The worker dies, and the next one is told to start this job."""
    before = list(there.worker.started)
    await die(there)
    await there.wait_started(*before, job_id)


async def queue_of(there: Server, num_jobs: int) -> list[str]:
    file = await there.upload(examples())
    ids = [str((await there.create(training_file=file))["id"]) for _ in range(num_jobs)]
    for job_id in ids:
        await there.wait(job_id, "queued", "running")
    return ids
