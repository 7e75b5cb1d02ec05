"""A request: one generation, online or offline, and what it asks of the sampler."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """Why a sequence ended, in the API's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. Ranges are checked where the request enters (``api``).

    ``temperature`` 0 is greedy. ``top_k`` 0 means all tokens. ``logprobs`` is the number of alternatives
    reported beside the sampled token (0: only the sampled one's; None: no logprobs at all), of the
    distribution before temperature and filters. ``prompt_logprobs`` is the same for the prompt's tokens. Before
    ``min_tokens`` tokens no token is chosen that would end the sequence, or would if ``ignore_eos`` were not set.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """A LoRA adapter by its served name and the folder that holds it in PEFT's format. ``generation``: 0 while the name
    serves these weights; afterwards a number of their own, known to those alone who hold them."""

    name: str
    path: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. ``priority``: lower runs earlier. ``arrival_s``: of ``time.monotonic``, which all
    processes of a machine share, and nobody sets. ``uses_prefix_cache``: finds KV pages there, and leaves its own, for
    requests with the same ``cache_salt`` alone."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    arrival_s: float
    adapter: AdapterRef | None = None
    priority: int = 0
    uses_prefix_cache: bool = True
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token there, and the most likely alternatives in order."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely token
    top: tuple[tuple[int, float], ...] = ()


def stretches(entries: Sequence[TokenLogprobs | None], most_values: int) -> Iterator[slice]:
    """Of a request's tokens, all with as many alternatives: consecutive ones with so many probabilities at most, one
    token at least."""
    num_tokens = max(1, most_values // max(1, num_values(entries[-1:])))
    return (slice(start, start + num_tokens) for start in range(0, len(entries), num_tokens))


def num_values(entries: Sequence[TokenLogprobs | None]) -> int:
    """Probabilities of a request's tokens, all with as many alternatives."""
    num_alternatives = max((len(entry.top) for entry in entries[-1:] if entry is not None), default=0)
    return len(entries) * (1 + num_alternatives)


class SequenceOutput(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one iteration added to a sequence. One is made, sent and read for every token: hence no dataclass.

    ``prompt_logprobs`` comes once, with the first output; its first entry is None (nothing precedes it). So does
    ``queue_s``: from ``Request.arrival_s`` until the first iteration that worked on the request, and
    ``num_cached_tokens``: those of the prompt that the KV cache held when it was admitted.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    queue_s: float | None = None
    num_cached_tokens: int | None = None
