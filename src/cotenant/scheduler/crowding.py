"""How much of the target is left alone where prompts take most of the device.

What running requests are ahead of their target is the room that a burst of prompts has. Training spends it, so while
the device is nearly full with prompts, and first tokens come late in their target already, less of it may be spent: the
next burst would find none. By the misses alone that would be learned too late: one burst makes many first tokens late.
"""

from __future__ import annotations

import math

from cotenant.core.plan import BatchShape, Slo
from cotenant.predictor.predictor import LatencyPredictor

# How late the worst first token was fades by half in so long, and the share of the time that prompts took by a factor
# of e: the device may be less full within seconds, while the latest burst still tells of the next.
_FIRST_HALF_LIFE_S, _BUSY_S = 10.0, 5.0
# The product of both shares from which less may be aimed at, and from which no less may. Chosen on simulated
# conversations, between plenty of room and a device that prompts alone fill.
_BEGINS_AT, _ENDS_AT = 0.08, 0.3
# So much of the target at most, and of the square of what a decode step leaves of it: where that is little, serving
# alone gets requests ahead but slowly, and takes from training most of the little that it has.
_MOST_TAKEN_OFF, _MOST_OF_ROOM = 0.5, 0.8


def prompts_ms(predictor: LatencyPredictor, batch: BatchShape) -> float:
    """What a batch takes alone for its prompts, beyond its decode step. 0 where nobody knows."""
    decodes = BatchShape(batch.num_decode, batch.context_tokens, num_adapters=batch.num_adapters)
    whole_ms, decodes_ms = (predictor.batch_ms(each, cautious=False) for each in (batch, decodes))
    return 0.0 if whole_ms is None or decodes_ms is None else max(0.0, whole_ms - decodes_ms)


class Crowding:
    """``most``: the share of the TPOT target that may be aimed at, by what first tokens took of theirs and the share of
    the time that prompts took. Times in milliseconds, clocks in seconds; one clock for all calls. ``room``: the share
    of the TPOT target that decode steps leave."""

    def __init__(self, slo: Slo) -> None:
        self._ttft_ms = slo.ttft_ms
        self._late, self._late_s = 0.0, -math.inf  # the worst first token's share of the target, faded; since when
        self._busy, self._busy_s = 0.0, -math.inf
        self.room = 1.0

    def first_token(self, ttft_ms: float, now_s: float) -> None:
        """A first token came after so long."""
        late = min(1.0, ttft_ms / self._ttft_ms)
        if late >= self._late_at(now_s):
            self._late, self._late_s = late, now_s

    def prompts_took(self, time_ms: float, now_s: float) -> None:
        """A batch has landed that took so long for its prompts (``prompts_ms``)."""
        took = 1.0 - math.exp(-time_ms / 1e3 / _BUSY_S)
        self._busy, self._busy_s = min(1.0, self._busy_at(now_s) + took), now_s

    def most(self, now_s: float) -> float:
        crowded = self._late_at(now_s) * self._busy_at(now_s)
        most_off = min(_MOST_TAKEN_OFF, _MOST_OF_ROOM * self.room**2)
        return 1.0 - most_off * min(1.0, max(0.0, (crowded - _BEGINS_AT) / (_ENDS_AT - _BEGINS_AT)))

    def _late_at(self, now_s: float) -> float:
        return self._late * math.exp2((self._late_s - now_s) / _FIRST_HALF_LIFE_S)

    def _busy_at(self, now_s: float) -> float:
        return self._busy * math.exp(-(now_s - self._busy_s) / _BUSY_S)
