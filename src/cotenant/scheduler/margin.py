"""How closely the targets may be aimed at, learned from what came of requests.

A plan that ends on time uses all slack up; what nobody planned for, prompts that come late in an answer's life or many
at once, makes a request miss then. So the share of the TPOT target that is aimed at follows the misses, of either
target, until half as many requests miss as may: a quantile, tracked as requests are judged. TTFT hangs on it, too:
what running requests are ahead of their target is the room that prompts have. Misses that there would have been without
training tell nothing, as far as they can be told.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from cotenant.core.plan import FIRST_MARGIN, Slo
from cotenant.scheduler.crowding import Crowding
from cotenant.scheduler.slack import MOST_MARGIN

_LEAST = 0.2
_FALL = 0.03  # at a miss
# Of the misses that the attainment allows: some are not training's, and those of one iteration count as one.
_AIMED_AT = 0.5
# When a request is found to meet the target while none has missed yet, for each token that it has, up to so many: a
# short answer that prompts came into has not many tokens to make up for them.
_FIRST_RISE, _MOST_RISES = 0.00003, 256
_RECOVERY = 0.003  # at a request that met the target while training has had no room for so long:
_STARVED_S = 1.0
_JUDGED_EVERY = 64  # tokens: a long answer is judged before its end, too
# That are remembered of those that wait for their first token, and as many of those that have one: should some end
# without a word. However many wait, those that run are known.
_MOST_REQUESTS = 4096
# A millisecond of training may have made a request later by so many: prompts that came meanwhile wait in line.
_CASCADE = 3.0
# Training so long before a request came may make its first token late: what running requests had to give was spent.
_BEFORE_S = 5.0
# How far late first tokens may lower it. What else makes them late cannot be told apart, and more room than that is of
# little use to prompts.
_LEAST_FOR_FIRST = 0.5
# Prompts are expected for so long after some came into running answers.
_PROMPTS_FOR_S = 5.0


@dataclass(slots=True)
class _Life:
    arrival_s: float  # nan: not known
    first_s: float = math.nan  # of the first token; nan: there is none
    trained_ms: float = 0.0  # of all training, at the first token
    num_tokens: int = 0
    has_missed: bool = False


class Margin:
    """``value``: the share of the TPOT target to aim at, as learned. It stays where it is while half as many requests
    miss as may by ``Slo.attainment``; it falls when more do, and rises when fewer do. ``aim`` is what to go by.

    Those who are judged in the same iteration count as one: what befell one of them befell all. A request misses
    once, however often it is judged on its way; once any has missed, it meets its targets once, too. Until then each
    time counts: nothing says yet that too much is aimed at.
    ``has_job``: whether there is training that could have room. ``may_rise``: where not, ``value`` only falls.
    """

    def __init__(self, slo: Slo) -> None:
        self._slo = slo
        misses = _AIMED_AT * (1.0 - slo.attainment)
        self._later_rise = _FALL * misses / (1.0 - misses)
        self._has_missed = False  # any request
        self._trained_ms = 0.0
        self._last_trained_s = self._last_late_s = -math.inf
        self._waiting: dict[str, _Life] = {}  # for the first token
        self._running: dict[str, _Life] = {}
        self._num_judged = 0
        self._change = 0.0
        self._has_learned = False
        self._most, self._prompts_until_s = MOST_MARGIN, -math.inf  # where prompts are expected
        self._crowding = Crowding(slo)
        self.value = FIRST_MARGIN
        self.has_job = self.may_rise = True

    @property
    def has_learned(self) -> bool:
        """Whether a request has been judged."""
        return self._has_learned

    def begin_at(self, value: float) -> None:
        """Where learning is to begin; may be said until it has begun."""
        assert not self._has_learned
        self.value = min(MOST_MARGIN, max(_LEAST, value))

    def take_over(self, other: Margin) -> None:
        """Go by what another one has learned, of the same targets."""
        self.value = other.value
        self._has_missed, self._has_learned = other._has_missed, other._has_learned

    def expect_prompts(self, most: float, now_s: float, step_ms: float) -> None:
        """Prompts have come into running answers, whose decode steps take ``step_ms``: for a while no more than
        ``most`` is aimed at."""
        self._crowding.room = max(0.0, 1.0 - step_ms / self._slo.tpot_ms)
        self._most, self._prompts_until_s = most, now_s + _PROMPTS_FOR_S

    def prompts_took(self, time_ms: float, now_s: float) -> None:
        """A batch has landed that took so long for its prompts."""
        self._crowding.prompts_took(time_ms, now_s)

    def aim(self, now_s: float) -> float:
        """The share of the TPOT target to aim at now."""
        return min(self._beside_prompts(now_s), self._crowding.most(now_s))

    def _beside_prompts(self, now_s: float) -> float:
        return min(self.value, self._most) if now_s < self._prompts_until_s else self.value

    def trained(self, time_ms: float, now_s: float) -> None:
        """Training has made the live requests wait for so long."""
        self._trained_ms += time_ms
        self._last_trained_s = now_s

    def arrived(self, request_id: str, at_s: float) -> None:
        """A request has come. One that is noted without this is not judged by its first token."""
        _remember(self._waiting, request_id, _Life(at_s))

    def resume(self, request_id: str, first_s: float, num_tokens: int) -> None:
        """A request has so many tokens already, the first of them since ``first_s``."""
        _remember(self._running, request_id, _Life(math.nan, first_s, num_tokens=num_tokens))

    def note(self, request_id: str, num_new: int, now_s: float, is_over: bool) -> int:
        """A request has ``num_new`` tokens more at ``now_s``: how many in all."""
        life = self._running.get(request_id)
        if life is None:
            life = self._waiting.pop(request_id, None) or _Life(math.nan)
            life.first_s, life.trained_ms = now_s, self._trained_ms
            self._judge_first(life, now_s)
            _remember(self._running, request_id, life)
        before, life.num_tokens = life.num_tokens, life.num_tokens + num_new
        if life.num_tokens > 1 and (is_over or life.num_tokens // _JUDGED_EVERY > before // _JUDGED_EVERY):
            self._judge(life, life.first_s, now_s, is_over=is_over)
        if is_over:
            del self._running[request_id]
        return life.num_tokens

    def forget(self, request_id: str) -> int:
        """A request is wanted no more: how many tokens it has had."""
        life = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        return 0 if life is None else life.num_tokens

    def settle(self, now_s: float) -> None:
        """All of an iteration's tokens have been noted."""
        if self._num_judged:
            change, aim = self._change / self._num_judged, self._beside_prompts(now_s)
            # What requests met while less was aimed at says nothing of more; what they missed, they would have as well.
            # In a crowd neither says anything of what holds without.
            if self.aim(now_s) == aim and (change < 0.0 or (self.may_rise and self.value <= aim)):
                self.value = min(MOST_MARGIN, max(_LEAST, aim + change))
            self._num_judged, self._change = 0, 0.0
            self._has_learned = True

    def _judge_first(self, life: _Life, now_s: float) -> None:
        """A first token in time is no merit of the margin's: most would be with any."""
        if math.isnan(life.arrival_s):
            return
        ttft_ms = (now_s - life.arrival_s) * 1e3
        self._crowding.first_token(ttft_ms, now_s)
        if ttft_ms > self._slo.ttft_ms:
            self._last_late_s = now_s
            if self._last_trained_s >= life.arrival_s - _BEFORE_S and self.value > _LEAST_FOR_FIRST:
                self._miss(life)

    def _judge(self, life: _Life, first_s: float, now_s: float, *, is_over: bool) -> None:
        num_gaps, target_ms = life.num_tokens - 1, self._slo.tpot_ms
        tpot_ms = (now_s - first_s) * 1e3 / num_gaps
        trained_ms = (self._trained_ms - life.trained_ms) / num_gaps
        if tpot_ms <= target_ms:
            is_starved = self.has_job and now_s - max(self._last_trained_s, self._last_late_s) > _STARVED_S
            if self._has_missed and not is_starved and (life.has_missed or not is_over):
                return  # a request meets its target once, as it misses once
            self._num_judged += 1
            recovery = _RECOVERY if self.value < FIRST_MARGIN else 0.0
            self._change += recovery if is_starved else self._rise_at(life.num_tokens)
        else:
            self._last_late_s = now_s
            if tpot_ms - _CASCADE * trained_ms <= target_ms:
                self._miss(life)

    def _rise_at(self, num_tokens: int) -> float:
        if self._has_missed:
            return self._later_rise
        return max(self._later_rise, _FIRST_RISE * min(num_tokens, _MOST_RISES))

    def _miss(self, life: _Life) -> None:
        if not life.has_missed:
            life.has_missed = True
            self._has_missed = True
            self._num_judged += 1
            self._change -= _FALL


def _remember(lives: dict[str, _Life], request_id: str, life: _Life) -> None:
    """Instead of the one that has been there for longest, if there are too many."""
    lives[request_id] = life
    if len(lives) > _MOST_REQUESTS:
        del lives[next(iter(lives))]
