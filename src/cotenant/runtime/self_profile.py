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
from typing import NamedTuple

from cotenant.core.plan import IterationRecord, Mode, Partition, Plan
from cotenant.core.request import Request, SamplingParams
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor

logger = logging.getLogger(__name__)

# How long there has been nothing to do before a shape is measured. Twice as long after each one that a message cut off,
# and as at first again after one that was measured.
_QUIET_S, _MOST_QUIET_S = 1.0, 64.0
_CONTEXTS = (256, 1024, 4096)
_STEPS, _MOST_STEPS = 6, 12  # of each shape, on all SMs and in each partition: more where they have not told enough
_MOST_PROMPT_TOKENS = 65_536  # of a shape, all prompts together: about 2 s of an H200
# A request that comes waits for the batches in flight, two at most, so they have no more tokens than this where the
# sequences leave room in it.
_BATCH_TOKENS, _LEAST_CHUNK = 512, 64


class _Shape(NamedTuple):
    """``size`` sequences of ``context`` tokens each, and a few more as they are measured."""

    size: int
    context: int


class SelfProfile:
    """``begin`` starts to measure the next shape that lacks, whose batches then are in the engine; while ``is_active``,
    what runs is what ``plan`` says. ``note`` has to hear of every iteration. ``stop`` ends it at any moment.

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
        self._lacking = list(self._all_shapes())
        self._random = random.Random(0)
        self._shape = _Shape(0, 0)  # what is being measured
        self._requests: set[str] = set()
        self._counts: Counter[Partition | None] = Counter()
        self._in_flight = False  # a batch of its own, perhaps, when it has ended
        self._num_measured = 0
        self.quiet_s = _QUIET_S

    @property
    def is_active(self) -> bool:
        return bool(self._requests)

    def begin(self) -> bool:
        """Queue requests for the next shape that was never measured and that there is room for now; False if there is
        none."""
        assert not self.is_active
        self._lacking = [shape for shape in self._lacking if not all(self._is_known(shape, way) for way in self._ways)]
        shape = next((shape for shape in self._lacking if self._has_room(shape)), None)
        if shape is None:
            return False
        self._shape = shape
        self._counts.clear()
        self._engine.limit_tokens(shape.size + self._chunk_tokens(shape.size))
        sampling = SamplingParams(max_tokens=self._most_new(shape), temperature=0.0, ignore_eos=True)
        for index in range(shape.size):
            prompt = tuple(self._random.choices(range(self._vocab_size), k=shape.context))
            name = f"self-profile-{shape.size}-{shape.context}-{index}"
            self._engine.add(Request(name, prompt, sampling, time.monotonic(), uses_prefix_cache=False))
            self._requests.add(name)
        return True

    def forget_partitions(self) -> None:
        """They are not used. Called while it is not active."""
        self._ways = (None,)

    def plan(self) -> Plan:
        """The next iteration: the way that lacks steps. Batches with prompts are counted for none."""
        return Plan(partition=next((way for way in self._ways if not self._is_done(way)), None))

    def note(self, record: IterationRecord) -> bool:
        """An iteration has run; the last one that a shape needs ends it. Whether it was the profile's own."""
        was_active, is_late = self.is_active, self._in_flight and not record.batch.empty
        if was_active:
            self._count(record)
        is_own = was_active or is_late
        self._in_flight = self._engine.num_in_flight > 0 and (was_active or (self._in_flight and not is_late))
        return is_own

    def _count(self, record: IterationRecord) -> None:
        batch = record.batch
        if batch.num_decode == self._shape.size and not batch.prefill_tokens and record.mode is Mode.NONE:
            self._counts[record.partition] += 1
        stands_still = batch.empty and self._engine.num_in_flight == 0
        if stands_still or not self._engine.has_work or all(self._is_done(way) for way in self._ways):
            self._num_measured += all(self._is_known(self._shape, way) for way in self._ways)
            self._lacking.remove(self._shape)
            self._forget()
            self.quiet_s = _QUIET_S
            if not self._lacking:
                logger.info("decode steps of %d shapes were measured in idle time", self._num_measured)

    def stop(self) -> None:
        """There is work: forget the requests. What was measured stays; the shape goes to the end of the line."""
        if self.is_active:
            self._lacking.remove(self._shape)
            self._lacking.append(self._shape)
            self._forget()
            self.quiet_s = min(_MOST_QUIET_S, 2 * self.quiet_s)

    def _forget(self) -> None:
        self._engine.abort(self._requests)
        self._requests.clear()
        self._engine.limit_tokens(self._engine.max_num_batched_tokens)

    def _all_shapes(self) -> Iterator[_Shape]:
        """Small ones first."""
        powers = [1 << power for power in range(self._engine.max_num_seqs.bit_length())]
        sizes = [size for size in powers if self._chunk_tokens(size) > 0]
        for context in _CONTEXTS:
            for shape in (_Shape(size, context) for size in sizes):
                is_small = shape.size * context <= _MOST_PROMPT_TOKENS
                if is_small and context + self._most_new(shape) <= self._engine.max_model_len:
                    yield shape

    def _chunk_tokens(self, size: int) -> int:
        """Of prompts in a batch, beside all decodes that it may have."""
        return min(max(_LEAST_CHUNK, _BATCH_TOKENS - size), self._engine.max_num_batched_tokens - size)

    def _most_new(self, shape: _Shape) -> int:
        """Tokens that the first sequence may have when the last one has been measured."""
        num_batches = -(-shape.size * shape.context // self._chunk_tokens(shape.size))
        return _MOST_STEPS * len(self._ways) + num_batches

    def _is_done(self, way: Partition | None) -> bool:
        count = self._counts[way]
        return count >= _MOST_STEPS or (count >= _STEPS and self._is_known(self._shape, way))

    def _is_known(self, shape: _Shape, way: Partition | None) -> bool:
        """Whether a step of any length that these sequences come to was measured."""
        longest = shape.context + self._most_new(shape)
        return self._predictor.has_measured_decode(shape.size, shape.size * shape.context, shape.size * longest, way)

    def _has_room(self, shape: _Shape) -> bool:
        return self._engine.has_blank_pages(shape.size, shape.context + self._most_new(shape))
