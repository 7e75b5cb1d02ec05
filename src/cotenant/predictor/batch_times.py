"""What batches on all SMs take: decode steps by their records, else by the models, else by the prior. A step that
tasklets were in flight before has records of its own: it comes out some percent shorter.

Those with prompts by the models first: hardly one comes again, so a record is of some that were only about like it, the
last of them long ago, while the model has just seen others.
"""

from __future__ import annotations

from typing import NamedTuple

from cotenant.core.plan import BatchShape, IterationRecord, causal_pairs
from cotenant.predictor.batches import BatchModels, BatchStates
from cotenant.predictor.prior import Prior
from cotenant.predictor.records import Group, RecordCache
from cotenant.predictor.shapes import TILE, BatchKey, batch_key

# What a prompt token costs depends on how many there are. It is asked first of as many tiles of them and the decodes as
# were found last, or of so many, the first of these that the models tell of; then of about as many as there is room
# for, in whole tiles, some times: a token more costs from half to four times what those do on average. A guess says at
# most twice what it would be by the tokens first asked of.
_FIRST_TILES, _MOST_ASKED = (8, 3, 1), 3
_LEAST_OF_MEAN, _MOST_OF_MEAN, _MOST_GUESSED = 0.5, 4.0, 2.0
ALONE, _BEHIND = "batch", "batch behind tasklets"  # records
# Of what a step alone takes: one behind tasklets that took less has run beside them for a good part.
_LEAST_BEHIND = 0.7


class _Start(NamedTuple):
    """A number of prompt tokens, what the decodes take without and with them, which is more, and whether the models
    tell of these: else it was said by the prior or is a guess."""

    prompt_tokens: int
    alone_ms: float
    taken_ms: float
    is_told: bool


class BatchTimes:
    """From when a batch begins: what it waits for before is not its own."""

    def __init__(self, records: RecordCache, base_group: Group, prior: Prior | None) -> None:
        self.models = BatchModels()
        self._records, self._base_group, self._prior = records, base_group, prior
        self._last: tuple[BatchShape, Group, BatchKey] | None = None  # asked for: a plan asks for one many times
        # The same, since the last measurement.
        self._last_reached: tuple[BatchShape, float | None] | None = None
        self._last_start: tuple[BatchShape, int, _Start] | None = None
        self._first_tiles: tuple[int, ...] = _FIRST_TILES

    def keys(self, batch: BatchShape) -> tuple[Group, BatchKey]:
        """Of a batch's records: their group, and what they share of their shape."""
        last = self._last
        if last is None or last[0] is not batch:
            # Shapes with prompts are without number: apart, they displace no others.
            kind = (batch.num_adapters, "prompts") if batch.prefill_tokens else (batch.num_adapters,)
            last = self._last = (batch, (*self._base_group, *kind), batch_key(batch))
        return last[1], last[2]

    def batch_ms(self, batch: BatchShape, *, behind_tasklets: bool, cautious: bool) -> float | None:
        """See ``LatencyPredictor.batch_ms``."""
        if batch.prefill_tokens:
            known_ms = self._reached_ms(batch) or self._measured_ms(batch, ALONE, cautious=cautious)
        else:
            # What nobody has measured yet is about what the other kind takes.
            kinds = (_BEHIND, ALONE) if behind_tasklets else (ALONE, _BEHIND)
            known_ms = self._measured_ms(batch, kinds[0], cautious=cautious)
            known_ms = known_ms or self._measured_ms(batch, kinds[1], cautious=cautious)
        return known_ms or self._unmeasured_ms(batch)

    def _measured_ms(self, batch: BatchShape, kind: str, *, cautious: bool) -> float | None:
        """By records of this kind, or models of it where they reach. A stale record says no more than what else is
        known."""
        group, key = self.keys(batch)
        fresh_ms = self._records.fresh_ms(group, (kind, key), cautious=cautious)
        if fresh_ms is not None:
            return fresh_ms
        record = self._records.find(group, (kind, key))
        known_ms = self.models.reached_ms(batch, behind_tasklets=kind == _BEHIND) or None
        if record is None:
            return known_ms
        return stale_or_less(record.latency_ms(cautious=cautious), known_ms or self._unmeasured_ms(batch))

    def prompt_tokens_within(self, decodes: BatchShape, limit_ms: float, num_computed: int, most: int) -> int | None:
        """See ``LatencyPredictor.prompt_tokens_within``. A secant search over whole tiles: from a number of tokens
        whose time is known it is corrected ``_MOST_ASKED`` times at most. Of more than ``most`` nobody is asked:
        attention grows with their square, and from far beyond all batches the way back would end below those that
        fit."""
        before = self._last_start
        found = self._start_by_models(decodes, num_computed) or self._start_by_guess(decodes, num_computed)
        if found is None:
            return None
        first, alone_ms, taken_ms, is_told = found
        asked, mean_ms, guessed_to = first, (taken_ms - alone_ms) / first, 2 * first if is_told else 0
        tokens = min(most, asked + int(min(most, (limit_ms - taken_ms) / mean_ms)))
        for _ in range(_MOST_ASKED):
            around = round((decodes.num_decode + tokens) / TILE) * TILE - decodes.num_decode
            if around <= 0 or around == asked:
                break
            least_ms = alone_ms + mean_ms * around if around > first else 0.0
            around_ms = self._asked_ms(_with_prompt(decodes, around, num_computed), guessed_to, least_ms)
            if around_ms is None:
                break
            token_ms = (around_ms - taken_ms) / (around - asked)
            token_ms = min(max(token_ms, _LEAST_OF_MEAN * mean_ms), _MOST_OF_MEAN * mean_ms)
            asked, taken_ms = around, around_ms
            tokens = min(most, around + int(min(most, (limit_ms - around_ms) / token_ms)))
        if self._last_start is not before:  # the first question about these decodes: the next one is about others
            self._first_tiles = ((decodes.num_decode % TILE + asked) // TILE, *_FIRST_TILES)
        return tokens

    def _start_by_models(self, decodes: BatchShape, num_computed: int) -> _Start | None:
        """What the models tell of the first number of prompt tokens that they reach."""
        last = self._last_start
        if last is not None and last[0] is decodes and last[1] == num_computed:
            return last[2]
        alone_ms = self._reached_ms(decodes)
        if alone_ms is None:
            return None
        for tiles in self._first_tiles:
            asked = tiles * TILE - decodes.num_decode % TILE
            taken_ms = self.models.reached_ms(_with_prompt(decodes, asked, num_computed))
            if taken_ms is not None and taken_ms > alone_ms:
                start = _Start(asked, alone_ms, taken_ms, True)
                self._last_start = (decodes, num_computed, start)
                return start
        return None

    def _start_by_guess(self, decodes: BatchShape, num_computed: int) -> _Start | None:
        """The same by the prior, or a guess. None: nobody knows."""
        asked = _FIRST_TILES[0] * TILE - decodes.num_decode % TILE
        with_prompt = _with_prompt(decodes, asked, num_computed)
        prior, guessed_ms = self._prior, self.models.guessed_ms
        for ask in (guessed_ms,) if prior is None else (prior.batch_ms, guessed_ms, prior.unmeasured_ms):
            alone_ms, taken_ms = ask(decodes), ask(with_prompt)
            if alone_ms is not None and taken_ms is not None:
                return _Start(asked, alone_ms, taken_ms, False) if taken_ms > alone_ms else None
        return None

    def _asked_ms(self, batch: BatchShape, guessed_to: int, least_ms: float) -> float | None:
        """By the models where they reach, then a guess up to so many prompt tokens as ``guessed_to``: what is too
        cautious there would not let the models be told of more. Else by the prior, else a guess. Where the models do
        not reach no less than ``least_ms``, as if each token cost what few do, nor by a guess much more than that."""
        known_ms = self._reached_ms(batch)
        if known_ms is not None:
            return known_ms
        if self._prior is not None and batch.prefill_tokens > guessed_to:
            known_ms = self._prior.batch_ms(batch)
            if known_ms is not None:
                return max(least_ms, known_ms)
        known_ms = self.models.guessed_ms(batch)
        if known_ms is None and self._prior is not None:
            known_ms = self._prior.unmeasured_ms(batch)
        if known_ms is None or not least_ms:
            return known_ms
        return min(max(least_ms, known_ms), _MOST_GUESSED * least_ms)

    def observe(self, record: IterationRecord) -> None:
        """Learn from an iteration whose batch had all SMs, and no tasklets in it; where it was disturbed, no more than
        what batches with prompts take after training."""
        batch, online_ms = record.batch, record.online_ms
        self._last_reached = self._last_start = None
        if record.is_disturbed:
            if batch.prefill_tokens:
                self.models.observe(batch, online_ms, is_disturbed=True)
            return
        if record.with_tasklet and not batch.prefill_tokens:  # these have their ratio after training
            return
        if record.behind_tasklets:
            online_ms = max(online_ms, _LEAST_BEHIND * (self.models.reached_ms(batch) or 0.0))
        group, key = self.keys(batch)
        self._records.add(group, (_BEHIND if record.behind_tasklets else ALONE, key), online_ms)
        online_ms = self.models.observe(batch, online_ms, behind_tasklets=record.behind_tasklets)
        if self._prior is not None:
            self._prior.observe_batch(batch, online_ms)

    def trained(self) -> None:
        """Tasklets have run."""
        self._last_reached = self._last_start = None
        self.models.trained()

    def restore(self, states: BatchStates, trusted: int) -> None:
        """See ``BatchModels.restore``."""
        self._last_reached = self._last_start = None
        self.models.restore(states, trusted)

    def _reached_ms(self, batch: BatchShape) -> float | None:
        """By the models. What the size of a chunk was found by is often asked again, in an equal batch, for its turns
        and for the plan."""
        last = self._last_reached
        if last is None or (last[0] is not batch and last[0] != batch):
            last = self._last_reached = (batch, self.models.reached_ms(batch))
        return last[1]

    def _unmeasured_ms(self, batch: BatchShape) -> float | None:
        """Where no record tells and the models do not reach: by the prior, or a guess."""
        if self._prior is None:
            return self.models.guessed_ms(batch) or None
        return self._prior.batch_ms(batch) or self.models.guessed_ms(batch) or self._prior.unmeasured_ms(batch)


def stale_or_less(stale_ms: float, known_ms: float | None) -> float:
    """What a stale record says, unless something else that is known says less: then the shape is tried again."""
    return stale_ms if known_ms is None else min(stale_ms, known_ms)


def _with_prompt(decodes: BatchShape, prompt_tokens: int, num_computed: int) -> BatchShape:
    """The same batch with tokens of a prompt that attend to those before them, too."""
    attended, pairs = prompt_tokens + num_computed, causal_pairs(prompt_tokens, num_computed)
    return BatchShape(decodes.num_decode, decodes.context_tokens, prompt_tokens, attended, decodes.num_adapters, pairs)
