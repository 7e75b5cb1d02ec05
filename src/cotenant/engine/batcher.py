"""Which sequences run in the next iteration. Pure: reads the queues and the pool, changes neither.

Rules, all in the order of priority and then arrival, but that prompts which are put off come behind the others of their
class (``scheduler/turns.py`` says whose, and for how long at most):

- Every decoding sequence gets its token, before any prefill; prompt chunks fill what is left of the token budget.
- A sequence of which all is on its way (``is_spent``) gets nothing and keeps what it has: it leaves soon.
- A waiting sequence is admitted whole: it gets the pages of all its tokens at once, and leaves a free page for each
  running one, so that admitting it does not cause the next preemption. Pages that are cached for it are shared or taken
  as they are, and its prefill starts after them.
- When a running sequence needs a page and none is free, the last in order is preempted (it may be the one that asks).
  A waiting sequence may preempt too, for pages or for an adapter slot, but only sequences of a lower class than its.
- Nobody but those it is put off for overtakes a sequence that waits for pages, so a long prompt is not passed for ever
  by short ones. Nor one that was preempted while its newest token was on the way: it can be admitted when that is
  known. A sequence that waits for an adapter slot is overtaken by sequences of the base model only: they cannot keep
  its slot taken. One whose adapter is still being read is overtaken by all others.

Why nobody starves: take the first in order of all that live. It stays first, because new arrivals of its class or a
lower one come after it. If it is put off, that ends, and from then on:

- It runs: its decode takes pages from all others if need be; its prefill gets a token at least, since the budget is
  larger than the number of decodes. It is never preempted, for victims come from the end of the order.
  ``OnlineEngine.add`` refused it if the whole pool would not be enough.
- It waits for a seat, budget or pages: nobody else is admitted. Of those who run, the first in order gets on as above,
  so one after the other they end, or are preempted, until there is room.
- It waits for an adapter slot: no other adapter gets one. Those of a lower class who hold one lose it. Those of its own
  class come before everybody who arrived later, so by the same argument each of them ends.
- It waits for its adapter to be read: that ends, and ``ready`` stays true until the sequence is admitted.

When it has ended the next one is first. So a sequence is done after a number of iterations that depends on those before
it in order and those who ran when it came, and not on how many arrive later. This bound holds within a class and
towards lower ones: while higher classes arrive without a pause and take all pages, seats or budget, a lower class waits
for as long as they do. That is what a priority means here.

A plan is empty only when nothing is live, or when all that could run waits for a token on its way or for its adapter,
or comes behind one that does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from cotenant.core.plan import BatchShape, causal_pairs
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
class Admission:
    """A waiting sequence that starts to run, with its first pages taken from the cache."""

    sequence: Sequence
    cached_pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The next batch, and what must happen before it. ``chunks``: (sequence, how many of its tokens); ``num_ending``
    of them are all that was left.

    Apply in this order: attach the cached pages of all admissions, which keeps them from being evicted; preempt all;
    allocate the rest of each admitted sequence's pages; then a page for each decode that crosses into a new one.
    """

    decodes: tuple[Sequence, ...]
    chunks: tuple[tuple[Sequence, int], ...]
    preempted: tuple[Sequence, ...]
    admitted: tuple[Admission, ...]
    shape: BatchShape
    num_ending: int


def _always(_: AdapterRef) -> bool:
    return True


def _nothing(_: Sequence) -> tuple[int, ...]:
    return ()


def plan_batch(
    running: SequenceQueue,
    waiting: SequenceQueue,
    pool: PagePool,
    limits: Limits,
    ready: Callable[[AdapterRef], bool] = _always,
    match: Callable[[Sequence], tuple[int, ...]] = _nothing,
    put_off: Container[str] = frozenset(),
) -> BatchPlan:
    """Decide the next iteration by the rules above.

    ``ready``: whether an adapter's weights are at hand. ``match``: the pages that are cached for a waiting sequence's
    first tokens, fewer than all of its tokens. ``put_off``: ids of requests whose prompts come behind the others.
    """
    return _Planner(running, pool, limits, ready, match, put_off).plan(running, waiting)


class _FreePages:
    """How many pages will be free once the plan so far has been applied."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self.num_free = pool.num_free
        self._attached: set[int] = set()
        self._num_released: dict[int, int] = {}  # by page: how many of its users are preempted

    def copy(self) -> _FreePages:
        copied = _FreePages(self._pool)
        copied.num_free = self.num_free
        copied._attached = set(self._attached)
        copied._num_released = dict(self._num_released)
        return copied

    def attach(self, pages: Iterable[int]) -> None:
        """Pages of an admission. Those that nobody else will use by then are no longer free."""
        for page in pages:
            if page not in self._attached:
                self._attached.add(page)
                self.num_free -= self._num_released.get(page, 0) == self._pool.num_users(page)

    def release(self, sequence: Sequence) -> None:
        """A preempted sequence lets go of its pages. Those that nobody else uses become free."""
        for page in self._pool.pages(sequence.number):
            num_released = self._num_released.get(page, 0) + 1
            self._num_released[page] = num_released
            self.num_free += num_released == self._pool.num_users(page) and page not in self._attached


class _Planner:
    """One plan in the making.

    Alive are the running sequences that are not preempted in this plan, and the admitted ones. Nobody is admitted after
    a preemption: a victim's pages or slot are for the one who took them, and nobody may overtake it with the rest.
    """

    def __init__(
        self,
        running: SequenceQueue,
        pool: PagePool,
        limits: Limits,
        ready: Callable[[AdapterRef], bool],
        match: Callable[[Sequence], tuple[int, ...]],
        put_off: Container[str],
    ) -> None:
        self._put_off = put_off
        self._behind: list[tuple[Sequence, bool]] = []  # those put off of the class in hand, and whether they wait
        self._pool = pool
        self._limits = limits
        self._ready = ready
        self._match = match
        self._pages = _FreePages(pool)
        self._num_alive = len(running)
        self._spent: set[Sequence] = set()
        self._victims: list[Sequence] = []  # those that can still be preempted, the next one last
        self._adapters: set[AdapterRef] = set()  # of those alive
        self._adapter_wanted = False
        self._admitting = True
        self._decodes: list[Sequence] = []
        self._chunks: list[tuple[Sequence, int]] = []
        self._prefill_context = self._prefill_pairs = 0
        self._num_ending = 0
        self._preempted: dict[Sequence, None] = {}
        self._admitted: list[Admission] = []
        num_decoding = 0
        for sequence in running:
            if sequence.is_spent:
                self._spent.add(sequence)
            else:
                self._victims.append(sequence)
                num_decoding += sequence.is_decoding
            if sequence.request.adapter is not None and (ref := sequence.adapter_ref) is not None:
                self._adapters.add(ref)
        self._budget = limits.max_num_batched_tokens - num_decoding

    def plan(self, running: SequenceQueue, waiting: SequenceQueue) -> BatchPlan:
        queue = iter(waiting)
        head = next(queue, None)
        for sequence in running:
            while head is not None and self._admitting and head.key < sequence.key:
                self._in_turn(head, waits=True)
                head = next(queue, None)
            if self._behind:
                self._end_class_before(sequence)
            if (self._spent and sequence in self._spent) or (self._preempted and sequence in self._preempted):
                continue
            if sequence.is_decoding:
                self._consider_decode(sequence)
            else:
                self._in_turn(sequence, waits=False)
        while head is not None and self._admitting:
            self._in_turn(head, waits=True)
            head = next(queue, None)
        self._serve_behind()
        return BatchPlan(
            tuple(self._decodes),
            tuple(self._chunks),
            tuple(self._preempted),
            tuple(self._admitted),
            self._shape(),
            self._num_ending,
        )

    def _shape(self) -> BatchShape:
        num_adapters = 0
        if self._adapters:
            adapters = {sequence.adapter_ref for sequence in self._decodes}
            adapters.update(sequence.adapter_ref for sequence, _ in self._chunks)
            num_adapters = len(adapters - {None})
        return BatchShape(
            num_decode=len(self._decodes),
            context_tokens=sum([len(sequence.tokens) for sequence in self._decodes]),
            prefill_tokens=sum([count for _, count in self._chunks]),
            prefill_context_tokens=self._prefill_context,
            num_adapters=num_adapters,
            prefill_pairs=self._prefill_pairs,
        )

    # Prompts.

    def _in_turn(self, sequence: Sequence, *, waits: bool) -> None:
        """The next in order; ``waits``: it does not run yet."""
        self._end_class_before(sequence)
        if sequence.request.request_id in self._put_off:
            self._behind.append((sequence, waits))
        else:
            self._serve(sequence, waits=waits)

    def _end_class_before(self, sequence: Sequence) -> None:
        """Who is put off comes before all lower classes, their decodes too: it may take their pages."""
        if self._behind and sequence.request.priority > self._behind[0][0].request.priority:
            self._serve_behind()

    def _serve_behind(self) -> None:
        behind, self._behind = self._behind, []
        for sequence, waits in behind:
            self._serve(sequence, waits=waits)

    def _serve(self, sequence: Sequence, *, waits: bool) -> None:
        if not waits:  # nor preempted: victims are of a lower class, or come behind whoever takes their pages
            self._add_chunk(sequence, sequence.num_computed)
        elif self._admitting:
            self._consider_waiting(sequence)

    # Running sequences.

    def _consider_decode(self, sequence: Sequence) -> None:
        num_computed, page_tokens = sequence.num_computed, self._limits.page_tokens
        if num_computed % page_tokens == 0 and num_computed == self._pool.count(sequence.number) * page_tokens:
            if not self._find_page(sequence):
                return
            self._pages.num_free -= 1
        self._decodes.append(sequence)

    def _find_page(self, sequence: Sequence) -> bool:
        """Whether a page is free, after preempting from the end of the order, where nothing has been granted yet."""
        while self._pages.num_free == 0:
            if self._victims[-1] is sequence and self._spent:
                self._admitting = False  # it sits out: pages come back without its own when the spent ones leave
                return False
            victim = self._victims[-1]
            self._pages.release(victim)
            self._preempt(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, victim: Sequence) -> None:
        self._victims.remove(victim)
        self._preempted[victim] = None
        self._num_alive -= 1
        self._admitting = False

    def _add_chunk(self, sequence: Sequence, num_computed: int) -> None:
        num_left = len(sequence.tokens) - num_computed
        count = min(num_left, self._budget)
        if count > 0:
            self._chunks.append((sequence, count))
            self._num_ending += count == num_left
            self._budget -= count
            self._prefill_context += num_computed + count
            self._prefill_pairs += causal_pairs(count, num_computed)

    # Waiting sequences.

    def _consider_waiting(self, sequence: Sequence) -> None:
        if self._budget == 0 or self._num_alive >= self._limits.max_num_seqs or sequence.num_pending:
            self._admitting = False
            return
        lower = self._lower(sequence)
        holders: list[Sequence] = []
        adapter = sequence.adapter_ref
        if adapter is not None:
            if self._adapter_wanted or not self._ready(adapter):
                return
            if adapter not in self._adapters and len(self._adapters) >= self._limits.max_loras:
                holders = self._slot_holders(lower)
                if not holders:
                    self._adapter_wanted = True
                    return
        cached = self._make_room(sequence, holders, lower)
        if cached is None:
            self._admitting = False
            return
        self._num_alive += 1
        if adapter is not None:
            self._adapters.add(adapter)
        self._admitted.append(Admission(sequence, cached))
        self._add_chunk(sequence, len(cached) * self._limits.page_tokens)

    def _lower(self, sequence: Sequence) -> list[Sequence]:
        """Sequences of a lower class that can be preempted, in order. None of them has been granted anything yet."""
        priority = sequence.request.priority
        if not self._victims or self._victims[-1].request.priority <= priority:
            return []
        return self._victims[bisect_right(self._victims, priority, key=lambda victim: victim.request.priority) :]

    def _slot_holders(self, lower: list[Sequence]) -> list[Sequence]:
        """All users of an adapter that only ``lower`` ones use: the adapter whose first user is the last in order."""
        if not lower:
            return []
        kept = {sequence.adapter_ref for sequence in self._victims[: -len(lower)]}
        kept.update(sequence.adapter_ref for sequence in self._spent)
        kept.update(admission.sequence.adapter_ref for admission in self._admitted)
        users: dict[AdapterRef, list[Sequence]] = {}
        for sequence in lower:
            adapter = sequence.adapter_ref
            if adapter is not None and adapter not in kept:
                users.setdefault(adapter, []).append(sequence)
        return max(users.values(), key=lambda sequences: sequences[0].key, default=[])

    def _make_room(self, sequence: Sequence, holders: list[Sequence], lower: list[Sequence]) -> tuple[int, ...] | None:
        """Find pages for all tokens, and the margin, preempting ``holders`` and as many of ``lower`` as it takes.

        Returns those that are cached already. None, with nothing changed, if there is not enough.
        """
        gain = sum([self._pool.count(victim.number) for victim in lower])  # at most: some may be shared
        if self._pages.num_free + gain <= self._num_alive - len(lower):
            return None  # while it waits this spares the rest: one page at least is always new
        cached = self._match(sequence)
        assert len(cached) * self._limits.page_tokens < len(sequence.tokens), "no token is left to compute"
        pages = self._pages.copy()
        pages.attach(cached)
        pages.num_free -= self._limits.num_pages(len(sequence.tokens)) - len(cached)
        chosen = list(holders)
        for victim in chosen:
            pages.release(victim)
        for victim in reversed(lower):
            if pages.num_free >= self._num_alive - len(chosen):
                break
            if victim not in holders:
                pages.release(victim)
                chosen.append(victim)
        if pages.num_free < self._num_alive - len(chosen):
            return None
        self._pages = pages
        for victim in chosen:
            self._preempt(victim)
        return cached
