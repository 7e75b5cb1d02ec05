"""Requests of all kinds, and whether what the engine answers is what transformers in float32 would have.

Half precision rounds by how a batch is computed: with other neighbours or without graphs a sequence may get another
token where two are nearly as likely. So runs are compared token by token only where every batch is the same; elsewhere
each token is held against transformers in float32 on the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from cotenant.core.request import Request
from gpu.support import DEVICE, Model, Outputs, logits_of, prompt, request, tokens

PAGE_TOKENS = 16
GRAPH_SIZES = (1, 4, 16)


def assert_near_greedy(model: Model, requests: Sequence[Request], outputs: Outputs, rounding: float) -> None:
    """Each token's float32 logit is the best one's but for what rounding explains: an error of each of the two."""
    gaps = []
    for one in requests:
        chosen = tokens(outputs[one.request_id])
        assert len(chosen) == one.sampling.max_tokens
        logits = logits_of(model.reference, [*one.prompt, *chosen[:-1]])[len(one.prompt) - 1 :]
        found = logits.gather(-1, torch.tensor(chosen, device=DEVICE).unsqueeze(-1))  # [tokens, 1]
        gaps.append(logits.amax(-1) - found.squeeze(-1))
    all_gaps = torch.cat(gaps)
    assert all_gaps.max() < 3 * rounding
    assert (all_gaps == 0).float().mean() > 0.9


def drawn_requests() -> list[Request]:
    """Those with penalties choose among few tokens, which come again and again."""
    few = dict.fromkeys(range(100, 1000, 25), 15.0)
    options: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {"temperature": 0.5, "top_p": 0.6},
        {"logit_bias": few, "repetition_penalty": 1.5},
        {"logit_bias": few, "frequency_penalty": 0.6, "presence_penalty": 1.5},
        {"logit_bias": few, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2, "frequency_penalty": 0.1},
    ]
    return [
        request(
            prompt(5 + (29 * index) % 80, index),
            40,
            seed=index,
            logprobs=0,
            **({"temperature": 1.0} | options[index % 5]),
        )
        for index in range(11)
    ]
