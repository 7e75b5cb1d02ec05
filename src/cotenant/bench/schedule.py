"""What an open-loop run sends and when: arrivals, lengths and prompts, the same ones for the same seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from cotenant.bench.traces import HASH_BLOCK_TOKENS, Trace
from cotenant.core.errors import InvalidInputError

# Below lie special tokens and bytes in most vocabularies.
_FIRST_TOKEN_ID = 100


class PlannedRequest(msgspec.Struct, frozen=True):
    """One request of a run: due ``due_s`` after its start, prompt and answer of these many tokens."""

    index: int
    due_s: float
    input_len: int
    output_len: int
    model: str
    hash_ids: tuple[int, ...] = ()


def from_trace(trace: Trace, time_scale: float, models: Sequence[str], seed: int) -> list[PlannedRequest]:
    """The trace's requests, ``time_scale`` times as fast, each for one of ``models``, drawn evenly."""
    drawn = _draw_models(models, len(trace.requests), seed)
    return [
        PlannedRequest(index, request.at_s / time_scale, request.input_len, request.output_len, model, request.hash_ids)
        for index, (request, model) in enumerate(zip(trace.requests, drawn, strict=True))
    ]


def synthetic(
    num_requests: int,
    rate_per_s: float,
    burstiness: float,
    *,
    input_len: int,
    output_len: int,
    models: Sequence[str],
    seed: int,
) -> list[PlannedRequest]:
    """Requests of one shape at a mean rate, as `vllm bench serve` spaces them.

    Gaps follow a gamma distribution of shape ``burstiness`` (1: a Poisson process, less: bursts, infinite: even),
    scaled so that the last one is due at ``num_requests / rate_per_s``. An infinite rate sends all at once. Raises
    InvalidInputError for a burstiness so small that no gap is left to be scaled.
    """
    drawn = _draw_models(models, num_requests, seed)
    due_s = _arrivals(num_requests, rate_per_s, burstiness, seed)
    return [
        PlannedRequest(index, due, input_len, output_len, model)
        for index, (due, model) in enumerate(zip(due_s, drawn, strict=True))
    ]


def _arrivals(num_requests: int, rate_per_s: float, burstiness: float, seed: int) -> list[float]:
    if math.isinf(rate_per_s):
        return [0.0] * num_requests
    if math.isinf(burstiness):
        gaps = np.ones(num_requests)
    else:
        gaps = np.random.default_rng((seed, 0)).gamma(burstiness, size=num_requests)
    times = np.cumsum(gaps)
    span = float(times[-1])
    scale = num_requests / rate_per_s / span if span > 0 else math.inf
    if math.isinf(scale):
        raise InvalidInputError(
            f"--burstiness {burstiness:g} is too small: it leaves no gap between {num_requests} requests that could be "
            "told from 0; give 0.01 or more, or --request-rate inf to send all at once"
        )
    arrivals: list[float] = (times * scale).tolist()
    return arrivals


def _draw_models(models: Sequence[str], count: int, seed: int) -> list[str]:
    return [models[index] for index in np.random.default_rng((seed, 1)).integers(len(models), size=count)]


class PromptMaker:
    """Random prompts of exact lengths as token ids.

    ``nonce`` keeps the prompts of several runs on one server apart: a prompt that was sent before may be answered from
    a prefix cache. Blocks with the same hash id have the same tokens within a run.
    """

    def __init__(self, vocab_size: int, seed: int, nonce: int) -> None:
        self._low = min(_FIRST_TOKEN_ID, vocab_size // 2)
        self._high = vocab_size
        self._seed = (seed, nonce)

    def make(self, request: PlannedRequest) -> list[int]:
        """Token ids, ``request.input_len`` of them."""
        shared = [self._tokens(HASH_BLOCK_TOKENS, 2, hash_id) for hash_id in request.hash_ids]
        rest = request.input_len - HASH_BLOCK_TOKENS * len(shared)
        parts = shared if rest <= 0 else [*shared, self._tokens(rest, 3, request.index)]
        token_ids: list[int] = np.concatenate(parts)[: request.input_len].tolist()
        return token_ids

    def _tokens(self, count: int, kind: int, number: int) -> npt.NDArray[np.int64]:
        return np.random.default_rng((*self._seed, kind, number)).integers(self._low, self._high, size=count)


def request_body(request: PlannedRequest, token_ids: Sequence[int]) -> bytes:
    """The JSON body of a streamed ``/v1/completions`` request that generates exactly ``output_len`` tokens."""
    return msgspec.json.encode(
        {
            "model": request.model,
            "prompt": token_ids,
            "max_tokens": request.output_len,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
