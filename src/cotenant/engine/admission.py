"""Whether a request can run at all."""

from __future__ import annotations

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import Request


def check_request(request: Request, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidInputError, naming the field, for a request that can never run."""
    prompt, sampling = request.prompt, request.sampling
    if not prompt:
        raise InvalidInputError("the prompt is empty: it needs at least one token", param="prompt")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        raise InvalidInputError(f"the prompt has token ids outside 0 to {vocab_size - 1}", param="prompt")
    room = min(1, sampling.max_tokens)
    if len(prompt) + room > max_model_len:
        raise InvalidInputError(
            f"the prompt has {len(prompt)} tokens; with room for an answer at most {max_model_len - room} fit the "
            "context and its KV cache",
            code="context_length_exceeded",
            param="prompt",
        )
    for param, token_ids in (("logit_bias", sampling.logit_bias), ("stop_token_ids", sampling.stop_token_ids)):
        if any(not 0 <= token < vocab_size for token in token_ids):
            raise InvalidInputError(f"{param} has token ids outside 0 to {vocab_size - 1}", param=param)
