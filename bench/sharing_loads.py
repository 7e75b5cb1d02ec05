"""The loads of `cotenant bench colocate`, sent to a server over HTTP."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from sharing_processes import SharingError

from cotenant.bench.client import metrics, new_client
from cotenant.bench.event_stream import EventStream
from cotenant.bench.generator import Endpoint, Generator, Outcome, Share, allow_many_connections, warm_up
from cotenant.bench.processes import run_loop
from cotenant.bench.schedule import PlannedRequest, PromptMaker, from_trace, request_body
from cotenant.bench.stream_client import ExchangeFailed, StreamClient
from cotenant.cli.colocate_loads import TracePlan
from cotenant.runtime.colocate_bench import ANSWERED_WITHIN_S
from cotenant.runtime.load import Answer, Arrival
from cotenant.runtime.steady import SETTLED_TOKENS

T = TypeVar("T")

ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATH = "/v1/completions"
_POLL_S = 0.005
_STATS_EVERY_S = 0.5  # what the server says of itself may be as old
_IDLE_TIMEOUT_S = 60.0
_WARM_REQUESTS, _WARM_INPUT, _WARM_OUTPUT, _WARM_TIMEOUT_S = 8, 256, 16, 300.0
_WARM_NONCE, _NONCE = 0, 1  # the warm-up's prompts are in the prefix cache


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a load. Times in seconds after ``origin_s``, which is on ``time.monotonic()``."""

    answers: Sequence[Answer]
    origin_s: float
    start_s: float
    end_s: float
    with_ttft: bool


@dataclass(frozen=True, slots=True)
class Client:
    """Sends loads to the server at ``url``; ``max_model_len``: the tokens that it takes in a request."""

    url: str
    model: str
    vocab_size: int
    max_model_len: int

    def warm_up(self) -> None:
        """A few requests. Raises SharingError if one fails."""
        input_len = min(_WARM_INPUT, self.max_model_len - _WARM_OUTPUT)
        requests = [PlannedRequest(index, 0.0, input_len, _WARM_OUTPUT, self.model) for index in range(_WARM_REQUESTS)]
        share = self._share(requests, seed=0, nonce=_WARM_NONCE, timeout_s=_WARM_TIMEOUT_S)
        failed = [outcome for outcome in _run_loop(warm_up(share)) if outcome.failure is not None]
        if failed:
            raise SharingError(f"the server's warm-up failed: {failed[0].failure}: {failed[0].message}")

    def steady(self, batch_size: int, context: int, num_tokens: int, seed: int) -> Measured:
        """``batch_size`` sequences that decode together: ``num_tokens`` tokens each, around ``context`` of them. Raises
        SharingError if one of them ends before."""
        measured = _run_loop(self._steady(batch_size, context, num_tokens, seed))
        self._wait_idle()
        return measured

    def trace(self, plan: TracePlan, seed: int) -> Measured:
        """Its requests, open loop; what is not answered a while after the last is due has failed."""
        planned = from_trace(plan.trace, plan.time_scale, [self.model], seed)
        # Random tokens as in the load of `bench colocate`, where blocks of a trace are not shared either.
        planned = [PlannedRequest(one.index, one.due_s, one.input_len, one.output_len, one.model) for one in planned]
        allow_many_connections()
        generator = Generator(self._share(planned, seed, _NONCE, plan.duration_s + ANSWERED_WITHIN_S))
        generator.prepare()
        origin_s = time.monotonic() + 0.1
        outcomes = _run_loop(_run(generator, origin_s, plan.duration_s + ANSWERED_WITHIN_S))
        self._wait_idle()
        by_index = {outcome.index: outcome for outcome in outcomes}
        answers = [_answer(one, by_index.get(one.index)) for one in planned]
        return Measured(answers, origin_s, 0.0, plan.duration_s, with_ttft=True)

    async def _steady(self, batch_size: int, context: int, num_tokens: int, seed: int) -> Measured:
        input_len = max(1, context - num_tokens // 2)
        arrival = Arrival(0.0, input_len, self.max_model_len - input_len)
        prompts = PromptMaker(self.vocab_size, seed, _NONCE)
        planned = [PlannedRequest(n, 0.0, input_len, arrival.output_len, self.model) for n in range(batch_size)]
        bodies = [request_body(one, prompts.make(one)) for one in planned]
        client = StreamClient(self.url + _PATH, {}, timeout_s=3600.0)
        streams = [EventStream() for _ in planned]
        origin_s = time.monotonic()
        tasks = [asyncio.create_task(client.post(body, stream)) for body, stream in zip(bodies, streams, strict=True)]
        try:
            await _until_each_has(SETTLED_TOKENS, streams, tasks)
            start_s = time.monotonic()
            await _until_each_has(min(len(stream.times) for stream in streams) + num_tokens, streams, tasks)
            end_s = time.monotonic()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            client.close()
        answers = [Answer(arrival, [at_s - origin_s for at_s in stream.times]) for stream in streams]
        return Measured(answers, origin_s, start_s - origin_s, end_s - origin_s, with_ttft=False)

    def _share(self, requests: list[PlannedRequest], seed: int, nonce: int, timeout_s: float) -> Share:
        return Share(Endpoint(self.url + _PATH, {}, timeout_s), requests, self.vocab_size, seed, nonce)

    def _wait_idle(self) -> None:
        """Until the server is done with what was cut off. Raises SharingError."""
        if not _run_loop(_is_idle_within(self.url, _IDLE_TIMEOUT_S)):
            raise SharingError(f"the server still had requests {_IDLE_TIMEOUT_S:g} s after the load")


def _run_loop(main: Coroutine[Any, Any, T]) -> T:
    """As ``run_loop``. Raises asyncio.CancelledError for a signal that ends a program: uvloop would swallow what a
    handler raises in one of its callbacks."""

    async def cancellable() -> T:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        handlers = {number: signal.getsignal(number) for number in ENDING_SIGNALS}
        for number in handlers:
            loop.add_signal_handler(number, task.cancel)
        try:
            return await main
        finally:
            for number, handler in handlers.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)

    return run_loop(cancellable())


async def _run(generator: Generator, origin_s: float, most_s: float) -> list[Outcome]:
    cut_off = asyncio.get_running_loop().call_later(origin_s - time.monotonic() + most_s, generator.stop)
    try:
        return (await generator.run(origin_s)).outcomes
    finally:
        cut_off.cancel()


async def _until_each_has(count: int, streams: Sequence[EventStream], tasks: Sequence[asyncio.Task[None]]) -> None:
    while min(len(stream.times) for stream in streams) < count:
        for task in tasks:
            if task.done():
                error = task.exception()
                reason = error if isinstance(error, ExchangeFailed) else "it came to its end"
                raise SharingError(f"a sequence ended before the others had their tokens: {reason}")
        await asyncio.sleep(_POLL_S)


async def _is_idle_within(url: str, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    async with new_client(url) as client:
        while time.monotonic() < deadline:
            await asyncio.sleep(_STATS_EVERY_S)
            samples = await metrics(client)
            if not samples["cotenant:num_requests_running"] + samples["cotenant:num_requests_waiting"]:
                return True
    return False


def _answer(planned: PlannedRequest, outcome: Outcome | None) -> Answer:
    """Of a token whose text came with another's, the time is that one's."""
    answer = Answer(Arrival(planned.due_s, planned.input_len, planned.output_len))
    if outcome is None:
        answer.failure = "not sent"
        return answer
    answer.token_s = np.frombuffer(outcome.chunk_times_s).tolist()
    if not outcome.finished:
        answer.failure = outcome.failure or outcome.message
    elif answer.token_s:
        answer.token_s += [answer.token_s[-1]] * (outcome.output_tokens - len(answer.token_s))
    return answer
