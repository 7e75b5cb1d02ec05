"""Sends a schedule at its times from one event loop, and keeps what was seen of each answer."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import resource
import time
from collections import deque
from collections.abc import Iterator, Sequence

import msgspec

from cotenant.bench.event_stream import EventStream
from cotenant.bench.schedule import PlannedRequest, PromptMaker, request_body
from cotenant.bench.stream_client import ExchangeFailed, StreamClient

# Bodies made before the first request is due; those beyond are made one by one between two sends.
_PREPARED_BYTES = 256 * 2**20


class Endpoint(msgspec.Struct, frozen=True):
    """Where requests go."""

    url: str
    headers: dict[str, str]
    timeout_s: float


class Share(msgspec.Struct, frozen=True):
    """What one process sends: its part of the schedule, and how prompts are made."""

    endpoint: Endpoint
    requests: list[PlannedRequest]
    vocab_size: int
    seed: int
    nonce: int


class Outcome(msgspec.Struct):
    """What became of one request. Times in seconds after the start of the run.

    ``chunk_times_s`` are float64 in the machine's byte order. A failed request has a ``failure``, its kind; one
    that was cut off because the run was ended early is neither ``finished`` nor failed.
    """

    index: int
    due_s: float
    sent_s: float
    input_tokens: int
    chunk_times_s: bytes = b""
    output_tokens: int = 0
    cached_tokens: int | None = None
    finished: bool = False
    failure: str | None = None
    message: str = ""


class ShareResult(msgspec.Struct):
    """Outcomes of a process's part, and the CPU time that it took."""

    outcomes: list[Outcome]
    cpu_s: float
    num_chunks: int


class Generator:
    """One process's part of a run. ``prepare`` makes bodies, ``run`` sends them; ``stop`` ends it early."""

    def __init__(self, share: Share) -> None:
        self._share = share
        self._prompts = PromptMaker(share.vocab_size, share.seed, share.nonce)
        self._client = StreamClient(share.endpoint.url, share.endpoint.headers, share.endpoint.timeout_s)
        self._ready: deque[bytes] = deque()
        self._unprepared = iter(share.requests)
        self._stopped = asyncio.Event()
        self._start_s = 0.0

    def prepare(self) -> None:
        """Make the bodies of the first requests, usually of all, and leave no garbage: by the time that a collection
        takes, the first requests would be late."""
        size_bytes = 0
        while size_bytes < _PREPARED_BYTES and self._prepare_one():
            size_bytes += len(self._ready[-1])
        gc.collect()

    def stop(self) -> None:
        """Send nothing more, and cut off what is in flight."""
        self._stopped.set()

    async def run(self, start_s: float) -> ShareResult:
        """Send everything, counted from ``start_s`` on ``time.monotonic()``, and wait for all answers."""
        self._start_s = start_s
        cpu_s = time.process_time()
        with _no_garbage_collection():
            outcomes = await self._run_all()
        self._client.close()
        num_chunks = sum(len(outcome.chunk_times_s) // 8 for outcome in outcomes)
        return ShareResult(outcomes, time.process_time() - cpu_s, num_chunks)

    async def _run_all(self) -> list[Outcome]:
        tasks: list[asyncio.Task[Outcome]] = []
        for request in self._share.requests:
            await self._wait_until(self._start_s + request.due_s)
            if self._stopped.is_set():
                break
            tasks.append(asyncio.create_task(self._send(request, self._ready.popleft())))
            self._prepare_one()
        cut_off = asyncio.create_task(self._cut_off(tasks))
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        cut_off.cancel()
        # A task that was cancelled before its first step has sent nothing.
        return [outcome for outcome in ended if isinstance(outcome, Outcome)]

    async def _cut_off(self, tasks: Sequence[asyncio.Task[Outcome]]) -> None:
        await self._stopped.wait()
        for task in tasks:
            task.cancel()

    async def _wait_until(self, when_s: float) -> None:
        delay_s = when_s - time.monotonic()
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopped.wait()

    def _prepare_one(self) -> bool:
        request = next(self._unprepared, None)
        if request is not None:
            self._ready.append(request_body(request, self._prompts.make(request)))
        return request is not None

    async def _send(self, request: PlannedRequest, body: bytes) -> Outcome:
        stream = EventStream()
        sent_s = time.monotonic() - self._start_s
        outcome = Outcome(request.index, request.due_s, sent_s, request.input_len)
        try:
            await self._client.post(body, stream)
            outcome.finished = True
        except ExchangeFailed as error:
            outcome.failure, outcome.message = error.kind, error.message
        except asyncio.CancelledError:
            outcome.message = "cut off"
        outcome.chunk_times_s = _shifted(stream, self._start_s)
        outcome.output_tokens = len(stream.times)
        if stream.usage is not None:
            outcome.output_tokens = stream.usage.completion_tokens or outcome.output_tokens
            outcome.input_tokens = stream.usage.prompt_tokens or outcome.input_tokens
            outcome.cached_tokens = stream.usage.cached_tokens
        return outcome


async def warm_up(share: Share) -> list[Outcome]:
    """Send the requests of a share at once, and wait for them."""
    generator = Generator(share)
    generator.prepare()
    return (await generator.run(time.monotonic())).outcomes


def split(requests: Sequence[PlannedRequest], num_parts: int) -> list[list[PlannedRequest]]:
    """The schedule dealt out to processes in turn."""
    return [list(requests[part::num_parts]) for part in range(num_parts)]


def allow_many_connections() -> None:
    """Raise this process's limit of open files as far as it may."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _shifted(stream: EventStream, start_s: float) -> bytes:
    for index, at_s in enumerate(stream.times):
        stream.times[index] = at_s - start_s
    return stream.times.tobytes()


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection over a schedule of many thousand requests takes longer than the times that are measured."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
