"""Log-probabilities of the model's own distribution, before temperature, penalties and filters.

``score`` runs on the device and waits for nothing; ``to_token_logprobs`` reads its tensors when they are on the host.
Both are called for those rows alone whose requests want log-probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence as Row
from dataclasses import dataclass

import torch

from cotenant.core.request import TokenLogprobs
from cotenant.engine.assemble import HostBatch
from cotenant.engine.sequence import Sequence
from cotenant.models.decoder import Decoder

# Prompt positions are scored in slices, so that their logits take at most this much memory whatever the vocabulary.
MAX_LOGITS_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True, eq=False)
class LogprobTensors:
    """Per row, what is reported of its token; ``width`` is the most alternatives that any row wants."""

    chosen: torch.Tensor  # fp32 [rows], the token's log-probability
    ranks: torch.Tensor  # int64 [rows]; 1 is the most likely, equal tokens share the better rank
    top_values: torch.Tensor  # fp32 [rows, width], best first
    top_ids: torch.Tensor  # int64 [rows, width]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What to copy to the host, in the order in which ``to_token_logprobs`` takes it."""
        return self.chosen, self.ranks, self.top_values, self.top_ids


def score(logits: torch.Tensor, tokens: torch.Tensor, num_top: list[int]) -> LogprobTensors:
    """Score the token of each row, on the device, and find the row's ``num_top`` most likely tokens.

    ``logits``: raw [rows, vocab], of any floating type. ``tokens``: int64 [rows]; what is said of a row whose token is
    negative (``NOT_FINITE``) means nothing.
    """
    logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)  # [rows, vocab]
    chosen = logprobs.gather(-1, tokens.clamp(min=0).unsqueeze(-1))  # [rows, 1]
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    top_values, top_ids = logprobs.topk(min(max(num_top), logits.shape[-1]), dim=-1)  # [rows, width]
    return LogprobTensors(chosen.squeeze(-1), ranks, top_values, top_ids)


def to_token_logprobs(host: Row[torch.Tensor], token_ids: list[int], num_top: list[int]) -> list[TokenLogprobs]:
    """Per row: the log-probability and rank of its token, and its ``num_top`` most likely tokens.

    ``host``: ``LogprobTensors.tensors()`` after their copy to the host.
    """
    chosen, ranks, top_values, top_ids = (tensor.tolist() for tensor in host)
    return [
        TokenLogprobs(
            token_id=token_id, logprob=value, rank=rank, top=tuple(zip(ids[:count], top[:count], strict=True))
        )
        for token_id, value, rank, ids, top, count in zip(
            token_ids, chosen, ranks, top_ids, top_values, num_top, strict=True
        )
    ]


def look_at_prompts(decoder: Decoder, hidden: torch.Tensor, host: HostBatch) -> None:
    """Score prompts that want it, and mark sequences of which a row is not finite. Decodes are left to the sampler,
    which sees it too.

    ``hidden`` [at least the batch's tokens, hidden_size]: of all its tokens, before the final norm.
    """
    chunks = [entry for entry in host.entries if entry.count > 1 or not entry.sequence.is_decoding]
    if not chunks:
        return
    finite: list[bool] = hidden[: host.num_tokens].isfinite().all(dim=-1).tolist()
    for entry in chunks:
        rows = slice(entry.start, entry.start + entry.count)
        entry.sequence.is_broken |= not all(finite[rows])
        score_prompt(decoder, hidden[rows], entry.sequence)


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
        token_ids = list(sequence.request.prompt[position : min(position + num_rows, stop)])
        row = position - 1 - sequence.num_computed  # the row of the token before
        logits = decoder.logits(hidden[row : row + len(token_ids)])  # [tokens, vocab]
        wanted = [num_top] * len(token_ids)
        found = score(logits, torch.tensor(token_ids, device=logits.device), wanted)
        scored += to_token_logprobs(found.tensors(), token_ids, wanted)
