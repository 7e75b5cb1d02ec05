"""Measuring in idle time what the predictor lacks: decode steps alone, on all SMs and in each partition of them.

Harli's first stage (section 5.2) is measured before a server starts. Here it is measured while nobody asks and nothing
trains, with requests of the server's own; the first message that brings work ends them. Steps beside training are left
to jobs: they have every latency within a few steps.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Iterator

from cotenant.core.plan import IterationRecord, Mode, Partition, Plan
from cotenant.core.request import Request, SamplingParams
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor

logger = logging.getLogger(__name__)

QUIET_S = 1.0  # how long there has been nothing to do before the next shape is measured
_CONTEXTS = (256, 1024, 4096)
_NEAR = 1.25  # contexts of up to so many times as many tokens tell the same
_STEPS = 6  # of each shape, on all SMs and in each partition
_MOST_PROMPT_TOKENS = 65_536  # of a shape, all prompts together: about 2 s of an H200
# A request that comes waits for the batch in flight at most, so none of them has more tokens than this.
_CHUNK_TOKENS = 512


class SelfProfile:
    """``begin`` starts to measure the next shape that lacks, whose batches then are in the engine; while ``is_active``,
    what runs is what ``plan`` says, and ``note`` has to hear of every iteration. ``stop`` ends it at any moment.

    The prompts are random and leave nothing in the prefix cache, nor do they take pages from it. A shape is measured
    once in a server's life, whatever comes of it.
    """

    def __init__(
        self, engine: OnlineEngine, predictor: LatencyPredictor, partitions: tuple[Partition, ...], vocab_size: int
    ) -> None:
        self._engine = engine
        self._predictor = predictor
        self._ways: tuple[Partition | None, ...] = (None, *partitions)
        self._vocab_size = vocab_size
        self._shapes = list(self._all_shapes())  # that may lack
        self._random = random.Random(0)
        self._shape = (0, 0)  # what is being measured: sequences, and tokens of each
        self._requests: set[str] = set()
        self._counts: Counter[Partition | None] = Counter()
        self._num_measured = 0

    @property
    def is_active(self) -> bool:
        return bool(self._requests)

    def begin(self) -> bool:
        """Queue requests for the next shape that was never measured and that there is room for now; False if there is
        none."""
        assert not self.is_active
        self._shapes = [shape for shape in self._shapes if not self._is_known(*shape)]
        shape = next((shape for shape in self._shapes if self._has_room(*shape)), None)
        if shape is None:
            return False
        self._shape, (size, context) = shape, shape
        self._counts.clear()
        self._engine.limit_tokens(size + self._chunk_tokens(size))
        sampling = SamplingParams(max_tokens=self._most_new(size, context), temperature=0.0, ignore_eos=True)
        for index in range(size):
            prompt = tuple(self._random.choices(range(self._vocab_size), k=context))
            name = f"self-profile-{size}-{context}-{index}"
            self._engine.add(Request(name, prompt, sampling, time.time(), uses_prefix_cache=False))
            self._requests.add(name)
        return True

    def plan(self) -> Plan:
        """The next iteration: the way that lacks steps. Batches with prompts are counted for none."""
        way = next((way for way in self._ways if self._counts[way] < _STEPS), None)
        return Plan(partition=way)

    def note(self, record: IterationRecord) -> None:
        """An iteration has run; the last one that this shape needs ends it."""
        batch = record.batch
        if batch.num_decode == len(self._requests) and not batch.prefill_tokens and record.mode is Mode.NONE:
            self._counts[record.partition] += 1
        if all(self._counts[way] >= _STEPS for way in self._ways) or not self._engine.has_work:
            self._shapes.remove(self._shape)
            self._num_measured += 1
            self.stop()
            if not self._shapes:
                logger.info("decode steps of %d shapes were measured in idle time", self._num_measured)

    def stop(self) -> None:
        """Forget the requests; what was measured stays."""
        if self.is_active:
            self._engine.abort(self._requests)
            self._requests.clear()
            self._engine.limit_tokens(self._engine.max_num_batched_tokens)

    def _all_shapes(self) -> Iterator[tuple[int, int]]:
        """Sequences and the tokens of each, small ones first."""
        powers = [1 << power for power in range(self._engine.max_num_seqs.bit_length())]
        sizes = [size for size in powers if self._chunk_tokens(size) > 0]
        for context in _CONTEXTS:
            for size in sizes:
                longest = context + self._most_new(size, context)
                if size * context <= _MOST_PROMPT_TOKENS and longest <= self._engine.max_model_len:
                    yield size, context

    def _chunk_tokens(self, size: int) -> int:
        """Of prompts in a batch, beside all decodes that it may have."""
        return min(_CHUNK_TOKENS, self._engine.max_num_batched_tokens - size)

    def _most_new(self, size: int, context: int) -> int:
        """Tokens that the first sequence may have when the last one has been measured."""
        return 2 * _STEPS * len(self._ways) + -(-size * context // self._chunk_tokens(size))

    def _is_known(self, size: int, context: int) -> bool:
        least = size * context
        return all(self._predictor.has_measured_decode(size, least, int(_NEAR * least), way) for way in self._ways)

    def _has_room(self, size: int, context: int) -> bool:
        longest = context + self._most_new(size, context)
        return self._engine.has_blank_pages(size, longest)
