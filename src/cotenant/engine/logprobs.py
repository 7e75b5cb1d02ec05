"""Log-probabilities of the model's own distribution, before temperature, penalties and filters."""

from __future__ import annotations

import torch

from cotenant.core.request import TokenLogprobs
from cotenant.engine.sequence import Sequence
from cotenant.models.decoder import Decoder

# Prompt positions are scored in slices, so that their logits take at most this much memory whatever the vocabulary.
MAX_LOGITS_BYTES = 64 * 1024 * 1024


def token_logprobs(logprobs: torch.Tensor, token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Per row: the log-probability and rank of its token, and its ``num_top`` most likely tokens.

    ``logprobs``: fp32 [rows, vocab], a log-softmax. Rank 1 is the most likely; equal tokens share the better rank.
    """
    tokens = torch.tensor(token_ids, device=logprobs.device).unsqueeze(-1)  # [rows, 1]
    chosen = logprobs.gather(-1, tokens)  # [rows, 1]
    ranks: list[int] = ((logprobs > chosen).sum(dim=-1) + 1).tolist()
    values: list[float] = chosen.squeeze(-1).tolist()
    tops: list[tuple[tuple[int, float], ...]] = [()] * len(token_ids)
    widest = min(max(num_top), logprobs.shape[-1])
    if widest > 0:
        top_values, top_ids = logprobs.topk(widest, dim=-1)  # [rows, widest]
        pairs = zip(top_ids.tolist(), top_values.tolist(), num_top, strict=True)
        tops = [tuple(zip(ids[:count], top[:count], strict=True)) for ids, top, count in pairs]
    return [
        TokenLogprobs(token_id=token_id, logprob=value, rank=rank, top=top)
        for token_id, value, rank, top in zip(token_ids, values, ranks, tops, strict=True)
    ]


def score_prompt(decoder: Decoder, hidden: torch.Tensor, sequence: Sequence) -> None:
    """Extend ``sequence.prompt_logprobs`` by what the next rows of its prompt say about the token after each.

    ``hidden`` [count, hidden_size]: rows of its tokens ``num_computed : num_computed + count``. Positions that were
    scored before a preemption are left alone.
    """
    scored, num_top = sequence.prompt_logprobs, sequence.request.sampling.prompt_logprobs
    if scored is None or num_top is None:
        return
    stop = min(sequence.num_computed + len(hidden) + 1, sequence.num_prompt)
    num_rows = max(1, MAX_LOGITS_BYTES // (4 * decoder.spec.vocab_size))
    while len(scored) < stop:
        position = len(scored)
        tokens = list(sequence.request.prompt[position : min(position + num_rows, stop)])
        row = position - 1 - sequence.num_computed  # the row of the token before
        logits = decoder.logits(hidden[row : row + len(tokens)])  # [tokens, vocab]
        scored += token_logprobs(logits.log_softmax(dim=-1), tokens, [num_top] * len(tokens))
