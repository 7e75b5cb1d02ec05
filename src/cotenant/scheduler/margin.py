"""How closely a TPOT target may be aimed at, learned from what came of requests.

A plan that ends on time uses all slack up; what nobody planned for, a prompt that comes late in an answer's life, makes
a request miss then. So the share of the target that is aimed at follows the misses, until as many requests as wanted
meet the target: a quantile, tracked one request at a time. Only requests that training ran beside tell anything, and
only misses that there would not have been without it.
"""

from __future__ import annotations

from cotenant.core.plan import RequestView, Slo

_FIRST, _LEAST, _MOST = 0.9, 0.5, 0.98
_FALL = 0.03  # at a miss
_JUDGED_EVERY = 64  # tokens: a long answer is judged before its end, too
_MOST_REQUESTS = 4096  # that are remembered: some end without a word


class Margin:
    """``value``: the share of the TPOT target to aim at. At ``attainment`` of requests that meet the target it stays
    where it is; it falls when more miss, and rises when fewer do."""

    def __init__(self, attainment: float) -> None:
        self._rise = _FALL * (1.0 - attainment) / attainment
        self._trained_ms = 0.0
        self._before_ms: dict[str, float] = {}  # by request: ``_trained_ms`` at its first token
        self.value = _FIRST

    def trained(self, time_ms: float) -> None:
        """Training has made the running requests wait for so long."""
        self._trained_ms += time_ms

    def note(self, request: RequestView, num_new: int, now_s: float, slo: Slo, is_over: bool) -> None:
        """A request, as it was seen before, has ``num_new`` tokens more at ``now_s``."""
        name, num_tokens = request.request_id, request.num_generated + num_new
        if request.first_token_s is None:
            if not is_over:
                self._before_ms[name] = self._trained_ms
                if len(self._before_ms) > _MOST_REQUESTS:
                    del self._before_ms[next(iter(self._before_ms))]
            return
        if not (is_over or num_tokens % _JUDGED_EVERY == 0):
            return
        before_ms = self._before_ms.pop(name, None) if is_over else self._before_ms.get(name)
        if before_ms is None or num_tokens < 2 or self._trained_ms == before_ms:
            return
        tpot_ms = (now_s - request.first_token_s) * 1e3 / (num_tokens - 1)
        trained_ms = (self._trained_ms - before_ms) / (num_tokens - 1)
        if tpot_ms <= slo.tpot_ms:
            self.value = min(_MOST, self.value + self._rise)
        elif tpot_ms - trained_ms <= slo.tpot_ms:
            self.value = max(_LEAST, self.value - _FALL)
