"""Batches on all SMs of which no record tells: linear models, learned from every one that ran.

LLMStation section 4.2 has one linear model of a batch. Prompts have one of their own here, for what a decode step's
tokens cost tells little of what a prompt's do: attention grows with their square, and what earlier chunks have cached
is read in another way than what is new. Products take all rows alike, decodes' and prompts', and in tiles, of which a
part costs as much as a whole one, and each of the first few less than each of the rest. And what no line follows is
learned as a ratio by size: captured batches are padded, and which tiles there are depends on the size. Another ratio is
by how many batches with prompts there were since training: the first shares SMs with the tasklet in flight, and clocks
that training has lowered rise again in some tenths of a second. For as long one tells of the next: what it took too
long, or too short, that will, too, for a part.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from cotenant.core.plan import BatchShape
from cotenant.predictor.linear import LinearState, OnlineLinearModel
from cotenant.predictor.ratio import Ratio
from cotenant.predictor.shapes import TILE, adapter_features, size_of

# What tasklets in flight take off a step is a millisecond or so: it is to have no share in what steps take in any case,
# where all that were measured are behind tasklets.
_DECODE_SCALES = (1.0, 8.0, 4096.0, 100.0, 409600.0, 1.0, 1.0)
_ENOUGH_BEHIND = 3  # steps behind tasklets, after which the model tells of them
_PROMPT_SCALES = (1.0, 256.0, 256.0, 256.0, 4096.0, 1e6, 4096.0, 1.0, 1.0)
_FEW_ROWS = 3 * TILE  # up to about so many reading the weights bounds products, and a row more costs less
# A batch that takes so many times what its model says teaches the model no more than that; nor does a model say less.
_MOST_TIMES, _LEAST_MS = 8.0, 0.1
_MOST_OFF = 2.0  # times that a size may be from the model: more is a stall, and some sizes hardly come again
_TYPICAL_MS = 10.0
# Prompts come in runs, and clocks follow what ran in the last tenths of a second: at the board's power limit, training
# that ran just before slows them. So the latest few batches tell more than the hundreds before.
_FORGETTING_PROMPTS, _WEIGHT_OF_SIZES_NEWEST = 0.95, 0.2
# Of the ratios, in logarithms, what the line does not learn: it would follow the sizes that came last. The rest it
# does, so that what all sizes have in common becomes the line's in time: other sizes go by it alone.
_LEFT_TO_RATIOS = 0.9
_NUM_AFTER = 2  # batches after training that are told from those that follow
# Measured / expected of a batch with prompts, as this power, is that of the one right behind it, which has the same
# clocks: for so many since training, and not beyond so many times, which is a stall.
_LIKE_THE_LAST, _NUM_ALIKE, _MOST_ALIKE = 0.4, 16, 1.25


class BatchStates(NamedTuple):
    """All that was learned: of decode steps, of batches with prompts, and measured / modelled of these by ``size_of``
    them, and of the first of these after training, one by one, by what they would be long after it."""

    decodes: LinearState
    prompts: LinearState
    ratios: dict[int, Ratio]
    after_training: list[Ratio]


class BatchModels:
    """Of batches alone."""

    def __init__(self) -> None:
        self._decodes = OnlineLinearModel(_DECODE_SCALES, _TYPICAL_MS)
        self._prompts = OnlineLinearModel(_PROMPT_SCALES, _TYPICAL_MS, _FORGETTING_PROMPTS)
        self._ratios: dict[int, Ratio] = {}
        self._after_training = [Ratio() for _ in range(_NUM_AFTER)]
        self._num_since = _NUM_ALIKE  # batches with prompts since training, as far as it matters
        self._num_behind = 0
        self._like_the_last = 1.0  # what the batch with prompts before, since training, tells of the next one

    def reached_ms(self, batch: BatchShape, *, behind_tasklets: bool = False) -> float | None:
        """What a model says, if it rests on what was measured."""
        if behind_tasklets and self._num_behind < _ENOUGH_BEHIND:
            return None
        model_ms = self._model_of(batch).reached(batch_features(batch, behind_tasklets))
        return None if model_ms is None else model_ms * self._all_ratios(batch)

    def _size_ratio(self, batch: BatchShape) -> float:
        """What is particular to its size, as times what the line says; 1 where nobody knows."""
        ratio = self._ratios.get(size_of(batch)) if batch.prefill_tokens else None
        return 1.0 if ratio is None or not ratio.known else ratio.mean

    def _training_ratio(self) -> float:
        """The same of a batch with prompts now, as times what one takes long after training."""
        ratio = self._after_training[self._num_since] if self._num_since < _NUM_AFTER else None
        return 1.0 if ratio is None or not ratio.known else ratio.mean

    def trained(self) -> None:
        """Tasklets have run."""
        self._num_since, self._like_the_last = 0, 1.0

    def guessed_ms(self, batch: BatchShape) -> float | None:
        """What a model says that has at least more measurements than weights. Without one of prompts, their tokens
        count as if they decoded."""
        if self._model_of(batch).ready:
            return self._model_of(batch).predict(batch_features(batch)) * self._all_ratios(batch)
        if not self._decodes.ready:
            return None
        decodes = replace(batch, num_decode=batch.num_decode + batch.prefill_tokens, prefill_tokens=0)
        return self._decodes.predict(batch_features(decodes))

    def observe(
        self, batch: BatchShape, measured_ms: float, *, behind_tasklets: bool = False, is_disturbed: bool = False
    ) -> float:
        """Learn from one measurement, and return it as it is believed. ``is_disturbed``: a tasklet was in its way,
        which tells nothing but what batches with prompts take after training."""
        model, features = self._model_of(batch), batch_features(batch, behind_tasklets)
        model_ms, ratio = model.reached(features), self._both_ratios(batch)
        if model_ms is not None:
            model_ms = max(model_ms, _LEAST_MS)
            measured_ms = min(measured_ms, _MOST_TIMES * model_ms)
            if batch.prefill_tokens:
                self._observe_ratios(batch, measured_ms, model_ms, is_disturbed=is_disturbed)
                times = 1.0 if is_disturbed or self._num_since == _NUM_ALIKE else measured_ms / (model_ms * ratio)
                self._like_the_last = min(max(times, 1 / _MOST_ALIKE), _MOST_ALIKE) ** _LIKE_THE_LAST
        if not is_disturbed:
            model.update(features, measured_ms / ratio**_LEFT_TO_RATIOS)
        self._num_behind += behind_tasklets
        if batch.prefill_tokens:
            self._num_since = min(self._num_since + 1, _NUM_ALIKE)
        return measured_ms

    def _observe_ratios(self, batch: BatchShape, measured_ms: float, model_ms: float, *, is_disturbed: bool) -> None:
        """Each without what the other one says."""
        of_size_ms, now_ms = model_ms * self._size_ratio(batch), model_ms * self._training_ratio()
        if self._num_since < _NUM_AFTER:
            self._after_training[self._num_since].add(_within(measured_ms, of_size_ms), of_size_ms)
        if not is_disturbed:
            ratio = self._ratios.setdefault(size_of(batch), Ratio())
            ratio.add(_within(measured_ms, now_ms), now_ms, _WEIGHT_OF_SIZES_NEWEST)

    def states(self) -> BatchStates:
        return BatchStates(self._decodes.state(), self._prompts.state(), self._ratios, self._after_training)

    def check(self, states: BatchStates) -> None:
        """Raises ValueError for states of other models."""
        if len(states.after_training) != _NUM_AFTER:
            raise ValueError(f"{len(states.after_training)} ratios of batches after training, not {_NUM_AFTER}")
        self._decodes.check(states.decodes)
        self._prompts.check(states.prompts)

    def restore(self, states: BatchStates, trusted: int) -> None:
        """Take over what others learned, which ``check`` has found right, where these have not; and ratios as if they
        rested on ``trusted`` measurements at most."""
        if self._decodes.num_samples == 0:
            self._decodes.restore(states.decodes)
        if self._prompts.num_samples == 0:  # ratios are to this model
            self._prompts.restore(states.prompts)
            self._ratios = {size: ratio.less_trusted(trusted) for size, ratio in states.ratios.items()}
            self._after_training = [ratio.less_trusted(trusted) for ratio in states.after_training]

    def _both_ratios(self, batch: BatchShape) -> float:
        """Of what a line does not tell, as far as it comes again."""
        return self._size_ratio(batch) * self._training_ratio() if batch.prefill_tokens else 1.0

    def _all_ratios(self, batch: BatchShape) -> float:
        """Of all that a line does not tell."""
        return self._both_ratios(batch) * self._like_the_last if batch.prefill_tokens else 1.0

    def _model_of(self, batch: BatchShape) -> OnlineLinearModel:
        return self._prompts if batch.prefill_tokens else self._decodes


def _within(measured_ms: float, expected_ms: float) -> float:
    """What is believed of a measurement."""
    return min(max(measured_ms, expected_ms / _MOST_OFF), expected_ms * _MOST_OFF)


def batch_features(batch: BatchShape, behind_tasklets: bool = False) -> tuple[float, ...]:
    """``behind_tasklets``: a decode step is shorter then, the more so the more it reads of the cache: that it does
    beside the last of them."""
    context, num_prompt = float(batch.context_tokens), batch.prefill_tokens
    features: tuple[float, ...]
    if not num_prompt:
        features = (1.0, float(batch.num_decode), context, float(behind_tasklets), context * behind_tasklets)
    else:
        rows = batch.num_decode + num_prompt
        in_tiles = -(-rows // TILE) * TILE
        beyond = float(in_tiles - _FEW_ROWS) if in_tiles > _FEW_ROWS else 0.0
        cached = float(batch.prefill_context_tokens - num_prompt) if batch.prefill_context_tokens > num_prompt else 0.0
        features = (1.0, float(rows), float(in_tiles), beyond, context, float(batch.prefill_pairs), cached)
    return features + adapter_features(batch) if batch.num_adapters else features
