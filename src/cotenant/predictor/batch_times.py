"""What batches on all SMs take: by their records, else by the models, else by the prior."""

from __future__ import annotations

from dataclasses import replace

from cotenant.core.plan import BatchShape, IterationRecord, causal_pairs
from cotenant.predictor.batches import BatchModels
from cotenant.predictor.prior import Prior
from cotenant.predictor.records import Group, RecordCache
from cotenant.predictor.shapes import TILE, BatchKey, batch_key

_PROMPT_TOKENS = 1024  # of the prompt that tells what a prompt token costs
_PROMPT = {
    "prefill_tokens": _PROMPT_TOKENS,
    "prefill_context_tokens": _PROMPT_TOKENS,
    "prefill_pairs": causal_pairs(_PROMPT_TOKENS),
}
_WAIT = ("wait",)
_LEAST_WAIT_MS, _MOST_TASKLETS_WAITED_FOR = 1e-3, 2.0
_FADING = 0.99


class BatchTimes:
    """A batch that is launched while a tasklet is in flight (``beside_training``) has records of its own. Where those
    lack, it takes as long as alone and a wait for the tasklet's end, which is the same for all shapes; and the other
    way round. The wait is that of decode steps, whose time is known best, and never longer than two tasklets: what
    more a step takes, on a machine that has become slower, is its own time."""

    def __init__(self, records: RecordCache, base_group: Group, prior: Prior | None) -> None:
        self.models = BatchModels()
        self._records, self._base_group, self._prior = records, base_group, prior
        self._longest_tasklet_ms = 0.0  # lately
        self._last: tuple[BatchShape, Group, BatchKey] | None = None  # asked for: a plan asks for one many times

    def keys(self, batch: BatchShape) -> tuple[Group, BatchKey]:
        """Of a batch's records: their group, and what they share of their shape."""
        last = self._last
        if last is None or last[0] is not batch:
            # Shapes with prompts are without number: apart, they displace no others.
            kind = (batch.num_adapters, "prompts") if batch.prefill_tokens else (batch.num_adapters,)
            last = self._last = (batch, (*self._base_group, *kind), batch_key(batch))
        return last[1], last[2]

    def batch_ms(self, batch: BatchShape, *, beside_training: bool, cautious: bool) -> float | None:
        """See ``LatencyPredictor.batch_ms``."""
        group, key = self.keys(batch)
        fresh_ms = self._records.fresh_ms(group, (_name(beside_training), key), cautious=cautious)
        if fresh_ms is not None:
            return fresh_ms
        record = self._records.find(group, (_name(beside_training), key))
        other = self._records.find(group, (_name(not beside_training), key))
        if other is None:
            known_ms = self._modelled_ms(batch)
            if known_ms is not None and beside_training:
                known_ms += self._wait_ms()
        elif beside_training:
            known_ms = other.latency_ms(cautious=cautious) + self._wait_ms()
        else:
            known_ms = _without(other.latency_ms(cautious=cautious), self._wait_ms())
        return known_ms if record is None else less(record.latency_ms(cautious=cautious), known_ms)

    def prompt_tokens_within(self, decodes: BatchShape, limit_ms: float) -> int | None:
        """See ``LatencyPredictor.prompt_tokens_within``."""
        shapes = [decodes, replace(decodes, **_PROMPT)]
        times_ms = [self.models.line_ms(shape) for shape in shapes]
        is_line = None not in times_ms
        if not is_line and self._prior is not None:
            times_ms = [self._prior.batch_ms(shape) for shape in shapes]
        if None in times_ms:
            times_ms = [self.models.guessed_ms(shape) for shape in shapes]
        alone_ms, with_prompt_ms = times_ms
        if alone_ms is None or with_prompt_ms is None or with_prompt_ms <= alone_ms:
            return None
        token_ms = (with_prompt_ms - alone_ms) / _PROMPT_TOKENS
        tokens = int((limit_ms - alone_ms) / token_ms)
        # About so many in whole tiles: a batch that fills them takes less than the line through all sizes says.
        rows = round((decodes.num_decode + tokens) / TILE) * TILE
        if is_line and rows > decodes.num_decode:
            limit_ms /= self.models.ratio_of(replace(decodes, prefill_tokens=rows - decodes.num_decode))
            tokens = int((limit_ms - alone_ms) / token_ms)
        return tokens

    def observe(self, record: IterationRecord) -> None:
        """Learn from an iteration whose batch had all SMs, and no tasklets in it."""
        batch, online_ms = record.batch, record.online_ms
        group, key = self.keys(batch)
        self._records.add(group, (_name(record.behind_tasklet), key), online_ms)
        if record.behind_tasklet:
            online_ms = _without(online_ms, self._wait_ms())
            self._learn_wait(record)
        online_ms = self.models.observe(batch, online_ms)
        if self._prior is not None:
            self._prior.observe_batch(batch, online_ms)

    def tasklet_ended(self, took_ms: float) -> None:
        """On all SMs."""
        self._longest_tasklet_ms = max(took_ms, _FADING * self._longest_tasklet_ms)

    def _learn_wait(self, record: IterationRecord) -> None:
        alone_ms = None if record.batch.prefill_tokens else self.models.reached_ms(record.batch)
        if alone_ms and self._longest_tasklet_ms:
            most_ms = _MOST_TASKLETS_WAITED_FOR * self._longest_tasklet_ms
            waited_ms = min(max(_LEAST_WAIT_MS, record.online_ms - alone_ms), most_ms)
            self._records.add(self._base_group, _WAIT, waited_ms)

    def _modelled_ms(self, batch: BatchShape) -> float | None:
        """Alone, by the models, or where they do not reach by the prior."""
        reached_ms = self.models.reached_ms(batch)
        if reached_ms is not None:
            return reached_ms or None
        prior_ms = None if self._prior is None else self._prior.batch_ms(batch)
        return prior_ms or self.models.guessed_ms(batch) or None

    def _wait_ms(self) -> float:
        """How much longer a batch takes that is launched while a tasklet is in flight. 0 while it is not known."""
        return self._records.fresh_ms(self._base_group, _WAIT, cautious=False) or 0.0


def less(stale_ms: float, known_ms: float | None) -> float:
    """What a stale record says, unless something else that is known says less: then the shape is tried again."""
    return stale_ms if known_ms is None else min(stale_ms, known_ms)


def _name(beside_training: bool) -> str:
    return "shared batch" if beside_training else "batch"


def _without(latency_ms: float, wait_ms: float) -> float:
    """At least half of it: what is learned first may be wrong."""
    return max(latency_ms - wait_ms, latency_ms / 2)
