"""The API process from start to end: parts put together, HTTP served, drained on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import uvloop

from cotenant.api.app import create_app
from cotenant.api.http_server import BACKLOG, HttpServer, notice_dead_clients, raise_open_files_limit
from cotenant.api.jobs.manager import JobManager
from cotenant.api.models import check_given_names
from cotenant.api.prepared import WORKER_COMMAND, PreparedWorker
from cotenant.api.state import AppState
from cotenant.api.worker_client import WorkerClient
from cotenant.config import ApiConfig, ServerConfig
from cotenant.core.errors import CotenantError, InvalidInputError
from cotenant.store import open_store
from cotenant.text.chat import load_chat_template
from cotenant.text.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

DRAIN_TIMEOUT_S = 300.0
# What a connection may take after the worker has sent its last token.
HTTP_CLOSE_TIMEOUT_S = 10.0
# What requests may take to end once their connections are cut: a write to disk that has begun is finished.
_CUT_TIMEOUT_S = 2.0


class ServerFailedError(CotenantError):
    """The server cannot start or go on. ``exit_code`` is what the process should end with."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class BaseModel:
    """What the API process knows of the base model. ``folder`` None: random weights and a byte tokenizer.
    ``fingerprint``: which model it is, wherever it lies; jobs are recorded with it."""

    folder: Path | None
    vocab_size: int
    fingerprint: str


def run_server(
    config: ServerConfig,
    base: BaseModel,
    announce: Callable[[str], None],
    *,
    worker_command: Sequence[str] = WORKER_COMMAND,
    prepared: PreparedWorker | None = None,
) -> int:
    """Serve until a signal says stop; returns the exit code. ``announce`` gets one line when the model is ready.

    HTTP listens from the start; ``/health`` answers 503 until the worker is ready. The first SIGTERM or SIGINT drains,
    and so does SIGHUP unless it is ignored: nothing new is taken, running requests end, a running job writes a
    checkpoint. The second one ends it at once, but for SIGHUP.
    Raises ServerFailedError, or CotenantError for what else is wrong with the configuration or the data folder.
    """
    raise_open_files_limit()
    with (
        contextlib.closing(open_listener(config.api)) as listener,
        _open_state(config, base, worker_command, prepared) as state,
    ):
        http = HttpServer(create_app(state))
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            return runner.run(_Session(state, http, listener, announce).run())


@contextlib.contextmanager
def _open_state(
    config: ServerConfig, base: BaseModel, worker_command: Sequence[str], prepared: PreparedWorker | None
) -> Iterator[AppState]:
    """Everything that the routes work with; the store stays locked until the end."""
    tokenizer = load_tokenizer(base.folder, base.vocab_size)
    chat_template = load_chat_template(base.folder, config.model.chat_template)
    # Training teaches the tokenizer's ends of a turn: answers end at all of them.
    model = replace(config.model, eos_token_ids=tokenizer.eos_token_ids)
    worker_config = replace(config, model=model)
    worker = WorkerClient(worker_config, base.folder, worker_command=worker_command, prepared=prepared)
    with contextlib.closing(open_store(Path(config.data_dir))) as store:
        check_given_names(config, store)
        jobs = JobManager(store, worker, config, base.folder, base.fingerprint)
        worker.attach_jobs(jobs)
        yield AppState(
            config=config,
            base_folder=base.folder,
            base_fingerprint=base.fingerprint,
            worker=worker,
            tokenizer=tokenizer,
            chat_template=chat_template,
            store=store,
            jobs=jobs,
        )


def _new_event_loop() -> asyncio.AbstractEventLoop:
    return uvloop.new_event_loop()


class _Session:
    """One run of the server on its event loop."""

    def __init__(
        self, state: AppState, http: HttpServer, listener: socket.socket, announce: Callable[[str], None]
    ) -> None:
        self._state = state
        self._worker: WorkerClient = state.worker
        self._http = http
        self._listener = listener
        self._announce = announce
        self._stop = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as under nohup
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        address = _url(self._listener)
        logger.info("listening on %s; the model is being loaded", address)
        await self._worker.start()
        await self._state.jobs.start()
        await self._state.models.log_unserved()
        serving = asyncio.create_task(self._http.serve(sockets=[self._listener]), name="http")
        stop = asyncio.create_task(self._stop.wait(), name="stop")
        others = [
            stop,
            asyncio.create_task(self._worker.wait_failed(), name="worker-failed"),
            asyncio.create_task(self._announce_ready(address), name="announce"),
        ]
        try:
            await asyncio.wait([serving, *others[:2]], return_when=asyncio.FIRST_COMPLETED)
            has_failed = self._worker.failed is not None
            if not has_failed:
                await self._drain()
            await self._end_http(serving, stop if has_failed else None)
        finally:
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            await self._state.jobs.stop()
            await self._worker.close()
        if self._worker.failed is not None:
            raise ServerFailedError(self._worker.failed, self._worker.exit_code)
        return 0

    async def _drain(self) -> None:
        logger.info("draining: %d requests are live", self._worker.num_live)
        self._state.jobs.begin_drain()
        self._http.should_exit = True
        await self._worker.drain(DRAIN_TIMEOUT_S)
        logger.info("drained")

    async def _end_http(self, serving: asyncio.Task[None], hurry: asyncio.Task[bool] | None) -> None:
        """The worker sends nothing any more. A connection that is not done soon is cut: a client that never ends its
        request, or does not read its answer, must not hold the process. ``hurry``: when it ends, nothing is waited
        for."""
        self._http.should_exit = True
        waits = [serving] if hurry is None else [serving, hurry]
        await asyncio.wait(waits, timeout=HTTP_CLOSE_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if not serving.done():
            num_cut = self._http.cut_connections()
            logger.warning(
                "cut %d connection%s still sending or reading", num_cut, " that was" if num_cut == 1 else "s that were"
            )
            await asyncio.wait([serving], timeout=_CUT_TIMEOUT_S)
        self._http.force_exit = True
        await serving

    def _on_hangup(self) -> None:
        """The terminal is gone. The shell and the kernel may both say so, so a second one is none."""
        if not self._stop.is_set():
            self._on_signal(signal.SIGHUP)

    def _on_signal(self, number: signal.Signals) -> None:
        if not self._stop.is_set():
            logger.info("%s: stopping; a second signal stops at once", number.name)
            self._stop.set()
            return
        logger.warning("%s again: stopping at once; %d requests are cut off", number.name, self._worker.num_live)
        self._worker.kill()
        os._exit(128 + number)

    async def _announce_ready(self, address: str) -> None:
        try:
            ready = await self._worker.wait_ready()
        except CotenantError:
            return  # run() says why
        slo = f"SLO TTFT {ready.slo.ttft_ms:.1f} ms TPOT {ready.slo.tpot_ms:.1f} ms ITL {ready.slo.max_gap_ms:.1f} ms"
        name = self._state.config.model.name
        self._announce(f"cotenant is ready: {address}  model {name}  policy {ready.policy}  {slo}")


def open_listener(api: ApiConfig) -> socket.socket:
    """A listening socket, before anything else takes time. Raises ServerFailedError that says what to do, and
    InvalidInputError for what is no host."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            api.host, api.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        notice_dead_clients(listener)
        listener.bind(address)
        listener.listen(BACKLOG)
        listener.setblocking(False)
        return listener
    except ValueError as error:
        raise InvalidInputError(f"--host: {api.host!r} cannot be a host's name: {error}", param="host") from error
    except OSError as error:
        if listener is not None:
            listener.close()
        raise ServerFailedError(_describe_bind_error(api, error), 1) from error


def _describe_bind_error(api: ApiConfig, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {api.port} on {api.host} is in use by another program; choose another one with --port"
    if error.errno == errno.EACCES:
        return f"no permission to listen on port {api.port}; choose one above 1023 with --port"
    return f"cannot listen on {api.host}, port {api.port}: {error.strerror or error}"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
