"""What batches on all SMs take: decode steps by their records, else by the models, else by the prior.

Those with prompts by the models first: hardly one comes again, so a record is of some that were only about like it, the
last of them long ago, while the model has just seen others.
"""

from __future__ import annotations

from collections.abc import Callable

from cotenant.core.plan import BatchShape, IterationRecord, causal_pairs
from cotenant.predictor.batches import BatchModels, BatchStates
from cotenant.predictor.prior import Prior
from cotenant.predictor.records import Group, RecordCache
from cotenant.predictor.shapes import TILE, BatchKey, batch_key

_Ask = Callable[[BatchShape], float | None]

# What a prompt token costs depends on how many there are. It is asked first of this many, or as many less as make whole
# tiles with the decodes, then of about as many as there is room for, in whole tiles, some times: one token more costs
# from half to four times what those do on average.
_PROMPT_TOKENS, _MOST_ASKED = 8 * TILE, 3
_LEAST_OF_MEAN, _MOST_OF_MEAN = 0.5, 4.0


class BatchTimes:
    """From when a batch begins: what it waits for before is not its own."""

    def __init__(self, records: RecordCache, base_group: Group, prior: Prior | None) -> None:
        self.models = BatchModels()
        self._records, self._base_group, self._prior = records, base_group, prior
        self._last: tuple[BatchShape, Group, BatchKey] | None = None  # asked for: a plan asks for one many times
        self._last_reached: tuple[BatchShape, float | None] | None = None  # the same, since the last measurement

    def keys(self, batch: BatchShape) -> tuple[Group, BatchKey]:
        """Of a batch's records: their group, and what they share of their shape."""
        last = self._last
        if last is None or last[0] is not batch:
            # Shapes with prompts are without number: apart, they displace no others.
            kind = (batch.num_adapters, "prompts") if batch.prefill_tokens else (batch.num_adapters,)
            last = self._last = (batch, (*self._base_group, *kind), batch_key(batch))
        return last[1], last[2]

    def batch_ms(self, batch: BatchShape, *, cautious: bool) -> float | None:
        """See ``LatencyPredictor.batch_ms``."""
        if batch.prefill_tokens and (reached_ms := self._reached_ms(batch)):
            return reached_ms
        group, key = self.keys(batch)
        fresh_ms = self._records.fresh_ms(group, ("batch", key), cautious=cautious)
        if fresh_ms is not None:
            return fresh_ms
        record = self._records.find(group, ("batch", key))
        known_ms = self._modelled_ms(batch)
        return known_ms if record is None else less(record.latency_ms(cautious=cautious), known_ms)

    def prompt_tokens_within(self, decodes: BatchShape, limit_ms: float, num_computed: int) -> int | None:
        """See ``LatencyPredictor.prompt_tokens_within``."""
        num_decode = decodes.num_decode
        asked = _PROMPT_TOKENS - num_decode % TILE
        known = self._known_ms(decodes, _with_prompt(decodes, asked, num_computed))
        if known is None:
            return None
        ask, alone_ms, taken_ms = known
        mean_ms = (taken_ms - alone_ms) / asked
        tokens = asked + int((limit_ms - taken_ms) / mean_ms)
        for _ in range(_MOST_ASKED):
            around = round((num_decode + tokens) / TILE) * TILE - num_decode
            around_ms = None if around <= 0 or around == asked else ask(_with_prompt(decodes, around, num_computed))
            if around_ms is None:
                break
            token_ms = (around_ms - taken_ms) / (around - asked)
            token_ms = min(max(token_ms, _LEAST_OF_MEAN * mean_ms), _MOST_OF_MEAN * mean_ms)
            asked, taken_ms = around, around_ms
            tokens = around + int((limit_ms - around_ms) / token_ms)
        return tokens

    def _known_ms(self, decodes: BatchShape, with_prompt: BatchShape) -> tuple[_Ask, float, float] | None:
        """What two batches take, the second of which takes longer, by the first that knows both, which is there to be
        asked of others: the models where they reach, the prior, a guess."""
        asks: list[_Ask] = [self._reached_ms, self.models.guessed_ms]
        if self._prior is not None:
            asks.insert(1, self._prior.batch_ms)
        for ask in asks:
            alone_ms, taken_ms = ask(decodes), ask(with_prompt)
            if alone_ms is not None and taken_ms is not None:
                return (ask, alone_ms, taken_ms) if taken_ms > alone_ms else None
        return None

    def observe(self, record: IterationRecord) -> None:
        """Learn from an iteration whose batch had all SMs, and no tasklets in it; where it was disturbed, no more than
        what batches with prompts take after training."""
        batch, online_ms = record.batch, record.online_ms
        self._last_reached = None
        if record.is_disturbed:
            if batch.prefill_tokens:
                self.models.observe(batch, online_ms, is_disturbed=True)
            return
        group, key = self.keys(batch)
        self._records.add(group, ("batch", key), online_ms)
        online_ms = self.models.observe(batch, online_ms)
        if self._prior is not None:
            self._prior.observe_batch(batch, online_ms)

    def trained(self) -> None:
        """Tasklets have run."""
        self._last_reached = None
        self.models.trained()

    def restore(self, states: BatchStates, trusted: int) -> None:
        """See ``BatchModels.restore``."""
        self._last_reached = None
        self.models.restore(states, trusted)

    def _reached_ms(self, batch: BatchShape) -> float | None:
        last = self._last_reached
        if last is None or last[0] is not batch:
            last = self._last_reached = (batch, self.models.reached_ms(batch))
        return last[1]

    def _modelled_ms(self, batch: BatchShape) -> float | None:
        """Alone, by the models, or where they do not reach by the prior."""
        reached_ms = self.models.reached_ms(batch)
        if reached_ms is not None:
            return reached_ms or None
        prior_ms = None if self._prior is None else self._prior.batch_ms(batch)
        return prior_ms or self.models.guessed_ms(batch) or None


def less(stale_ms: float, known_ms: float | None) -> float:
    """What a stale record says, unless something else that is known says less: then the shape is tried again."""
    return stale_ms if known_ms is None else min(stale_ms, known_ms)


def _with_prompt(decodes: BatchShape, prompt_tokens: int, num_computed: int) -> BatchShape:
    """The same batch with tokens of a prompt that attend to those before them, too."""
    attended, pairs = prompt_tokens + num_computed, causal_pairs(prompt_tokens, num_computed)
    return BatchShape(decodes.num_decode, decodes.context_tokens, prompt_tokens, attended, decodes.num_adapters, pairs)
