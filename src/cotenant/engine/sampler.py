"""Choosing the next token of each row of logits, on the device that the logits are on.

Order per row: penalties, logit bias (minus infinity for ends that come too early), temperature, min_p, top_k, top_p,
then one draw by inverting the cumulative distribution. A row's token depends on its own logits and its own sequence
alone, whatever else is in the batch.

What a token changes for the next one (penalty counts, the next step's input) is kept on the device by seat: a step can
be launched before the host has seen the tokens of the step before. All work goes to the current stream, in order.
"""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cotenant.core.request import SamplingParams
from cotenant.engine.sampling_state import SamplingState, uniforms
from cotenant.models.products import has_triton

NOT_FINITE = -1

# An entry of the table of counts: how often the seat's sequence generated the token, and whether its prompt has it.
COUNT_MASK = (1 << 24) - 1
IN_PROMPT = 1 << 24

# Columns of ``SamplingPlan.figures``.
TEMPERATURE, MIN_P, TOP_P, TOP_K, UNIFORM = range(5)

_Array = npt.NDArray[Any]


@dataclass(slots=True)
class SampleRow:
    """One row of logits: whose it is, that sequence's seat, and how many tokens it has generated before this one.

    A seat of ``num_seats`` stands for no seat: the token is only returned. Penalties need a seat.
    """

    state: SamplingState
    seat: int
    index: int


@dataclass(slots=True, eq=False)
class SamplingPlan:
    """What ``Sampler.sample`` needs of a batch's rows, on the device. What no row needs is None."""

    seats: torch.Tensor  # int64 [rows]
    order: torch.Tensor  # int64 [rows]: rows that are sampled as they are, then those with penalties or a bias
    num_adjusted: int = 0
    scales: bool = False  # a row's temperature is neither 0 nor 1
    has_min_p: bool = False
    figures: torch.Tensor | None = None  # fp32 [rows, 5]; temperature 0: greedy, top_k infinite: all
    has_repetition: bool = False
    has_counts: bool = False  # a frequency or presence penalty
    drawn: torch.Tensor | None = None  # int64 [drawn]: rows that are not greedy
    filtered: torch.Tensor | None = None  # int64 [filtered]: which of those have top_k or top_p
    penalties: torch.Tensor | None = None  # fp32 [adjusted, 3]: repetition, frequency, presence
    biased: torch.Tensor | None = None  # int64 [2, entries]: which of the adjusted, token
    bias: torch.Tensor | None = None  # fp32 [entries]

    @property
    def adjusted(self) -> torch.Tensor:
        """int64 [adjusted], rows with penalties or a bias."""
        return self.order[len(self.order) - self.num_adjusted :]


class Sampler:
    """Chooses next tokens; keeps by seat what it needs between tokens.

    ``last_tokens``: int64 [num_seats + 1] on the device, each seat's last token; the last entry takes those of rows
    without a seat. On CUDA the work is done by Triton kernels where Triton is installed, otherwise by torch.
    """

    def __init__(self, num_seats: int, vocab_size: int, device: torch.device) -> None:
        self.last_tokens = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)
        self._vocab_size = vocab_size
        self._device = device
        self._counts: torch.Tensor | None = None  # int32 [num_seats + 1, vocab], from the first penalty on
        self._kernels: Any = None
        if device.type == "cuda" and has_triton():
            self._kernels = importlib.import_module("cotenant.engine.kernels.sample")

    def open(self, seat: int, state: SamplingState, num_prompt: int, tokens: list[int]) -> None:
        """A sequence takes a seat: ``tokens`` are its first ``num_prompt`` of the prompt and all generated so far."""
        if not state.has_penalties:
            return
        self._make_counts()
        assert self._counts is not None
        known = np.array(tokens, dtype=np.int64)
        counts = np.bincount(known[num_prompt:], minlength=self._vocab_size).astype(np.int32)  # [vocab]
        counts[known[:num_prompt]] |= IN_PROMPT
        sent = torch.from_numpy(counts)
        if self._device.type == "cuda":
            sent = sent.pin_memory()
        self._counts[seat].copy_(sent, non_blocking=True)  # and no memory of the device is asked for, which may be gone

    def plan(self, rows: list[SampleRow]) -> SamplingPlan:
        """All that the host knows of these rows, in at most one copy to the device."""
        states = [row.state for row in rows]
        arrays: dict[str, _Array] = {
            "seats": np.array([row.seat for row in rows], dtype=np.int64),
            "order": np.arange(len(rows)),
        }
        adjusted = [place for place, state in enumerate(states) if state.num_adjusted]
        if adjusted:
            adjusted = [place for place in adjusted if rows[place].index < states[place].num_adjusted]
        drawn = [place for place, state in enumerate(states) if not state.greedy]
        if adjusted:
            arrays["order"] = np.concatenate((np.delete(arrays["order"], adjusted), adjusted))
            arrays |= _adjustments([rows[place] for place in adjusted])
        if drawn or (adjusted and self._kernels is not None):
            arrays["figures"] = _figures(rows)
        if drawn:
            arrays["drawn"] = np.array(drawn)
            filtered = [place for place, row in enumerate(drawn) if states[row].filters]
            if filtered:
                arrays["filtered"] = np.array(filtered)
        sent = dict(zip(arrays, _send(list(arrays.values()), self._device), strict=True))
        plan = SamplingPlan(num_adjusted=len(adjusted), **sent)  # type: ignore[arg-type]
        if drawn:
            plan.scales = any(states[row].params.temperature != 1.0 for row in drawn)
            plan.has_min_p = any(states[row].params.min_p > 0 for row in drawn)
        if "penalties" in arrays:
            plan.has_repetition = bool((arrays["penalties"][:, 0] != 1.0).any())
            plan.has_counts = bool(arrays["penalties"][:, 1:].any())
        return plan

    def sample(self, logits: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
        """The next token of each row, int64 [rows]; ``NOT_FINITE`` where the row's largest logit is NaN or infinite.

        ``logits`` [rows, vocab] of any floating type, left as they are. Each seat's token goes to ``last_tokens`` (0
        for ``NOT_FINITE``) and is counted. Nothing waits for the device.
        """
        if self._kernels is not None:
            chosen: torch.Tensor = self._kernels.choose(logits, plan, self._counts, self.last_tokens)
        else:
            chosen = _choose(logits, plan, self._counts)
            self.last_tokens.index_copy_(0, plan.seats, chosen.clamp(min=0))
        if plan.penalties is not None:
            assert self._counts is not None, "a row with penalties has a seat that was opened"
            seats = plan.seats[plan.adjusted]
            entries = seats * self._vocab_size + self.last_tokens[seats]
            self._counts.view(-1).scatter_add_(0, entries, torch.ones_like(entries, dtype=torch.int32))
        return chosen

    def _make_counts(self) -> None:
        if self._counts is None:
            shape = (len(self.last_tokens), self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)

    def warm_up(self, dtype: torch.dtype) -> None:
        """Compile the kernels for logits of this type, so that no request waits for that; on CUDA take the memory that
        penalties need, so that no request finds it gone."""
        if self._device.type == "cuda":
            self._make_counts()
        if self._kernels is None:
            return
        greedy, drawn, biased = (
            SamplingState(params)
            for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(logit_bias={0: 0.0}))
        )
        logits = torch.zeros((2, self._vocab_size), dtype=dtype, device=self._device)
        no_seat = len(self.last_tokens) - 1
        for states in ((greedy, greedy), (drawn, biased)):
            self.sample(logits, self.plan([SampleRow(state, no_seat, 0) for state in states]))
        nothing = torch.zeros(1, dtype=torch.int64, device=self._device)
        neutral = torch.ones((1, 3), device=self._device)
        self._kernels.adjust(logits, nothing, nothing, neutral, torch.zeros_like(logits, dtype=torch.int32))


def _figures(rows: list[SampleRow]) -> _Array:
    figures = np.empty((len(rows), 5), dtype=np.float32)
    figures[:, :UNIFORM] = [row.state.figures for row in rows]
    keys = np.array([row.state.key for row in rows], dtype=np.uint64)
    figures[:, UNIFORM] = uniforms(keys, np.array([row.index for row in rows], dtype=np.uint64))
    return figures


def _adjustments(rows: list[SampleRow]) -> dict[str, _Array]:
    arrays: dict[str, _Array] = {}
    if any(row.state.has_penalties for row in rows):
        arrays["penalties"] = np.array([row.state.penalties for row in rows], dtype=np.float32)
    tokens, values = zip(*[row.state.bias_at(row.index) for row in rows], strict=True)
    sizes = [len(each) for each in tokens]
    if any(sizes):
        arrays["biased"] = np.stack((np.repeat(np.arange(len(rows)), sizes), np.concatenate(tokens)))
        arrays["bias"] = np.concatenate(values)
    return arrays


def _send(arrays: list[_Array], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors; on CUDA in one copy that the host does not wait for.

    The pinned buffer comes from torch's caching allocator, which hands it out again only after its copy is done.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array) for array in arrays]
    tensors = [torch.from_numpy(array) for array in arrays]
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + (array.nbytes + 15) // 16 * 16)
    staged = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=True)
    for start, array in zip(starts, arrays, strict=False):
        staged.numpy()[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
    sent = staged.to(device, non_blocking=True)
    return [
        sent[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, tensors, strict=False)
    ]


# The same choice by torch's own operations: on the CPU, and where Triton is missing.


def _choose(logits: torch.Tensor, plan: SamplingPlan, counts: torch.Tensor | None) -> torch.Tensor:
    if plan.num_adjusted:
        logits = _adjust(logits, plan, counts)
    peak, best = _peaks(logits)
    drawn, chosen = plan.drawn, best
    if drawn is not None and plan.figures is not None:
        if len(drawn) == len(best):
            chosen = _draw(logits, peak, best, plan.figures, plan)
        else:
            few = _draw(logits[drawn], peak[drawn], best[drawn], plan.figures[drawn], plan)
            chosen = best.index_copy(0, drawn, few)
    if chosen.device.type == "cpu" and math.isfinite(peak.sum()):
        return chosen
    return chosen.masked_fill(~peak.isfinite(), NOT_FINITE)


def _peaks(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row's largest logit (NaN wins) and its first place. On the CPU by numpy, which is several times faster."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return logits.amax(dim=-1), torch.from_numpy(logits.numpy().argmax(-1))
    return logits.max(dim=-1)


def _adjust(logits: torch.Tensor, plan: SamplingPlan, counts: torch.Tensor | None) -> torch.Tensor:
    """Repetition over prompt and generated tokens (as transformers), frequency and presence over generated (OpenAI)."""
    rows = plan.adjusted
    values = logits.index_select(0, rows).float()  # [adjusted, vocab]
    if plan.penalties is not None and counts is not None:
        repetition, frequency, presence = plan.penalties.unsqueeze(-1).unbind(1)  # [adjusted, 1] each
        entries = counts.index_select(0, plan.seats[rows])  # [adjusted, vocab]
        if plan.has_repetition:
            repeated = torch.where(values > 0, values / repetition, values * repetition)
            values = torch.where(entries > 0, repeated, values)
        if plan.has_counts:
            times = entries.bitwise_and_(COUNT_MASK)
            values.sub_(frequency * times).sub_(presence * (times > 0))
    if plan.biased is not None and plan.bias is not None:
        values[plan.biased[0], plan.biased[1]] += plan.bias
    return values if len(rows) == len(logits) else logits.float().index_copy(0, rows, values)


def _draw(
    logits: torch.Tensor,
    peak: torch.Tensor,
    best: torch.Tensor,
    figures: torch.Tensor,
    plan: SamplingPlan,
) -> torch.Tensor:
    """One token per row: the first whose cumulative probability exceeds the row's number. [rows]"""
    columns = figures.unsqueeze(-1)  # [rows, 5, 1]
    logits = logits.float()
    if plan.scales:
        logits = (logits - peak.unsqueeze(-1)).div_(columns[:, TEMPERATURE])
    # Not exp(): where a vectorised loop ends depends on the number of rows, and its last few results with it.
    weights = logits.softmax(dim=-1)  # [rows, vocab]
    if plan.has_min_p:
        weights.masked_fill_(weights < columns[:, MIN_P] * weights.amax(dim=-1, keepdim=True), 0.0)
    filtered = plan.filtered
    if filtered is not None and len(filtered) == len(weights):
        _keep_likeliest(weights, columns[:, TOP_K], columns[:, TOP_P])
    elif filtered is not None:
        kept = weights[filtered]
        _keep_likeliest(kept, columns[filtered, TOP_K], columns[filtered, TOP_P])
        weights[filtered] = kept
    cumulative = weights.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, columns[:, UNIFORM] * cumulative[:, -1:], right=True)  # [rows, 1]
    if index.device.type != "cpu":
        # A parallel sum is not quite monotonic: rounding can point past the end, or at a probability of 0.
        index.clamp_(max=weights.shape[-1] - 1)
        index = torch.where(weights.gather(-1, index) > 0, index, best.unsqueeze(-1))
    return index.squeeze(-1)


def _keep_likeliest(weights: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> None:
    """Set to 0, in place, what lies outside top_k, and outside top_p of what top_k left.

    Only values are sorted, and all tokens as likely as the last one kept are kept.
    """
    vocab_size = weights.shape[-1]
    ordered = _descending(weights)  # [rows, vocab]
    place = torch.arange(vocab_size, device=weights.device)  # [vocab]
    ordered.masked_fill_(place >= top_k, 0.0)
    mass = top_p * ordered.sum(dim=-1, keepdim=True)
    inside = (ordered.cumsum(dim=-1) - ordered < mass) & (ordered > 0)  # a token is in if those before it fall short
    last = inside.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)  # [rows, 1]
    weights.masked_fill_(weights < ordered.gather(-1, last), 0.0)


def _descending(values: torch.Tensor) -> torch.Tensor:
    """Each row sorted. On the CPU by numpy, whose vectorised sort is many times faster than torch's."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)[:, ::-1].copy())
    return values.sort(dim=-1, descending=True).values
