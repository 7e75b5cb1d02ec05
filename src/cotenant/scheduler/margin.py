"""How closely a TPOT target may be aimed at, learned from what came of requests.

A plan that ends on time uses all slack up; what nobody planned for, a prompt that comes late in an answer's life, makes
a request miss then. So the share of the target that is aimed at follows the misses, until as many requests as wanted
meet the target: a quantile, tracked one request at a time.
"""

from __future__ import annotations

from cotenant.core.plan import RequestView, Slo

_FIRST, _LEAST, _MOST = 0.9, 0.5, 0.98
_FALL = 0.03  # at a miss
_JUDGED_EVERY = 64  # tokens: a long answer is judged before its end, too


class Margin:
    """``value``: the share of the TPOT target to aim at. At ``attainment`` of requests that meet the target it stays
    where it is; it falls when more miss, and rises when fewer do."""

    def __init__(self, attainment: float) -> None:
        self._rise = _FALL * (1.0 - attainment) / attainment
        self.value = _FIRST

    def note(self, request: RequestView, num_new: int, now_s: float, slo: Slo, is_over: bool) -> None:
        """A request, as it was seen before, has ``num_new`` tokens more at ``now_s``."""
        num_tokens = request.num_generated + num_new
        if request.first_token_s is None or num_tokens < 2 or not (is_over or num_tokens % _JUDGED_EVERY == 0):
            return
        tpot_ms = (now_s - request.first_token_s) * 1e3 / (num_tokens - 1)
        change = self._rise if tpot_ms <= slo.tpot_ms else -_FALL
        self.value = min(_MOST, max(_LEAST, self.value + change))
