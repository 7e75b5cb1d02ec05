"""What the sampler remembers of one sequence between tokens. No tensors: it is kept up one token at a time."""

from __future__ import annotations

import random
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cotenant.core.request import SamplingParams

# Below this a temperature means greedy; dividing logits by it would overflow.
MIN_TEMPERATURE = 1e-5


class TokenCounts:
    """Distinct tokens of a sequence and how often each was generated (0: in the prompt only), as arrays."""

    def __init__(self, prompt: Iterable[int] = ()) -> None:
        distinct = dict.fromkeys(prompt)
        self._index = {token: position for position, token in enumerate(distinct)}
        self._tokens = np.array(list(distinct), dtype=np.int64)
        self._counts = np.zeros(len(distinct), dtype=np.float32)

    def add(self, token_id: int) -> None:
        position = self._index.setdefault(token_id, len(self._index))
        if position >= len(self._tokens):
            room = max(32, len(self._tokens))
            self._tokens = np.concatenate((self._tokens, np.zeros(room, dtype=np.int64)))
            self._counts = np.concatenate((self._counts, np.zeros(room, dtype=np.float32)))
        self._tokens[position] = token_id
        self._counts[position] += 1

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        return self._tokens[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        return self._counts[: len(self._index)]


class SamplingState:
    """One sequence's parameters, its source of randomness, and its token counts if a penalty needs them.

    Every sampled token takes exactly one number from the sequence's own source, so what a seed gives depends on nothing
    else in the batch, and a preempted sequence goes on where it was.
    """

    def __init__(self, params: SamplingParams, prompt: tuple[int, ...]) -> None:
        self.params = params
        self.greedy = params.temperature < MIN_TEMPERATURE
        # A string seed is hashed whole: negative seeds differ from positive ones, and neighbours are unrelated.
        self._random = random.Random(None if params.seed is None else str(params.seed))
        repeats = params.repetition_penalty != 1.0
        self.counts: TokenCounts | None = None
        if repeats or params.presence_penalty or params.frequency_penalty:
            self.counts = TokenCounts(prompt if repeats else ())
        self.bias_tokens = np.array(list(params.logit_bias), dtype=np.int64)
        self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)

    @property
    def adjusts_logits(self) -> bool:
        return self.counts is not None or len(self.bias_tokens) > 0

    def uniform(self) -> float:
        """The next number of the sequence's own source, in [0, 1)."""
        return self._random.random()

    def observe(self, token_id: int) -> None:
        """Count a generated token."""
        if self.counts is not None:
            self.counts.add(token_id)
