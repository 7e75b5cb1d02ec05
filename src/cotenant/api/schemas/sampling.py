"""The parameters that chat and text completions share, and what the worker is told of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import SamplingParams

MAX_CHOICES = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
# Far more tokens than any context has, and few enough that looking at each of them holds nobody up.
MAX_TOKEN_IDS = 1 << 20
MIN_REPETITION_PENALTY = 0.01  # logits are divided by it, in float32
_INT32 = 2**31 - 1
_SEED_VALUES = 2**63

Text = Annotated[str, Meta(min_length=1, max_length=1024)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Count = Annotated[int, Meta(ge=1, le=_INT32)]


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """``include_obfuscation`` is accepted and changes nothing."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Fields of a body that both kinds of completion take; ranges are OpenAI's, and vLLM's for the names it added."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] = 1
    best_of: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=_INT32)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Text | Annotated[list[Text], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=128)] = msgspec.field(default_factory=list)
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=2)] = 1.0
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=1024)] = msgspec.field(
        default_factory=dict
    )
    ignore_eos: bool = False
    min_tokens: Annotated[int, Meta(ge=0, le=_INT32)] = 0
    priority: Annotated[int, Meta(ge=-_INT32, le=_INT32)] = 0
    cache_salt: Annotated[str, Meta(max_length=1024)] = ""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """What no single field's range can tell. Subclasses add to it."""
        if self.stream_options is not None and not self.stream:
            raise InvalidInputError(
                "'stream_options' is only allowed when 'stream' is true.", param="stream_options", code="invalid_value"
            )
        if self.best_of is not None and self.best_of != self.n:
            raise InvalidInputError(
                "'best_of' is not supported by this server, unless it equals 'n'.",
                param="best_of",
                code="unsupported_parameter",
            )


def sampling_params(
    fields: SamplingFields,
    *,
    max_tokens: int,
    vocab_size: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """The worker's view of ``fields``; token ids are checked against the vocabulary, and ``min_tokens`` against
    ``max_tokens``."""
    if fields.min_tokens > max_tokens:
        raise InvalidInputError(
            f"Invalid 'min_tokens': it must be less than or equal to max_tokens={max_tokens}, got {fields.min_tokens}.",
            param="min_tokens",
            code="invalid_value",
        )
    check_token_ids(fields.stop_token_ids, vocab_size, "stop_token_ids")
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=fields.temperature,
        top_p=fields.top_p,
        top_k=0 if fields.top_k < 0 else min(fields.top_k, vocab_size),
        min_p=fields.min_p,
        seed=None if fields.seed is None else fields.seed % _SEED_VALUES,
        stop_token_ids=tuple(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        min_tokens=fields.min_tokens,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        repetition_penalty=fields.repetition_penalty,
        logit_bias=_logit_bias(fields.logit_bias, vocab_size),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def for_choice(sampling: SamplingParams, index: int) -> SamplingParams:
    """The parameters of the ``index``-th of ``n`` choices: with a seed, each has its own, so they differ."""
    if sampling.seed is None or index == 0:
        return sampling
    return dataclasses.replace(sampling, seed=(sampling.seed + index) % _SEED_VALUES)


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ``InvalidInputError`` for the first id that is not in the vocabulary."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):  # far faster than one by one
        for token_id in token_ids:
            check_token_id(token_id, vocab_size, param)


def check_token_id(token_id: int, vocab_size: int, param: str) -> None:
    if not 0 <= token_id < vocab_size:
        raise InvalidInputError(
            f"Invalid '{param}': token id {token_id} is not in the vocabulary of {vocab_size} tokens.",
            param=param,
            code="invalid_value",
        )


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        # With zeros before it, one token could be there twice.
        if not (key.isascii() and key.isdigit() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidInputError(
                f"Invalid 'logit_bias': the key {key[:40]!r} is not a token id.",
                param="logit_bias",
                code="invalid_value",
            )
        check_token_id(int(key), vocab_size, "logit_bias")
        bias[int(key)] = value
    return bias
