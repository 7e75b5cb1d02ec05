"""A batch on its way: launched on the device, not yet seen by the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cotenant.core.plan import BatchShape
from cotenant.core.request import SequenceOutput, TokenLogprobs
from cotenant.device.readback import Interval, Readback
from cotenant.engine.assemble import Entry, HostBatch
from cotenant.engine.logprobs import score, to_token_logprobs
from cotenant.engine.sampler import Sampler, SampleRow


@dataclass(frozen=True, slots=True, eq=False)
class OnlineStep:
    """A batch that is ready to be launched."""

    host: HostBatch
    shape: BatchShape


@dataclass(frozen=True, slots=True, eq=False)
class RanLayers:
    """All layers of a batch, run by somebody else: ``hidden`` [tokens, hidden_size], where rows after the batch's own
    (a fused segment's) are ignored. ``interval`` began with the first of them."""

    hidden: torch.Tensor
    interval: Interval


@dataclass(frozen=True, slots=True)
class Collected:
    """What a batch produced, in its order. ``device_ms``: how long it ran, without what it waited for; ``gap_ms``: how
    long the device had nothing of the online tenant's before it (None: nothing had been launched behind the batch
    before). ``overtook``: it ended before what it was to wait for, and its time is that of both. ``waited``: it began
    before that ended. ``begun_s``: when its first kernels were launched (``time.perf_counter``)."""

    outputs: list[SequenceOutput]
    shape: BatchShape
    device_ms: float
    gap_ms: float | None
    overtook: bool
    waited: bool
    begun_s: float


class Iterated(NamedTuple):
    """One iteration without best-effort work: what was launched in it, and what was collected."""

    launched: OnlineStep | None
    collected: list[Collected]

    @property
    def outputs(self) -> list[SequenceOutput]:
        """What was put out in it."""
        return [output for collected in self.collected for output in collected.outputs]


class Flight:
    """The tokens that a launched batch chooses, and their log-probabilities where they are wanted.

    ``follows``: the interval of the batch that was still in flight when this one was launched. ``behind``: when the
    device gets to it, after other work; its time begins there, if it had not begun later.
    """

    def __init__(
        self, step: OnlineStep, interval: Interval, follows: Interval | None, behind: torch.cuda.Event | None = None
    ) -> None:
        self.step = step
        self._sampling = [entry for entry in step.host.entries if entry.samples]
        self.interval = interval
        self.follows = follows
        self._behind = behind
        self._scored: list[int] = []
        self._num_top: list[int] = []
        for row, entry in enumerate(self._sampling):
            num_top = entry.sequence.request.sampling.logprobs
            if num_top is not None:
                self._scored.append(row)
                self._num_top.append(num_top)
        self._tokens: torch.Tensor | None = None
        self._readback = Readback([torch.empty(0, dtype=torch.int64)])

    def sample(self, sampler: Sampler, logits: torch.Tensor) -> None:
        """Launch the choice of the next tokens. ``logits`` [entries that choose one, vocab].

        May be called again after torch.OutOfMemoryError, with the same logits: no token is counted twice.
        """
        if self._tokens is None:
            rows = []
            for entry in self._sampling:
                sequence = entry.sequence
                assert sequence.seat is not None
                rows.append(SampleRow(sequence.sampling_state, sequence.seat, sequence.num_generated))
            self._tokens = sampler.sample(logits, sampler.plan(rows))
        tokens = self._tokens
        tensors = [tokens]
        if self._scored:
            index = torch.tensor(self._scored)
            if logits.is_cuda:
                index = index.pin_memory().to(logits.device, non_blocking=True)
            tensors += score(logits[index], tokens[index], self._num_top).tensors()
        self._readback = Readback(tensors)

    @property
    def has_landed(self) -> bool:
        """Whether there is nothing left to wait for: also of a batch that chooses no token."""
        return self._readback.is_here and self.interval.has_ended

    def results(self) -> list[tuple[Entry, int | None, TokenLogprobs | None]]:
        """Wait for the batch: each entry with the token it chose (``NOT_FINITE`` if there is none to choose, None if it
        does not choose) and that token's log-probabilities if they are wanted."""
        tokens, *scores = self._readback.wait()
        token_ids: list[int] = tokens.tolist()
        logprobs: dict[int, TokenLogprobs] = {}
        if scores:
            chosen = [max(0, token_ids[row]) for row in self._scored]
            logprobs = dict(zip(self._scored, to_token_logprobs(scores, chosen, self._num_top), strict=True))
        rows = enumerate(token_ids)
        results: list[tuple[Entry, int | None, TokenLogprobs | None]] = []
        for entry in self.step.host.entries:
            row, token_id = next(rows) if entry.samples else (-1, None)
            results.append((entry, token_id, logprobs.get(row)))
        return results

    def device_ms(self) -> float:
        """How long it ran, once it did."""
        return self.interval.milliseconds(self._behind)

    @property
    def overtook(self) -> bool:
        """Whether it ended before the device was to get to it."""
        return self._behind is not None and self.interval.overtook(self._behind)

    @property
    def waited(self) -> bool:
        """Whether it had begun when the device got to it."""
        return self._behind is not None and self.interval.waited(self._behind)

    def gap_ms(self) -> float | None:
        """From the end of the batch before to the beginning of this one, if the two were launched back to back."""
        return None if self.follows is None else self.interval.gap_ms(self.follows)
