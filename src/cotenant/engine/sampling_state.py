"""How one sequence's tokens are chosen, and the numbers that its draws use. Host only: no tensors."""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from cotenant.core.request import SamplingParams

# Below this a temperature means greedy; dividing logits by it would overflow.
MIN_TEMPERATURE = 1e-5

# Token ids, each of them once, and what is added to the logit of each.
Bias = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31, 40))


def uniforms(keys: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Per row, the number in [0, 1) that its key has at its index: a multiple of 2**-24. Arrays of one dimension.

    SplitMix64 (Steele, Lea and Flood, 2014, figure 15) as a counter: its state at an index is a sum, so any index can
    be asked for, in any order.
    """
    mixed = keys + (indices + np.uint64(1)) * _GAMMA
    mixed ^= mixed >> _SHIFTS[0]
    mixed *= _MIX_1
    mixed ^= mixed >> _SHIFTS[1]
    mixed *= _MIX_2
    mixed ^= mixed >> _SHIFTS[2]
    numbers: npt.NDArray[np.float32] = (mixed >> _SHIFTS[3]).astype(np.float32) * np.float32(2**-24)
    return numbers


class SamplingState:
    """One sequence's parameters and the key of its random numbers. Nothing in it changes.

    The number that a token is drawn with is a function of the key and the token's place in the sequence alone. So what
    a seed gives depends on nothing else in the batch, and a preempted sequence goes on where it was.

    ``stop_token_ids``: the tokens that end the sequence, those of the model (``eos_token_ids``) among them unless they
    are ignored. ``num_spared``: so many tokens at its beginning are none of them, and none of the model's in any case.
    ``num_adjusted``: for so many at its beginning logits are not sampled as they are; infinite: for all.
    """

    def __init__(self, params: SamplingParams, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.params = params
        asked_for = frozenset(params.stop_token_ids)
        ends = asked_for | eos_token_ids
        self.stop_token_ids = asked_for if params.ignore_eos else ends
        self.num_spared = params.min_tokens if ends else 0
        self.greedy = params.temperature < MIN_TEMPERATURE
        self.key = _key(params.seed)
        self.has_penalties = bool(
            params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        )
        self.penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._bias = _arrays(params.logit_bias)
        self._bias_at_first = self._bias
        if self.num_spared:
            self._bias_at_first = _arrays(params.logit_bias | dict.fromkeys(ends, -math.inf))
        # As the sampler's plan lists them: temperature (0: greedy), min_p, top_p, top_k (infinite: all tokens).
        temperature = 0.0 if self.greedy else params.temperature
        self.figures = (temperature, params.min_p, params.top_p, float(params.top_k or "inf"))
        self.filters = params.top_p < 1.0 or params.top_k > 0
        self.num_adjusted = math.inf if self.has_penalties or params.logit_bias else self.num_spared

    def bias_at(self, index: int) -> Bias:
        """What is added to the logits for the generated token of this index."""
        return self._bias_at_first if index < self.num_spared else self._bias

    def uniform(self, index: int) -> float:
        """The number for the generated token of this index, in [0, 1)."""
        return float(uniforms(np.array([self.key], dtype=np.uint64), np.array([index], dtype=np.uint64))[0])


def _arrays(bias: Mapping[int, float]) -> Bias:
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)


def _key(seed: int | None) -> int:
    """64 bits. A seed is hashed as a string: negative seeds differ from positive ones, and neighbours are unrelated."""
    if seed is None:
        return secrets.randbits(64)
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8).digest(), "little")
