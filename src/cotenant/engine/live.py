"""The live sequences: who waits and who runs, and the seats, pages and adapters that those who run have."""

from __future__ import annotations

import logging
from collections.abc import Callable
from operator import attrgetter

from cotenant.core.plan import BatchShape, RequestView
from cotenant.core.request import AdapterRef
from cotenant.engine.adapter_desk import AdapterDesk
from cotenant.engine.batcher import Admission, BatchPlan
from cotenant.engine.block_table import BlockTables
from cotenant.engine.integrity import check_queues
from cotenant.engine.kv_cache import KvCache, Resized
from cotenant.engine.prefix import PrefixKeys, salted
from cotenant.engine.queue import SequenceQueue
from cotenant.engine.sampler import Sampler
from cotenant.engine.sequence import Sequence

logger = logging.getLogger(__name__)

_KEYS_AT_ONCE = 32  # are made of a waiting prompt while its pages are looked up


class LiveSequences:
    """From ``add`` to ``remove`` a sequence is in one of the two queues: without a seat, a page or an adapter in
    ``waiting``, with them in ``running``. Only this class moves it from one to the other.

    ``clock`` is the one that ``Request.arrival_s`` is on.
    """

    def __init__(
        self,
        cache: KvCache,
        tables: BlockTables,
        sampler: Sampler,
        adapters: AdapterDesk,
        clock: Callable[[], float],
        *,
        enable_prefix_caching: bool,
    ) -> None:
        self.running = SequenceQueue()
        self.waiting = SequenceQueue()
        self.num_preemptions = 0
        self.num_queried_tokens = 0  # of prompts that were looked up in the cache as they were admitted
        self.num_hit_tokens = 0  # of those, found in the cache
        self._by_id: dict[str, Sequence] = {}
        self._cache = cache
        self._tables = tables
        self._sampler = sampler
        self._adapters = adapters
        self._clock = clock
        self._prefix_caching = enable_prefix_caching

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, request_id: str) -> Sequence | None:
        """The live sequence of this request."""
        return self._by_id.get(request_id)

    def views(self) -> tuple[RequestView, ...]:
        """All live requests in the order in which they are served."""
        if not len(self.waiting):  # as it is most often
            return tuple([sequence.view() for sequence in self.running])
        order = sorted([*self.running, *self.waiting], key=attrgetter("key"))  # which merges what is in order
        return tuple([self._waiting_view(each) if each.seat is None else each.view() for each in order])

    def _waiting_view(self, sequence: Sequence) -> RequestView:
        adapter = sequence.adapter_ref
        if adapter is not None and not self._adapters.cache.is_ready(adapter):
            return sequence.view(waits_for_adapter=True)
        return sequence.view(self._num_matched(sequence) * self._tables.page_tokens)

    def decodes(self) -> BatchShape:
        """The running sequences that decode next: what a batch has of them unless pages run out."""
        decodes = [sequence for sequence in self.running if sequence.is_decoding and not sequence.is_spent]
        adapters = {sequence.adapter_ref for sequence in decodes} if self._adapters.is_used else set()
        context_tokens = sum([len(sequence.tokens) for sequence in decodes])
        return BatchShape(len(decodes), context_tokens, num_adapters=len(adapters - {None}))

    def adapters_in_use(self) -> set[AdapterRef]:
        """Those of running sequences."""
        if not self._adapters.is_used:
            return set()
        return {sequence.adapter_ref for sequence in self.running if sequence.adapter_ref is not None}

    # Coming and going.

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence whose request's id is not in use."""
        self._by_id[sequence.request.request_id] = sequence
        self.waiting.add(sequence)

    def apply(self, plan: BatchPlan) -> None:
        """Preempt and admit as planned, and give decodes the pages that they cross into."""
        pool = self._cache.pool
        # First of all: nobody's new pages may displace what is matched, nor may a sequence that is broken and preempted
        # take its keys off pages that another is to share. They were found finite before they had keys.
        for admission in plan.admitted:
            pool.attach(admission.sequence.number, admission.cached_pages)
        for sequence in plan.preempted:
            self.preempt(sequence)
        for admission in plan.admitted:
            self._admit(admission)
        for sequence in plan.decodes:
            if sequence.num_computed == pool.count(sequence.number) * self._tables.page_tokens:
                assert sequence.seat is not None
                self._tables.extend(sequence.seat, pool.allocate(sequence.number, 1))

    def _admit(self, admission: Admission) -> None:
        sequence, request, pool = admission.sequence, admission.sequence.request, self._cache.pool
        page_tokens = self._tables.page_tokens
        matched = sequence.prefix
        self._renew_keys(sequence)
        assert not admission.cached_pages or sequence.prefix is matched, "pages of other weights than it runs on"
        if sequence.adapter_ref is not None:
            sequence.adapter = self._adapters.cache.acquire(sequence.adapter_ref, self.adapters_in_use())
            self._hold(sequence)
        num_cached = len(admission.cached_pages)
        pool.allocate(sequence.number, -(-len(sequence.tokens) // page_tokens) - num_cached)
        sequence.seat = self._tables.open(pool.pages(sequence.number))
        sequence.num_computed = num_cached * page_tokens
        sequence.num_registered = num_cached
        self._sampler.open(sequence.seat, sequence.sampling_state, sequence.num_prompt, sequence.tokens)
        if not sequence.was_admitted:  # one that was preempted finds its own pages again, if anything
            sequence.was_admitted = True
            if sequence.prefix is not None:
                self.num_queried_tokens += len(sequence.tokens)
                self.num_hit_tokens += sequence.num_computed
            sequence.queue_s = max(0.0, self._clock() - request.arrival_s)
            sequence.num_cached = sequence.num_computed
        self.waiting.remove(sequence)
        self.running.add(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Back to the queue; its tokens stay, what the KV cache held of them is computed again later."""
        logger.info("request %s gives its pages up and will be recomputed", sequence.request.request_id)
        self.running.remove(sequence)
        self._vacate(sequence)
        sequence.num_computed = 0
        sequence.adapter = None
        self.waiting.add(sequence)
        self.num_preemptions += 1

    def remove(self, sequence: Sequence) -> None:
        """The sequence is no longer live."""
        del self._by_id[sequence.request.request_id]
        sequence.has_left = True
        if sequence.seat is None:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._vacate(sequence)
        if sequence.hold is not None:
            self._adapters.cache.let_go(sequence.hold)
        if sequence.request.adapter is not None:
            self._adapters.want_no_more(sequence.request.adapter)

    def hold_waiting(self, is_meant: Callable[[AdapterRef], bool]) -> None:
        """Let those who wait for the adapters that are meant have them as they are, or are being read."""
        for sequence in self.waiting:
            if sequence.adapter_ref is not None and is_meant(sequence.adapter_ref):
                self._hold(sequence)

    def _hold(self, sequence: Sequence) -> None:
        if sequence.hold is None and sequence.adapter_ref is not None:
            sequence.hold = self._adapters.cache.hold(sequence.adapter_ref)

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.seat is not None
        if sequence.is_broken:
            self._clean_pages(sequence)
        self._tables.close(sequence.seat)
        sequence.seat = None
        self._cache.pool.free(sequence.number)

    def _clean_pages(self, sequence: Sequence) -> None:
        """Nobody may use what the sequence has computed, and masked rows are multiplied by 0: a NaN that stayed in its
        pages would carry on into their next owner."""
        pool = self._cache.pool
        pool.forget(sequence.number)
        pages = [page for page in pool.pages(sequence.number) if pool.num_users(page) == 1]
        self._cache.tensor[pages] = 0

    def resize_a_little(self, max_bytes: int) -> bool:
        """Take the cache a part of the way to its target size (see ``KvCache.step``); those last in order make room.
        Whether it is there."""
        num_pages = self._cache.num_pages
        result = self._step_cache(max_bytes)
        if result.pages_short:
            victims, num_free = list(self.running), self._cache.pool.num_free
            while victims and self._cache.pool.num_free < num_free + result.pages_short:
                self.preempt(victims.pop())
            # Before anybody is admitted: they would have the same pages again, and lose them again, at each step.
            num_given = num_pages - self._cache.num_pages
            result = self._step_cache(max_bytes - num_given * self._cache.page_bytes)
        return result.done

    def _step_cache(self, max_bytes: int) -> Resized:
        result = self._cache.step(max_bytes)
        self._tables.move(result.moves)
        return result

    # Pages that others may use.

    def match(self, sequence: Sequence) -> tuple[int, ...]:
        """The cached pages that hold the beginning of a waiting sequence; its last token is always computed. Its
        adapter is ready."""
        self._renew_keys(sequence)
        if sequence.prefix is None:
            return ()
        return self._cache.pool.match(sequence.prefix.keys(sequence.tokens, self._num_matchable(sequence)))

    def _num_matched(self, sequence: Sequence) -> int:
        """About how many pages ``match`` returns. It is asked in every iteration, so what was found counts until the
        last of it is gone, though one before it may go first; and no more keys are made than it takes."""
        self._renew_keys(sequence)
        if sequence.prefix is None:
            return 0
        holds, most = self._cache.pool.holds, self._num_matchable(sequence)
        found = min(sequence.num_matched, most)
        keys = sequence.prefix.known(sequence.tokens, found)
        while found and not holds(keys[found - 1]):
            found -= 1
        while found < most:
            if found == len(keys):
                keys = sequence.prefix.known(sequence.tokens, min(most, found + _KEYS_AT_ONCE))
            if not holds(keys[found]):
                break
            found += 1
        sequence.num_matched = found
        return found

    def _num_matchable(self, sequence: Sequence) -> int:
        """Pages of a waiting sequence that may be cached."""
        return (len(sequence.tokens) - sequence.num_pending - 1) // self._tables.page_tokens

    def register_pages(self, sequence: Sequence, num_tokens: int) -> None:
        """The sequence's first ``num_tokens`` tokens are computed: others may use the pages that they fill."""
        if sequence.prefix is None or sequence.seat is None:
            return
        # No more than is computed: it may have been preempted and admitted again since the batch was launched.
        num_full = min(num_tokens, sequence.num_computed) // self._tables.page_tokens
        if num_full > sequence.num_registered:
            keys = sequence.prefix.keys(sequence.tokens, num_full)
            for index in range(sequence.num_registered, num_full):
                self._cache.pool.register(sequence.number, index, keys[index])
            sequence.num_registered = num_full

    def _renew_keys(self, sequence: Sequence) -> None:
        """Name a waiting sequence's pages after the weights that it would get now: until it is admitted first, they may
        change. Then it keeps its weights and its keys."""
        request = sequence.request
        # Scoring a prompt takes the hidden states of all its tokens, so none may come from the cache.
        is_scored = request.sampling.prompt_logprobs is not None
        if not self._prefix_caching or is_scored or not request.uses_prefix_cache:
            return
        root = salted(self._adapters.prefix_root(sequence.adapter_ref), request.cache_salt)
        if sequence.prefix is None or sequence.prefix.root != root:
            sequence.prefix = PrefixKeys(self._tables.page_tokens, root)

    def check_integrity(self) -> None:
        """Raise AssertionError if queues, adapters, pages and block tables disagree. It takes no longer the more pages
        there are: only that nobody's are not used is known of them."""
        assert len(self._by_id) == len(self.running) + len(self.waiting), "a sequence is lost, or in two queues"
        assert {*self.running, *self.waiting} == set(self._by_id.values())
        check_queues(self.running, self.waiting, self._cache.pool, self._tables)
        self._adapters.cache.check_integrity(self.adapters_in_use())
