"""The API process's view of the worker: requests go in, outputs come out, whatever happens to the process between."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
from collections.abc import AsyncGenerator, Awaitable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from cotenant.api.live_request import LiveRequest
from cotenant.api.prepared import WORKER_COMMAND, PreparedWorker
from cotenant.api.supervisor import CrashWindow, Supervisor
from cotenant.api.worker_watch import WorkerWatch
from cotenant.config import ServerConfig
from cotenant.core.errors import (
    INVALID_ADAPTER,
    ConflictError,
    CotenantError,
    InvalidInputError,
    NotFoundError,
    OverloadedError,
    WorkerLostError,
)
from cotenant.core.plan import Slo
from cotenant.core.request import AdapterRef, Request, SequenceOutput
from cotenant.wire.messages import (
    AbortRequests,
    AdapterFailed,
    AdapterLoaded,
    AddRequest,
    Drain,
    Drained,
    FromWorker,
    LoadAdapter,
    Outputs,
    Ready,
    RequestFailed,
    StartFailed,
    Stats,
    ToWorker,
    UnloadAdapter,
)

logger = logging.getLogger(__name__)

# A request that was running each time the worker died may be the reason; it is not run more often than this.
MAX_RUNS = 3

_ERRORS_BY_CODE: dict[str, type[CotenantError]] = {
    "model_not_found": NotFoundError,
    "not_found": NotFoundError,
    "conflict": ConflictError,
    "overloaded": OverloadedError,
    "internal_error": CotenantError,
    "server_error": CotenantError,
}


class JobMessages(Protocol):
    """Who hears what the worker says about jobs. Called in the order of the messages, one at a time."""

    def on_worker_message(self, message: FromWorker) -> Awaitable[None] | None:
        """A message about a job, ``JobStarted`` to ``JobFailed``."""

    def on_worker_ready(self) -> Awaitable[None] | None:
        """A new worker is ready and knows of no job. All messages of the one before it have been handed over."""


class WorkerClient:
    """Runs requests on the supervised worker, and passes job messages to and fro. One per API process.

    ``model_folder`` is where the model's name was resolved to (None: random weights), so that the worker needs no
    look-up of its own. Call ``attach_jobs`` before ``start``.
    """

    def __init__(
        self,
        config: ServerConfig,
        model_folder: Path | None = None,
        *,
        worker_command: Sequence[str] = WORKER_COMMAND,
        crashes: CrashWindow | None = None,
        prepared: PreparedWorker | None = None,
    ) -> None:
        self.ready: Ready | None = None
        self.stats = Stats()
        self.failed: str | None = None
        self.exit_code = 0
        self.draining = False
        self.num_restarts = 0
        self.watch = WorkerWatch(config.api.worker_timeout_s)
        self._config = config
        self._model_folder = model_folder
        self._max_queue = config.batch.max_queue
        self._live: dict[str, LiveRequest] = {}
        self._adapter_loads: dict[str, asyncio.Future[None]] = {}
        self._jobs: JobMessages | None = None
        self._job_messages: asyncio.Queue[FromWorker] = asyncio.Queue()
        self._job_task: asyncio.Task[None] | None = None
        self._last_ready: Ready | None = None
        self._was_ready = asyncio.Event()
        self._failed = asyncio.Event()
        self._supervisor = Supervisor(worker_config_json(config, model_folder), self, worker_command, crashes, prepared)

    @property
    def num_live(self) -> int:
        """Requests that were admitted and have not ended, waiting ones included. One whose client is slow to read the
        end of its answer has ended."""
        return sum(not live.has_ended for live in self._live.values())

    @property
    def last_ready(self) -> Ready | None:
        """What the newest worker said when it was ready; stays while the next one loads the same model."""
        return self._last_ready

    @property
    def serves(self) -> bool:
        """Whether there is a worker that is ready, and it does not seem to hang."""
        return self.ready is not None and not self.watch.is_silent

    @property
    def worker_pid(self) -> int | None:
        return self._supervisor.pid

    def attach_jobs(self, jobs: JobMessages) -> None:
        self._jobs = jobs

    async def start(self) -> None:
        """Start the worker; returns at once. ``wait_ready`` tells when it serves."""
        self._job_task = asyncio.create_task(self._deliver_job_messages(), name="job-messages")
        self._supervisor.start()
        self.watch.start()

    async def wait_ready(self) -> Ready:
        """Wait until the first worker is ready and return its message. Raises CotenantError if there will be none."""
        waits = [asyncio.create_task(event.wait()) for event in (self._was_ready, self._failed)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if self._last_ready is None:
            raise CotenantError(self.failed or "The worker has failed.")
        return self._last_ready

    async def wait_failed(self) -> str:
        """Wait until there is no worker and will be none; returns why. ``exit_code`` is what the process ends with."""
        await self._failed.wait()
        assert self.failed is not None
        return self.failed

    async def drain(self, timeout_s: float) -> None:
        """Let the live requests end, let the running job write a checkpoint, and let the worker exit.

        New requests are refused from the first moment. After ``timeout_s`` the worker is killed. Returns when all that
        it said about jobs has been handled.
        """
        self.draining = True
        if self.ready is None:  # loading: nothing runs in it
            await self._supervisor.stop()
        else:
            self._supervisor.expect_exit()
            self._supervisor.post(Drain())
            try:
                await asyncio.wait_for(self._supervisor.wait(), timeout_s)
            except TimeoutError:
                logger.error("the worker was not drained within %g s and is killed", timeout_s)
                await self._supervisor.stop()
        self._end_all("The server is shutting down.")
        if self._job_task is not None:
            await self._job_messages.join()

    async def close(self) -> None:
        """Kill the worker if it still runs, and stop. Requests that are live end with an error."""
        self.draining = True
        await self._supervisor.stop()
        await self.watch.close()
        self._end_all("The server is shutting down.")
        if self._job_task is not None:
            await self._job_messages.join()
            self._job_task.cancel()
            await asyncio.gather(self._job_task, return_exceptions=True)

    def kill(self) -> None:
        """SIGKILL the worker, without waiting."""
        self._supervisor.kill()

    def post(self, message: ToWorker) -> bool:
        """Send a message about a job, in order and without waiting. False if no worker is ready: ``on_worker_ready``
        will be called when there is one."""
        if self.ready is None:
            return False
        self._supervisor.post(message)
        return True

    async def generate(self, request: Request, *, is_collected: bool = False) -> AsyncGenerator[SequenceOutput, None]:
        """Run ``request`` and yield what each iteration adds to it; the last output has a ``finish_reason``.

        Closing the iterator early frees the sequence in the worker at once. If the worker dies before the first output
        was yielded, the request is run again by the next worker; with ``is_collected``, which is for the log alone, the
        caller has it run again if the worker dies later. Raises OverloadedError (too many live requests, or the server
        is starting or stopping), WorkerLostError, or what the worker says is wrong with the request.
        """
        live = self._admit(request, is_collected)
        results = live.results
        try:
            while True:
                if not results:
                    await live.arrival()
                result = results.popleft()
                if isinstance(result, CotenantError):
                    raise result
                live.streamed = True
                yield result
                if result.finish_reason is not None:
                    return
        finally:
            del self._live[request.request_id]
            if live.sent and not live.has_ended:
                self._supervisor.post(AbortRequests((request.request_id,)))

    def has_results(self, request_id: str) -> bool:
        """Whether ``generate`` can go on with this request without waiting."""
        live = self._live.get(request_id)
        return live is not None and bool(live.results)

    def _admit(self, request: Request, is_collected: bool) -> LiveRequest:
        assert request.request_id not in self._live, f"request id {request.request_id} is in use"
        if self.draining:
            raise OverloadedError("The server is shutting down.", code="shutting_down")
        if self.failed is not None:
            raise OverloadedError("The model's worker has failed; the server is stopping.", code="worker_failed")
        if self._last_ready is None:
            raise OverloadedError("The model is still being loaded; try again in a moment.", code="loading")
        if self.num_live >= self._max_queue:
            raise OverloadedError(
                f"The server already has {self.num_live} requests, which is its limit; try again later.",
                code="overloaded",
            )
        live = self._live[request.request_id] = LiveRequest(request, is_collected)
        if self.ready is not None:
            self._send(live)
        return live

    def _send(self, live: LiveRequest) -> None:
        live.sent = True
        live.num_runs += 1
        self._supervisor.post(AddRequest(live.request))

    async def load_adapter(self, adapter: AdapterRef) -> None:
        """Have the worker read an adapter, and return when requests can use it. One at a time for each name.

        Raises InvalidInputError with what is wrong with the folder, or OverloadedError when there is no worker.
        """
        assert adapter.name not in self._adapter_loads, f"adapter {adapter.name} is being loaded"
        if self.ready is None or self.draining:
            raise _no_worker()
        loaded = self._adapter_loads[adapter.name] = asyncio.get_running_loop().create_future()
        try:
            self._supervisor.post(LoadAdapter(adapter.name, adapter.path))
            await loaded
        finally:
            del self._adapter_loads[adapter.name]

    def unload_adapter(self, adapter: AdapterRef) -> None:
        """Have the worker forget an adapter once no running request uses it."""
        self._supervisor.post(UnloadAdapter(adapter.name, adapter.path))

    def _on_adapter(self, name: str, error: CotenantError | None) -> None:
        loaded = self._adapter_loads.get(name)
        if loaded is None or loaded.done():
            return
        if error is None:
            loaded.set_result(None)
        else:
            loaded.set_exception(error)

    # What follows is called by the supervisor (WorkerEvents).

    def on_message(self, message: FromWorker) -> None:
        self.watch.heard()
        match message:
            case Outputs():
                find = self._live.get
                for output in message.outputs:
                    live = find(output.request_id)
                    if live is not None:
                        live.add(output)
            case Stats():
                self.stats = message
            case RequestFailed():
                live = self._live.get(message.request_id)
                if live is not None:
                    live.fail(_request_error(message))
            case AdapterLoaded():
                self._on_adapter(message.name, None)
            case AdapterFailed():
                error = InvalidInputError(message.message, code=INVALID_ADAPTER, param="lora_path")
                self._on_adapter(message.name, error)
            case Ready():
                self._on_ready(message)
            case Drained():
                logger.info("the worker is drained")
            case StartFailed():
                pass  # the supervisor gives up when the process has exited
            case _:
                self._job_messages.put_nowait(message)

    def _on_ready(self, message: Ready) -> None:
        logger.info("the worker is ready on %s after %.1f s", message.device, message.load_s)
        self.ready = message
        self.watch.begin(self.worker_pid)
        if self._last_ready is not None:
            self.num_restarts += 1
        else:
            self._keep_targets(message.slo)
        self._last_ready = message
        self._was_ready.set()
        self._job_messages.put_nowait(message)
        for live in list(self._live.values()):
            if not live.sent and not live.has_ended:
                self._send(live)

    def _keep_targets(self, slo: Slo) -> None:
        """Targets that the first worker measured hold for all that follow it: a restart does not move them."""
        coexecution = dataclasses.replace(self._config.coexecution, slo_ttft_ms=slo.ttft_ms, slo_tpot_ms=slo.tpot_ms)
        config = dataclasses.replace(self._config, coexecution=coexecution)
        self._supervisor.config_json = worker_config_json(config, self._model_folder)

    def on_lost(self, reason: str) -> None:
        self.ready = None
        self.watch.end()
        self.stats = Stats()
        affected = [live for live in self._live.values() if not live.has_ended]
        for live in affected:
            self._on_request_lost(live, reason)
        if affected:  # one line however many they are: with those who answer them it would be one for each
            num_again = sum(not live.has_ended or self._is_begun_again(live) for live in affected)
            num_ended = len(affected) - num_again
            logger.warning("the worker's end cut off %d requests; %d are to be run again", num_ended, num_again)
        for name in self._adapter_loads:
            self._on_adapter(name, _no_worker())

    def _is_begun_again(self, live: LiveRequest) -> bool:
        return live.is_collected and live.streamed and not self.draining

    def _on_request_lost(self, live: LiveRequest, reason: str) -> None:
        live.sent = False
        if not live.streamed and live.num_runs < MAX_RUNS and not self.draining:
            live.results.clear()
        else:
            is_suspect = not live.streamed and live.num_runs == MAX_RUNS
            tried = f" The request was run {MAX_RUNS} times and is not run again." if is_suspect else ""
            live.fail(WorkerLostError(f"The model's worker {reason}.{tried}", code="worker_lost"))

    def on_give_up(self, message: str, exit_code: int) -> None:
        self.failed = message
        self.exit_code = exit_code
        self._end_all("The model's worker has failed.")
        self._failed.set()

    def _end_all(self, message: str) -> None:
        num_live = self.num_live
        if num_live:
            logger.warning("%d requests are cut off: %s", num_live, message)
        for live in self._live.values():
            live.fail(WorkerLostError(message, code="worker_lost"))

    async def _deliver_job_messages(self) -> None:
        while True:
            message = await self._job_messages.get()
            try:
                if self._jobs is not None:
                    ready = isinstance(message, Ready)
                    handled = self._jobs.on_worker_ready() if ready else self._jobs.on_worker_message(message)
                    if inspect.isawaitable(handled):
                        await handled
            except Exception:
                logger.exception("%s from the worker could not be handled", type(message).__name__)
            finally:
                self._job_messages.task_done()


def worker_config_json(config: ServerConfig, model_folder: Path | None) -> bytes:
    """The worker's configuration: without the API key, and with the model's name replaced by its folder."""
    model = config.model
    if model_folder is not None:
        names = model.served_model_names or (model.name,)
        model = dataclasses.replace(model, model=str(model_folder), served_model_names=names)
    api = dataclasses.replace(config.api, api_key="")
    return msgspec.json.encode(dataclasses.replace(config, model=model, api=api))


def _no_worker() -> OverloadedError:
    return OverloadedError("The model's worker is not running now; try again in a moment.", code="worker_not_ready")


def _request_error(message: RequestFailed) -> CotenantError:
    kind = _ERRORS_BY_CODE.get(message.code or "", InvalidInputError)
    return kind(message.message, code=message.code, param=message.param)
