"""Requests that come by themselves, with prompts, on the machine of fixed latencies.

A batch takes what its parts take: weights, sequences, context, prompt tokens and what each of those attends to
(``Latencies``).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from cotenant.core.plan import (
    BatchShape,
    InFlight,
    IterationRecord,
    JobView,
    Mode,
    Partition,
    Plan,
    RequestView,
    Slo,
    Snapshot,
    causal_pairs,
)
from cotenant.core.request import FinishReason
from cotenant.core.tasklet import TaskletRun
from cotenant.scheduler.answers import AnswerLengths
from cotenant.scheduler.base import flight_ms, prompts_of
from cotenant.scheduler.chunking import prompt_budget
from cotenant.scheduler.crowding import prompts_ms
from cotenant.scheduler.turns import take_turns
from scheduler.machine import ALONE_MS, HOST_MS, Machine

_ADAPTIVES = (Partition(32, 100), Partition(48, 84), Partition(64, 68), Partition(80, 52))
# Of each policy that shares in space.
PARTITIONS = {
    "adaptive": _ADAPTIVES,
    "llmstation": _ADAPTIVES,
    "harli": (Partition(16, 116), Partition(24, 108), Partition(40, 92), Partition(48, 84), Partition(64, 68)),
}
MOST_TOKENS = 4096  # of a batch
_TILE = 128  # rows


class Latencies(NamedTuple):
    """Milliseconds of what a batch has, alone; about those of Llama-3.1-8B on an H200. ``tiles``: what prompts add by
    the tiles that the batch's rows fill, decodes included, and as much as the last one each tile after those; where
    there are none, prompts take ``prompt`` a token. Few rows cost less than that: the weights are read in any case."""

    weights: float = 4.3
    sequence: float = 0.02
    context: float = 2.35e-5
    prompt: float = 0.0225
    pair: float = 1.0e-6
    tiles: tuple[float, ...] = ()

    def batch_ms(self, batch: BatchShape) -> float:
        if batch.empty:
            return 0.0
        step_ms = self.weights + self.sequence * batch.num_decode + self.context * batch.context_tokens
        return step_ms + self._prompts_ms(batch) + self.pair * batch.prefill_pairs

    def _prompts_ms(self, batch: BatchShape) -> float:
        if not self.tiles or not batch.prefill_tokens:
            return self.prompt * batch.prefill_tokens
        num_tiles = -(-(batch.num_decode + batch.prefill_tokens) // _TILE)
        if num_tiles <= len(self.tiles):
            return self.tiles[num_tiles - 1]
        return self.tiles[-1] + (num_tiles - len(self.tiles)) * (self.tiles[-1] - self.tiles[-2])


class Arrival(NamedTuple):
    at_s: float
    num_prompt: int
    num_tokens: int  # of its answer


def arrivals(rate: float, num_prompt: int, num_tokens: int, seconds: float, seed: int = 1) -> list[Arrival]:
    """So many a second, with prompts and answers of half to one and a half of these lengths."""
    rng, at_s, found = random.Random(seed), 0.0, []
    while at_s < seconds:
        at_s += rng.expovariate(rate)
        prompt, answer = (max(1, round(mean * rng.uniform(0.5, 1.5))) for mean in (num_prompt, num_tokens))
        found.append(Arrival(at_s, prompt, answer))
    return found


@dataclass(eq=False)
class _Request:
    name: str
    arrival: Arrival
    arrival_s: float
    num_left: int  # of its prompt
    token_s: list[float] = field(default_factory=list)

    @property
    def context(self) -> int:
        return self.arrival.num_prompt - self.num_left + len(self.token_s)

    @property
    def num_left_of_answer(self) -> int:
        return self.arrival.num_tokens - len(self.token_s)

    def view(self) -> RequestView:
        first_s = self.token_s[0] if self.token_s else None
        has_begun = self.num_left < self.arrival.num_prompt
        return RequestView(
            self.name, self.arrival_s, first_s, len(self.token_s), self.num_left, None, has_begun,
            num_computed=self.arrival.num_prompt - self.num_left,
        )  # fmt: skip

    def meets(self, slo: Slo) -> bool:
        num_gaps = len(self.token_s) - 1
        tpot_ms = (self.token_s[-1] - self.token_s[0]) * 1e3 / num_gaps if num_gaps else 0.0
        return tpot_ms <= slo.tpot_ms and (self.token_s[0] - self.arrival_s) * 1e3 <= slo.ttft_ms


class _Next(NamedTuple):
    """What is planned for a batch, and who is in it."""

    plan: Plan
    batch: BatchShape
    decodes: list[_Request]
    chunks: list[tuple[_Request, int]]


class TraceMachine(Machine):
    """``run_trace`` once: the share of requests that met the SLO, and harvest while they came."""

    def __init__(
        self,
        policy: str,
        slo: Slo,
        partitions: tuple[Partition, ...],
        load: Sequence[Arrival],
        latencies: Latencies = Latencies(),
    ) -> None:
        super().__init__(policy, slo, partitions)
        self._latencies = latencies
        self._begin_s = self._now_s
        self._coming = deque(load)
        self._live: list[_Request] = []
        self._next: _Next | None = None
        self._was_overtaken = False  # who came since the batch was planned waits for no tasklets behind it
        self._answers = AnswerLengths()
        self._last_tokens_s = -math.inf
        self.done: list[_Request] = []

    @property
    def margin(self) -> float:
        return self._margin.aim(self._now_s)

    def run_trace(self) -> tuple[float, float]:
        self._teach()
        end_s, trained_ms = self._begin_s + self._coming[-1].at_s, 0.0
        while self._coming or self._live:
            begins_s = self._now_s
            gained_ms = self._serve()
            trained_ms += gained_ms if begins_s < end_s else 0.0
        harvest = trained_ms / 1e3 / (end_s - self._begin_s)
        return sum(request.meets(self._slo) for request in self.done) / len(self.done), harvest

    def _teach(self) -> None:
        """A job has run alone before, and requests without one."""
        for shape, alone_ms in ALONE_MS.items():
            runs = ((TaskletRun(shape, 1), alone_ms),)
            for _ in range(8):
                self.predictor.observe(IterationRecord(BatchShape(), Mode.TEMPORAL, 0.0, alone_ms, runs))
        for size in (1, 4, 16, 64):
            for context in (500, 1500):
                for prompt in (0, 512, 2048):
                    batch = BatchShape(size, size * context, prompt, prompt, prefill_pairs=causal_pairs(prompt))
                    for _ in range(3):
                        self.predictor.observe(
                            IterationRecord(batch, Mode.NONE, self._alone_ms(batch), self._alone_ms(batch))
                        )

    def _alone_ms(self, batch: BatchShape) -> float:
        return self._latencies.batch_ms(batch)

    def _serve(self) -> float:
        """An iteration: what it got training, as milliseconds alone."""
        self._was_overtaken = self._next is not None and self._has_come(self._now_s)
        while self._has_come(self._now_s):
            arrival = self._coming.popleft()
            request = _Request(str(next(self._names)), arrival, self._begin_s + arrival.at_s, arrival.num_prompt)
            self._live.append(request)
            self._margin.arrived(request.name, request.arrival_s)
        if self._next is None:
            self._now_s += HOST_MS / 1e3
        plan, batch, decodes, chunks = self._next or self._plan_batch(None, [])
        runs, is_live = plan.run_online and not batch.empty, bool(self._live)
        landing = self._advance(decodes, chunks) if runs else []
        self._next = None
        if runs and plan.num_tasklets == plan.num_beside:
            found = self._plan_batch(InFlight(plan.partition, plan.predicted_ms, batch), landing)
            self._next = found if found.plan.run_online and not found.batch.empty else None
        record, gained_ms, token_ms = self._carry_out(plan, batch if runs else BatchShape())
        self._tokens_of(landing, self._now_s + token_ms / 1e3)
        self.predictor.observe(record)
        if batch.prefill_tokens and runs:
            self._margin.prompts_took(prompts_ms(self.predictor, batch), self._now_s + token_ms / 1e3)
        if plan.mode is not Mode.NONE and is_live:
            self._margin.trained(max(0.0, record.total_ms - self._alone_ms(record.batch)), self._now_s)
        self._now_s += record.total_ms / 1e3
        if not runs and not plan.num_tasklets and not self._live:  # nothing to do until somebody comes
            self._now_s = max(self._now_s, self._begin_s + self._coming[0].at_s)
        return gained_ms

    def _interrupts(self, now_s: float) -> bool:
        return self._was_overtaken or self._has_come(now_s)

    def _has_come(self, now_s: float) -> bool:
        return bool(self._coming) and self._begin_s + self._coming[0].at_s <= now_s

    def _plan_batch(self, in_flight: InFlight | None, landing: Sequence[_Request]) -> _Next:
        """``landing``: those that get a token with the batch in flight."""
        coming = {request.name for request in landing}
        live = [each for each in self._live if each.num_left_of_answer > (each.name in coming)]
        decodes = [request for request in live if not request.num_left]
        views = tuple(request.view() for request in live)
        prompts = prompts_of(views)
        context = sum(request.context + (request.name in coming) for request in decodes)
        room = MOST_TOKENS - len(decodes)
        if len(decodes) < len(live):
            budget = prompt_budget(
                self.predictor, BatchShape(len(decodes), context), views, prompts, self._slo, self._now_s, MOST_TOKENS,
                self._answers.short, in_flight,
            )  # fmt: skip
            room = budget - len(decodes)
        turns = take_turns(
            self.predictor, BatchShape(len(decodes), context), prompts, self._slo, self._now_s, room + len(decodes),
            0.0 if in_flight is None else flight_ms(self.predictor, in_flight) or 0.0,
        )  # fmt: skip
        room = turns.budget - len(decodes)
        chunks: list[tuple[_Request, int]] = []
        for request in sorted(live, key=lambda request: request.name in turns.put_off):
            if request.num_left and room > 0:
                chunks.append((request, min(room, request.num_left)))
                room -= chunks[-1][1]
        batch = BatchShape(
            len(decodes), context, sum(count for _, count in chunks),
            sum(request.arrival.num_prompt - request.num_left + count for request, count in chunks),
            prefill_pairs=sum(
                causal_pairs(count, request.arrival.num_prompt - request.num_left) for request, count in chunks
            ),
        )  # fmt: skip
        self._begin_margin(batch)
        snapshot = Snapshot(
            self._now_s, self._slo, batch, views, JobView("job", self._upcoming()), partitions=self._partitions,
            margin=self.margin, taken_off=self._margin.value - self.margin,
            num_ending=sum(count == request.num_left for request, count in chunks),
            in_flight=in_flight, least_answer=self._answers.least,
            since_tokens_ms=(self._now_s - self._last_tokens_s) * 1e3,
        )  # fmt: skip
        return _Next(self._policy.plan(snapshot), batch, decodes, chunks)

    def _advance(self, decodes: list[_Request], chunks: list[tuple[_Request, int]]) -> list[_Request]:
        """A batch is launched: those that get a token with it."""
        for request, count in chunks:
            request.num_left -= count
        return [*decodes, *(request for request, _ in chunks if not request.num_left)]

    def _tokens_of(self, requests: list[_Request], at_s: float) -> None:
        if requests:
            self._last_tokens_s = at_s
        for request in requests:
            request.token_s.append(at_s)
            is_over = len(request.token_s) == request.arrival.num_tokens
            if is_over:
                self._answers.ended(len(request.token_s), FinishReason.STOP)
            self._margin.note(request.name, 1, at_s, is_over)
            if is_over:
                self._live.remove(request)
                self.done.append(request)
        self._margin.settle(at_s)
