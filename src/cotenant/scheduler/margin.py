"""How closely a TPOT target may be aimed at, learned from what came of requests.

A plan that ends on time uses all slack up; what nobody planned for, a prompt that comes late in an answer's life, makes
a request miss then. So the share of the target that is aimed at follows the misses, until as many requests as wanted
meet the target: a quantile, tracked as requests are judged. Misses that there would have been without training tell
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from cotenant.core.plan import FIRST_MARGIN

_LEAST, _MOST = 0.5, 0.98
_FALL = 0.03  # at a miss
_RECOVERY = 0.003  # at a request that training had no room beside, and that met the target
_JUDGED_EVERY = 64  # tokens: a long answer is judged before its end, too
_MOST_REQUESTS = 4096  # that are remembered: some end without a word


@dataclass(slots=True)
class _Life:
    first_s: float
    trained_ms: float  # of all training, at the first token
    num_tokens: int = 0
    has_missed: bool = False


class Margin:
    """``value``: the share of the TPOT target to aim at. At ``attainment`` of requests that meet the target it stays
    where it is; it falls when more miss, and rises when fewer do.

    Those who are judged in the same iteration count as one: what befell one of them befell all. A request misses once.
    """

    def __init__(self, target_ms: float, attainment: float) -> None:
        self._target_ms = target_ms
        self._rise = _FALL * (1.0 - attainment) / attainment
        self._trained_ms = 0.0
        self._lives: dict[str, _Life] = {}
        self._num_judged = 0
        self._change = 0.0
        self.value = FIRST_MARGIN

    def trained(self, time_ms: float) -> None:
        """Training has made the running requests wait for so long."""
        self._trained_ms += time_ms

    def note(self, request_id: str, num_new: int, now_s: float, is_over: bool) -> None:
        """A request has ``num_new`` tokens more at ``now_s``."""
        life = self._lives.get(request_id)
        if life is None:
            life = self._lives[request_id] = _Life(now_s, self._trained_ms)
            if len(self._lives) > _MOST_REQUESTS:
                del self._lives[next(iter(self._lives))]
        before, life.num_tokens = life.num_tokens, life.num_tokens + num_new
        if life.num_tokens > 1 and (is_over or life.num_tokens // _JUDGED_EVERY > before // _JUDGED_EVERY):
            self._judge(life, now_s)
        if is_over:
            del self._lives[request_id]

    def settle(self) -> None:
        """All of an iteration's tokens have been noted."""
        if self._num_judged:
            self.value = min(_MOST, max(_LEAST, self.value + self._change / self._num_judged))
            self._num_judged, self._change = 0, 0.0

    def _judge(self, life: _Life, now_s: float) -> None:
        num_gaps = life.num_tokens - 1
        tpot_ms = (now_s - life.first_s) * 1e3 / num_gaps
        trained_ms = (self._trained_ms - life.trained_ms) / num_gaps
        if tpot_ms <= self._target_ms:
            self._num_judged += 1
            recovers = trained_ms == 0.0
            self._change += (_RECOVERY if self.value < FIRST_MARGIN else 0.0) if recovers else self._rise
        elif tpot_ms - trained_ms <= self._target_ms and not life.has_missed:
            life.has_missed = True
            self._num_judged += 1
            self._change -= _FALL
