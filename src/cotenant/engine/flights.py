"""The batches on their way, in the order in which they were launched."""

from __future__ import annotations

from collections import deque

import torch

from cotenant.device.readback import Interval
from cotenant.engine.flight import Flight, OnlineStep, RanLayers
from cotenant.engine.logprobs import look_at_prompts
from cotenant.engine.runner import Runner, sampled_logits
from cotenant.engine.sampler import Sampler
from cotenant.engine.sequence import PENDING
from cotenant.models.decoder import Decoder


class Flights:
    """Puts steps on the device with ``runner``, each with the choice of its next tokens behind it."""

    def __init__(self, decoder: Decoder, runner: Runner, sampler: Sampler) -> None:
        self.runner = runner
        self._decoder = decoder
        self._sampler = sampler
        self._flights: deque[Flight] = deque()
        self._begun: tuple[Flight, torch.Tensor | None] | None = None  # what a launch that ran out of memory had done

    def __len__(self) -> int:
        return len(self._flights)

    @property
    def has_landed(self) -> bool:
        """Whether the results of the oldest are here."""
        return self._flights[0].has_landed

    def launch(self, step: OnlineStep, ran: RanLayers | None, behind: torch.cuda.Event | None) -> None:
        """See ``OnlineEngine.launch``. The step's sequences count what it computes as computed from now on."""
        self._begun = self._begun or self._begin(step, ran, behind)
        flight, logits = self._begun
        if logits is not None:
            flight.sample(self._sampler, logits)
        flight.interval.end()
        self._begun = None
        self._flights.append(flight)
        for entry in step.host.entries:
            sequence = entry.sequence
            sequence.num_computed += entry.count
            if entry.samples:
                sequence.tokens.append(PENDING)
                sequence.num_pending += 1

    def discard(self) -> None:
        """The step that a launch ran out of memory for will not be launched again."""
        self._begun = None

    def take_oldest(self) -> Flight:
        """It is no longer in flight for anybody but the caller."""
        return self._flights.popleft()

    def _begin(
        self, step: OnlineStep, ran: RanLayers | None, behind: torch.cuda.Event | None
    ) -> tuple[Flight, torch.Tensor | None]:
        """All that comes before the choice of tokens: the batch on its way, and its logits."""
        host = step.host
        interval = Interval(self._decoder.device) if ran is None else ran.interval
        # Of a request that generates nothing no sampler sees whether its numbers are finite.
        keep_hidden = any(
            entry.sequence.prompt_logprobs is not None or entry.sequence.request.sampling.max_tokens == 0
            for entry in host.entries
        )
        if ran is None:
            logits, hidden = self.runner.forward(host, interval, keep_hidden=keep_hidden)
        else:
            logits, hidden = sampled_logits(self._decoder, host, ran.hidden), ran.hidden
        if hidden is not None:
            look_at_prompts(self._decoder, hidden, host)
        return Flight(step, interval, self._flights[-1].interval if self._flights else None, behind), logits
