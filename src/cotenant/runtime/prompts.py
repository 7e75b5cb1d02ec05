"""How many tokens of prompts the next batch takes, and whose come last."""

from __future__ import annotations

from cotenant.core.plan import InFlight, RequestView, Slo
from cotenant.engine.engine import OnlineEngine
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.runtime.executor import Executor
from cotenant.scheduler.answers import AnswerLengths
from cotenant.scheduler.base import flight_ms, prompts_of
from cotenant.scheduler.chunking import prompt_budget
from cotenant.scheduler.turns import take_turns


class PromptArrangement:
    """``sizes_chunks``: prompt chunks are sized by the running requests' slack; otherwise the configured limit is all.
    ``answers``: what is known of their lengths."""

    def __init__(
        self,
        engine: OnlineEngine,
        executor: Executor,
        predictor: LatencyPredictor,
        slo: Slo,
        answers: AnswerLengths,
        *,
        sizes_chunks: bool,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._predictor = predictor
        self._slo = slo
        self._answers = answers
        self._sizes_chunks = sizes_chunks

    def arrange(self, requests: tuple[RequestView, ...], now_s: float, in_flight: InFlight | None) -> None:
        """Tell the engine, for the next batch. ``in_flight``: the one before."""
        budget, decodes = self._engine.max_num_batched_tokens, self._engine.decodes()
        prompts = prompts_of(requests)
        if self._sizes_chunks:
            budget = prompt_budget(
                self._predictor, decodes, requests, prompts, self._slo, now_s, budget, self._answers.short,
                ahead=in_flight, begins_after_ms=self._executor.begins_after_ms,
            )  # fmt: skip
        begins_ms = self._next_begins_ms(in_flight)
        num_seats = self._engine.max_num_seqs - self._engine.num_running
        turns = take_turns(self._predictor, decodes, prompts, self._slo, now_s, budget, begins_ms, num_seats)
        self._engine.limit_tokens(turns.budget)
        self._engine.put_off(turns.put_off)

    def _next_begins_ms(self, in_flight: InFlight | None) -> float:
        """From now until the next batch can begin, as far as is known."""
        wait_ms = self._executor.wait_ms
        if in_flight is None:
            return max(wait_ms, self._executor.begins_after_ms)  # which is measured with what it waits for
        return wait_ms + (flight_ms(self._predictor, in_flight) or 0.0)
