"""Which sequences run in the next iteration. Pure: reads the queues and the pool, changes neither.

Rules, all in the order of priority and then arrival:

- Every decoding sequence gets its token, before any prefill; prompt chunks fill what is left of the token budget.
- A waiting sequence is admitted whole: it gets the pages of all its tokens at once, and leaves a free page for each
  running one, so that admitting it does not cause the next preemption.
- When a running sequence needs a page and none is free, the last in order is preempted (it may be the one that asks).
  A waiting sequence may preempt too, but only sequences of a lower class than its own.
- Nobody overtakes a sequence that waits for pages, so a long prompt is not passed for ever by short ones. A sequence
  that waits for an adapter slot is overtaken by sequences of the base model only: they cannot keep its slot taken.

The first in order always gets on: it may take everything that the others hold, and ``OnlineEngine.add`` refused it if
that would not be enough. So a plan is empty only when nothing is live.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.plan import BatchShape
from cotenant.core.request import AdapterRef
from cotenant.engine.queue import SequenceQueue
from cotenant.engine.sequence import Sequence
from cotenant.memory.pages import PagePool


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a batch."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_loras: int
    page_tokens: int

    def num_pages(self, num_tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-num_tokens // self.page_tokens)


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The next batch, and what must happen before it. ``chunks``: (sequence, how many of its tokens).

    Apply in this order: preempt, admit (pages for all tokens), then a page for each decode that crosses into a new one.
    """

    decodes: tuple[Sequence, ...]
    chunks: tuple[tuple[Sequence, int], ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Sequence, ...]

    @property
    def shape(self) -> BatchShape:
        adapters = {sequence.request.adapter for sequence in self.decodes}
        adapters.update(sequence.request.adapter for sequence, _ in self.chunks)
        return BatchShape(
            num_decode=len(self.decodes),
            context_tokens=sum(len(sequence.tokens) for sequence in self.decodes),
            prefill_tokens=sum(count for _, count in self.chunks),
            prefill_context_tokens=sum(sequence.num_computed + count for sequence, count in self.chunks),
            num_adapters=len(adapters - {None}),
        )


def plan_batch(running: SequenceQueue, waiting: SequenceQueue, pool: PagePool, limits: Limits) -> BatchPlan:
    """Decide the next iteration by the rules above."""
    return _Planner(running, pool, limits).plan(running, waiting)


class _Planner:
    """One plan in the making. ``alive``: running sequences not preempted in this plan, plus the admitted ones."""

    def __init__(self, running: SequenceQueue, pool: PagePool, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        self._num_free = pool.num_free
        self._victims = list(running)  # those that can still be preempted, the next one last
        self._num_alive = len(running)
        self._budget = limits.max_num_batched_tokens - sum(sequence.is_decoding for sequence in running)
        self._adapters: set[AdapterRef] = {s.request.adapter for s in running if s.request.adapter is not None}
        self._adapter_wanted = False
        self._admitting = True
        self._decodes: list[Sequence] = []
        self._chunks: list[tuple[Sequence, int]] = []
        self._preempted: list[Sequence] = []
        self._admitted: list[Sequence] = []

    def plan(self, running: SequenceQueue, waiting: SequenceQueue) -> BatchPlan:
        queue = iter(waiting)
        head = next(queue, None)
        for sequence in running:
            while self._admitting and head is not None and head.key < sequence.key:
                self._consider_waiting(head)
                head = next(queue, None)
            if sequence.is_decoding:
                self._consider_decode(sequence)
            else:
                self._consider_chunk(sequence)
        while self._admitting and head is not None:
            self._consider_waiting(head)
            head = next(queue, None)
        return BatchPlan(tuple(self._decodes), tuple(self._chunks), tuple(self._preempted), tuple(self._admitted))

    def _preempt_last(self) -> Sequence:
        victim = self._victims.pop()
        self._preempted.append(victim)
        self._num_alive -= 1
        self._num_free += self._pool.count(victim.number)
        self._admitting = False  # nobody may overtake the victim with the pages it gave
        return victim

    def _consider_decode(self, sequence: Sequence) -> None:
        if sequence in self._preempted:
            return
        needs_page = sequence.num_computed == self._pool.count(sequence.number) * self._limits.page_tokens
        # Victims come from the end of the order, so what was granted before this sequence stays granted.
        while needs_page and self._num_free == 0:
            if self._preempt_last() is sequence:
                return
        self._num_free -= needs_page
        self._decodes.append(sequence)

    def _consider_chunk(self, sequence: Sequence) -> None:
        count = min(sequence.num_left, self._budget)
        if count > 0 and sequence not in self._preempted:
            self._chunks.append((sequence, count))
            self._budget -= count

    def _consider_waiting(self, sequence: Sequence) -> None:
        if self._budget == 0 or self._num_alive >= self._limits.max_num_seqs:
            self._admitting = False
            return
        if not self._adapter_fits(sequence.request.adapter):
            self._adapter_wanted = True
            return
        num_pages = self._limits.num_pages(len(sequence.tokens))
        if not self._find_pages(sequence, num_pages):
            self._admitting = False
            return
        self._num_free -= num_pages
        self._num_alive += 1
        if sequence.request.adapter is not None:
            self._adapters.add(sequence.request.adapter)
        self._admitted.append(sequence)
        self._consider_chunk(sequence)

    def _adapter_fits(self, adapter: AdapterRef | None) -> bool:
        if adapter is None:
            return True
        if self._adapter_wanted:
            return False
        return adapter in self._adapters or len(self._adapters) < self._limits.max_loras

    def _find_pages(self, sequence: Sequence, num_pages: int) -> bool:
        """Whether ``num_pages`` and the margin are free, after preempting sequences of a lower class if that helps."""
        lower = [victim for victim in self._victims if victim.request.priority > sequence.request.priority]
        obtainable = self._num_free + sum(self._pool.count(victim.number) for victim in lower)
        if obtainable < num_pages + self._num_alive - len(lower):
            return False
        while self._num_free < num_pages + self._num_alive:
            self._preempt_last()
        return True
