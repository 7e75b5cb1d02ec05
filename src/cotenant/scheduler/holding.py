"""How long prompts are held for training, in the time that running requests have saved up.

A request that joins has nothing saved up: from its first token on it is the most urgent one, and what the others have
is of no use any more, neither to training nor to prompts. So that is spent before its prompt begins, as far as its TTFT
target allows. (FineInfer's deferred batching, LLMStation section 2, holds requests where nobody runs.)
"""

from __future__ import annotations

from cotenant.core.plan import RequestView, Snapshot
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.scheduler.base import flight_ms, num_batches
from cotenant.scheduler.slack import first_token_slack_ms

# Of the TTFT target, by which the prompts are done that are held: so nothing is held where many have come.
_TTFT_SHARE = 0.15
# Not for less: the device waits for the host before and after. Nor for more: messages wait, too.
_LEAST_MS, _MOST_MS = 5.0, 75.0


def held_ms(predictor: LatencyPredictor, snapshot: Snapshot) -> float:
    """How long tasklets may run before the batch of ``snapshot``, so that running requests have their tokens in time
    even so. 0 where none is to be held: some prompt has begun, or nobody runs, or there is too little to spend."""
    batch, slo, in_flight = snapshot.batch, snapshot.slo, snapshot.in_flight
    if not batch.prefill_tokens or _waits_too_long(snapshot):  # as where many wait
        return 0.0
    waiting, running = _sides(snapshot.requests)
    batch_ms = predictor.batch_ms(batch)
    if not waiting or not running or batch_ms is None:
        return 0.0
    num_ahead, ahead_ms, gap_ms = 0, snapshot.wait_ms, snapshot.since_tokens_ms
    if in_flight is not None:
        num_ahead, gap_ms = 1, 0.0
        ahead_ms += flight_ms(predictor, in_flight) or batch_ms
    begin_s, target_ms = snapshot.now_s + ahead_ms / 1e3, snapshot.margin * slo.tpot_ms
    # Each of the prompts' batches has a token for the running requests.
    num = num_batches(batch, waiting)
    most_ms = min(
        slo.max_gap_ms - gap_ms - batch_ms,
        first_token_slack_ms(tuple(waiting), slo, begin_s, num * batch_ms) - (1.0 - _TTFT_SHARE) * slo.ttft_ms,
    )
    if most_ms < _LEAST_MS:
        return 0.0
    late_ms = (num - 1.0) * max(0.0, batch_ms - target_ms)
    time_ms = min(most_ms, (_due_s(running, num_ahead, target_ms) - begin_s) * 1e3 - batch_ms - late_ms)
    return min(time_ms, _MOST_MS) if time_ms >= _LEAST_MS else 0.0


def _waits_too_long(snapshot: Snapshot) -> bool:
    """Whether for some first token nothing is to be held, even if its batch took no time."""
    now_s, share_ms = snapshot.now_s, _TTFT_SHARE * snapshot.slo.ttft_ms
    for request in snapshot.requests:  # of many that wait the first mostly tells
        waits = request.first_token_s is None and not request.waits_for_adapter
        if waits and share_ms - (now_s - request.arrival_s) * 1e3 < _LEAST_MS:
            return True
    return False


def _sides(requests: tuple[RequestView, ...]) -> tuple[list[RequestView], list[RequestView]]:
    """Those whose prompts have not begun, and those that have tokens; none of either where some are in between."""
    waiting: list[RequestView] = []
    running: list[RequestView] = []
    for request in requests:
        has_tokens = request.first_token_s is not None
        if not request.num_prompt_tokens_left:
            if not has_tokens:
                return [], []
            running.append(request)
        elif request.has_begun or has_tokens:
            return [], []
        elif not request.waits_for_adapter:
            waiting.append(request)
    return waiting, running


def _due_s(running: list[RequestView], num_ahead: int, target_ms: float) -> float:
    """When the most urgent of them is to have the token after those of the batches in flight."""
    return min(
        each.first_token_s + (each.num_generated + num_ahead) * target_ms / 1e3
        for each in running
        if each.first_token_s is not None
    )
