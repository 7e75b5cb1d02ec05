"""What batches on all SMs take: decode steps by their records, else by the models, else by the prior.

Those with prompts by the models first: hardly one comes again, so a record is of some that were only about like it, the
last of them long ago, while the model has just seen others.
"""

from __future__ import annotations

from cotenant.core.plan import BatchShape, IterationRecord, causal_pairs
from cotenant.predictor.batches import BatchModels, BatchStates
from cotenant.predictor.prior import Prior
from cotenant.predictor.records import Group, RecordCache
from cotenant.predictor.shapes import TILE, BatchKey, batch_key

_PROMPT_TOKENS = 8 * TILE  # or less, of the prompt that tells what a prompt token costs


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
        probe = _PROMPT_TOKENS - decodes.num_decode % TILE  # whole tiles with the decodes
        tokens = self._tokens_within(decodes, limit_ms, probe, num_computed)
        if tokens is None or tokens <= probe:
            return tokens
        # Attention grows with the square: of so long a prompt a token costs more.
        longer = self._tokens_within(decodes, limit_ms, tokens, num_computed)
        return tokens if longer is None else longer

    def _tokens_within(self, decodes: BatchShape, limit_ms: float, prompt_tokens: int, num_computed: int) -> int | None:
        """By what a token of so long a prompt costs."""
        num_decode, context, num_adapters = decodes.num_decode, decodes.context_tokens, decodes.num_adapters
        attended, pairs = prompt_tokens + num_computed, causal_pairs(prompt_tokens, num_computed)
        with_prompt = BatchShape(num_decode, context, prompt_tokens, attended, num_adapters, pairs)
        shapes = [decodes, with_prompt]
        times_ms = [self._reached_ms(decodes), self.models.line_ms(with_prompt)]  # of decodes it is the line's
        is_line = None not in times_ms
        if not is_line and self._prior is not None:
            times_ms = [self._prior.batch_ms(shape) for shape in shapes]
        if None in times_ms:
            times_ms = [self.models.guessed_ms(shape) for shape in shapes]
        alone_ms, with_prompt_ms = times_ms
        if alone_ms is None or with_prompt_ms is None or with_prompt_ms <= alone_ms:
            return None
        token_ms = (with_prompt_ms - alone_ms) / prompt_tokens
        if is_line:
            limit_ms /= self.models.ratio_now()
        tokens = int((limit_ms - alone_ms) / token_ms)
        # About so many in whole tiles, and what is particular to that size.
        rows = round((num_decode + tokens) / TILE) * TILE
        if is_line and rows > num_decode:
            limit_ms /= self.models.ratio_of(BatchShape(num_decode, context, rows - num_decode))
            tokens = int((limit_ms - alone_ms) / token_ms)
        return tokens

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
