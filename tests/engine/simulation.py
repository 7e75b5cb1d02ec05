"""The batcher and the page pool driven through whole lives of sequences, with no model: tokens follow from the text."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass

from cotenant.core.request import AdapterRef, Request, SamplingParams
from cotenant.engine.batcher import BatchPlan, Limits, plan_batch
from cotenant.engine.prefix import PrefixKeys
from cotenant.engine.queue import SequenceQueue
from cotenant.engine.sampling_state import SamplingState
from cotenant.engine.sequence import PENDING, Sequence
from cotenant.memory.pages import PagePool

MAX_LENGTH = 10_000


def adapter(name: str | None) -> AdapterRef | None:
    return None if name is None else AdapterRef(name, f"/{name}")


def token(text: int, position: int) -> int:
    """The token at this position of a text; sequences of one text and adapter have equal pages."""
    return 1000 * text + position


@dataclass(frozen=True)
class Entry:
    """Part of a launched batch: the sequence's tokens up to ``end``, and whether a token was sampled after them."""

    sequence: Sequence
    end: int
    samples: bool


class Simulation:
    """Applies each plan as ``BatchPlan`` says. With ``overlap``, tokens are known one iteration after their launch.

    An adapter is ready ``load_iterations`` after the first sequence that names it was added.
    """

    def __init__(
        self,
        num_pages: int,
        page_tokens: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 64,
        max_loras: int = 1,
        *,
        overlap: bool = False,
        load_iterations: int = 0,
    ) -> None:
        self.limits = Limits(max_num_seqs, max_num_batched_tokens, max_loras, page_tokens)
        self.pool = PagePool(num_pages)
        self.running = SequenceQueue()
        self.waiting = SequenceQueue()
        self.finished: list[Sequence] = []
        self.iteration = 0
        self.num_preemptions = 0
        self.num_cached_pages = 0
        self.put_off: frozenset[str] = frozenset()  # requests' ids
        self._overlap = overlap
        self._load_iterations = load_iterations
        self._ready_at: dict[AdapterRef, int] = {}
        self._texts: dict[Sequence, tuple[int, PrefixKeys]] = {}
        self._flights: deque[list[Entry]] = deque()
        self._numbers = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(len(self.running) or len(self.waiting))

    def add(
        self, num_prompt: int, max_tokens: int, *, priority: int = 0, name: str | None = None, text: int | None = None
    ) -> Sequence:
        """A sequence that arrives now. Without ``text`` it has one of its own. ``name``: its adapter's."""
        number = next(self._numbers)
        text = 100 + number if text is None else text
        prompt = tuple(token(text, position) for position in range(num_prompt))
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        request = Request(f"r{number}", prompt, sampling, float(number), adapter(name), priority)
        sequence = Sequence(request, number, MAX_LENGTH, SamplingState(sampling), list(prompt))
        self._texts[sequence] = text, PrefixKeys(self.limits.page_tokens, repr(request.adapter).encode())
        if request.adapter is not None:
            self._ready_at.setdefault(request.adapter, self.iteration + self._load_iterations)
        self.waiting.add(sequence)
        return sequence

    def plan(self) -> BatchPlan:
        return plan_batch(self.running, self.waiting, self.pool, self.limits, self._ready, self._match, self.put_off)

    def iterate(self) -> BatchPlan:
        """One iteration, with everything checked that holds for every plan."""
        plan = self.plan()
        self._check(plan)
        self._apply(plan)
        self._launch(plan)
        while len(self._flights) > (1 if self._overlap and (plan.decodes or plan.chunks) else 0):
            self._collect()
        self.pool.check_integrity()
        assert self.pool.owners() == {sequence.number for sequence in self.running}
        self.iteration += 1
        return plan

    def run(self, max_iterations: int = 2000) -> None:
        """Iterate until nothing is live."""
        for _ in range(max_iterations):
            if not self.has_work:
                assert self.pool.num_used == 0
                return
            self.iterate()
        raise AssertionError(f"not finished after {max_iterations} iterations")

    def _ready(self, ref: AdapterRef) -> bool:
        return self.iteration >= self._ready_at[ref]

    def _match(self, sequence: Sequence) -> tuple[int, ...]:
        count = (len(sequence.tokens) - 1) // self.limits.page_tokens
        return self.pool.match(self._texts[sequence][1].keys(sequence.tokens, count))

    def _check(self, plan: BatchPlan) -> None:
        limits, shape = self.limits, plan.shape
        preempted, decodes = set(plan.preempted), set(plan.decodes)
        admitted = [admission.sequence for admission in plan.admitted]
        alive = [*(sequence for sequence in self.running if sequence not in preempted), *admitted]
        assert shape.num_decode == len(plan.decodes)
        assert shape.prefill_tokens == sum(count for _, count in plan.chunks)
        assert shape.num_decode + shape.prefill_tokens <= limits.max_num_batched_tokens
        assert len(alive) <= limits.max_num_seqs
        assert len({sequence.request.adapter for sequence in alive} - {None}) <= limits.max_loras
        assert preempted <= set(self.running)
        assert decodes.isdisjoint(preempted)
        assert all(count > 0 and sequence in alive for sequence, count in plan.chunks)
        assert {sequence for sequence, _ in plan.chunks} >= set(admitted), "admitted and given nothing"
        some_are_spent = any(sequence.is_spent for sequence in self.running)
        for sequence in self.running:
            if sequence.is_spent:
                assert sequence not in preempted
                assert sequence not in decodes
            elif sequence.is_decoding:
                assert sequence in decodes or sequence in preempted or some_are_spent
        waits_for_adapter = any(
            sequence.request.adapter is not None and not self._ready(sequence.request.adapter)
            for sequence in self.waiting
        )
        if self.has_work and not shape.num_decode and not shape.prefill_tokens:
            assert self._flights or waits_for_adapter, "live sequences, and nothing to run"

    def _apply(self, plan: BatchPlan) -> None:
        for admission in plan.admitted:
            self.pool.attach(admission.sequence.number, admission.cached_pages)
        for sequence in plan.preempted:
            self.pool.free(sequence.number)
            sequence.num_computed = 0
            self.running.remove(sequence)
            self.waiting.add(sequence)
        for admission in plan.admitted:
            sequence, num_cached = admission.sequence, len(admission.cached_pages)
            self.pool.allocate(sequence.number, self.limits.num_pages(len(sequence.tokens)) - num_cached)
            sequence.num_computed = num_cached * self.limits.page_tokens
            self.waiting.remove(sequence)
            self.running.add(sequence)
            self.num_cached_pages += num_cached
        for sequence in plan.decodes:
            if sequence.num_computed == self.pool.count(sequence.number) * self.limits.page_tokens:
                self.pool.allocate(sequence.number, 1)
        self.num_preemptions += len(plan.preempted)
        assert plan.shape.context_tokens == sum(len(sequence.tokens) for sequence in plan.decodes)
        assert plan.shape.prefill_context_tokens == sum(s.num_computed + count for s, count in plan.chunks)
        attended = [range(s.num_computed + 1, s.num_computed + count + 1) for s, count in plan.chunks]
        assert plan.shape.prefill_pairs == sum(map(sum, attended))
        assert plan.num_ending == sum(s.num_computed + count == len(s.tokens) for s, count in plan.chunks)

    def _launch(self, plan: BatchPlan) -> None:
        flight = []
        for sequence, count in (*((sequence, 1) for sequence in plan.decodes), *plan.chunks):
            sequence.num_computed += count
            flight.append(Entry(sequence, sequence.num_computed, sequence.num_left == 0))
            assert self.limits.num_pages(sequence.num_computed) <= self.pool.count(sequence.number)
            if sequence.num_left == 0:
                sequence.tokens.append(PENDING)
                sequence.num_pending += 1
        if flight:
            self._flights.append(flight)

    def _collect(self) -> None:
        for entry in self._flights.popleft():
            sequence = entry.sequence
            text, prefix = self._texts[sequence]
            num_full = min(entry.end, sequence.num_computed) // self.limits.page_tokens
            for index, key in enumerate(prefix.keys(sequence.tokens, num_full)):
                self.pool.register(sequence.number, index, key)
            if entry.samples and sequence.resolve(entry.end, token(text, entry.end), float(self.iteration)):
                (self.running if sequence in self.running else self.waiting).remove(sequence)
                self.pool.free(sequence.number)
                self.finished.append(sequence)
