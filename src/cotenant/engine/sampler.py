"""Choosing the next token of each row of logits, on the device that the logits are on.

Order per row: penalties, logit bias, temperature, min_p, top_k, top_p, then one draw by inverting the cumulative
distribution. A row's token depends on its own logits and its own sequence alone, whatever else is in the batch.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from cotenant.engine.sampling_state import SamplingState

NOT_FINITE = -1


def sample(logits: torch.Tensor, states: list[SamplingState]) -> list[int]:
    """The next token of each row; ``NOT_FINITE`` for a row whose largest logit is NaN or infinite.

    ``logits``: fp32 [rows, vocab], overwritten where penalties or a bias apply.
    """
    peak, best = logits.max(dim=-1)  # [rows]; NaN wins
    if any(state.adjusts_logits for state in states):
        _apply_penalties(logits, states)
        _apply_bias(logits, states)
        best = logits.argmax(dim=-1)
    drawn = [row for row, state in enumerate(states) if not state.greedy]
    if len(drawn) == len(states):
        best = _draw(logits, best, states)
    elif drawn:
        index = torch.tensor(drawn, device=logits.device)
        best[index] = _draw(logits[index], best[index], [states[row] for row in drawn])
    chosen: list[int] = torch.where(peak.abs() < math.inf, best, NOT_FINITE).tolist()
    return chosen


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=like.device).unsqueeze(-1)  # [rows, 1]


def _draw(logits: torch.Tensor, best: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """One token per row: the first whose cumulative probability exceeds the sequence's next number. [rows]

    Rounding can point past the end, or (a parallel sum is not quite monotonic) at a probability of 0: then ``best``.
    """
    weights = _weights(logits, states)  # [rows, vocab]
    cumulative = weights.cumsum(dim=-1)
    uniform = _column([state.uniform() for state in states], logits)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)  # [rows, 1]
    index.clamp_(max=weights.shape[-1] - 1)
    return torch.where(weights.gather(-1, index) > 0, index, best.unsqueeze(-1)).squeeze(-1)


def _weights(logits: torch.Tensor, states: list[SamplingState]) -> torch.Tensor:
    """Probabilities after temperature and filters; what was filtered out is 0, and a row need not sum to 1."""
    if any(state.params.temperature != 1.0 for state in states):
        logits = logits / _column([state.params.temperature for state in states], logits)
    weights = torch.softmax(logits, dim=-1)  # [rows, vocab]
    if any(state.params.min_p > 0 for state in states):
        floor = _column([state.params.min_p for state in states], logits) * weights.amax(dim=-1, keepdim=True)
        weights.masked_fill_(weights < floor, 0.0)
    vocab_size = logits.shape[-1]
    filtered = [
        row for row, state in enumerate(states) if state.params.top_p < 1.0 or 0 < state.params.top_k < vocab_size
    ]
    if len(filtered) == len(states):
        _keep_likeliest(weights, states)
    elif filtered:
        index = torch.tensor(filtered, device=logits.device)
        kept = weights[index]
        _keep_likeliest(kept, [states[row] for row in filtered])
        weights[index] = kept
    return weights


def _keep_likeliest(weights: torch.Tensor, states: list[SamplingState]) -> None:
    """Set to 0, in place, what lies outside top_k, and outside top_p of what top_k left.

    Only values are sorted, and all tokens as likely as the last one kept are kept.
    """
    vocab_size = weights.shape[-1]
    ordered = _descending(weights)  # [rows, vocab]
    limits = _column([float(state.params.top_k or vocab_size) for state in states], weights)
    place = torch.arange(vocab_size, device=weights.device)  # [vocab]
    ordered.masked_fill_(place >= limits, 0.0)
    mass = _column([state.params.top_p for state in states], weights) * ordered.sum(dim=-1, keepdim=True)
    inside = (ordered.cumsum(dim=-1) - ordered < mass) & (ordered > 0)  # a token is in if those before it fall short
    last = inside.sum(dim=-1, keepdim=True).sub_(1).clamp_(min=0)  # [rows, 1]
    weights.masked_fill_(weights < ordered.gather(-1, last), 0.0)


def _descending(values: torch.Tensor) -> torch.Tensor:
    """Each row sorted. On the CPU by numpy, whose vectorised sort is many times faster than torch's."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1)[:, ::-1].copy())
    return values.sort(dim=-1, descending=True).values


def _apply_penalties(logits: torch.Tensor, states: list[SamplingState]) -> None:
    """Repetition over prompt and generated tokens (as transformers), frequency and presence over generated (OpenAI)."""
    counted = [(row, state, state.counts) for row, state in enumerate(states) if state.counts is not None]
    if not counted:
        return
    sizes = [len(counts.tokens) for _, _, counts in counted]
    rows, tokens = torch.from_numpy(
        np.stack((np.repeat([row for row, _, _ in counted], sizes), np.concatenate([c.tokens for _, _, c in counted])))
    ).to(logits.device)  # [2, entries], each (row, token) once
    figures = np.repeat(
        [
            [state.params.repetition_penalty for _, state, _ in counted],
            [state.params.frequency_penalty for _, state, _ in counted],
            [state.params.presence_penalty for _, state, _ in counted],
        ],
        sizes,
        axis=1,
    ).astype(np.float32)
    counts = np.concatenate([c.counts for _, _, c in counted])
    repetition, frequency, presence, times = torch.from_numpy(np.vstack((figures, counts))).to(logits.device)
    values = logits[rows, tokens]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[rows, tokens] = values - frequency * times - presence * (times > 0)


def _apply_bias(logits: torch.Tensor, states: list[SamplingState]) -> None:
    biased = [(row, state) for row, state in enumerate(states) if len(state.bias_tokens)]
    if not biased:
        return
    sizes = [len(state.bias_tokens) for _, state in biased]
    rows = torch.from_numpy(np.repeat([row for row, _ in biased], sizes)).to(logits.device)
    tokens = torch.from_numpy(np.concatenate([state.bias_tokens for _, state in biased])).to(logits.device)
    values = torch.from_numpy(np.concatenate([state.bias_values for _, state in biased])).to(logits.device)
    logits[rows, tokens] += values
