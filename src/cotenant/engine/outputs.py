"""What a collected batch's tokens make of its sequences, and what is put out of them."""

from __future__ import annotations

from cotenant.core.request import FinishReason, SequenceOutput, TokenLogprobs
from cotenant.engine.assemble import Entry
from cotenant.engine.live import LiveSequences
from cotenant.engine.sampler import NOT_FINITE
from cotenant.engine.sequence import Sequence


def advance(
    live: LiveSequences, entry: Entry, token_id: int | None, logprobs: TokenLogprobs | None, now_s: float
) -> list[SequenceOutput]:
    """The entry's batch has ended at ``now_s``: update its live sequence, and take it out of ``live`` if that was its
    last.

    ``token_id``: what the entry has chosen (``NOT_FINITE``: there was nothing to choose); None if it chooses none.
    A sequence whose numbers are not finite ends with ``FinishReason.ABORT``.
    """
    sequence, end = entry.sequence, entry.first + entry.count
    if sequence.is_broken or token_id == NOT_FINITE:
        sequence.is_broken = True
        sequence.prompt_logprobs = None
        return [_output(live, sequence, finish_reason=FinishReason.ABORT)]
    live.register_pages(sequence, end)
    if token_id is not None:
        reason = sequence.resolve(end, token_id, now_s)
        return [_output(live, sequence, (token_id,), logprobs, reason)]
    if sequence.request.sampling.max_tokens == 0 and end == sequence.num_prompt:
        return [_output(live, sequence, finish_reason=FinishReason.LENGTH)]
    return []


def _output(
    live: LiveSequences,
    sequence: Sequence,
    token_ids: tuple[int, ...] = (),
    logprobs: TokenLogprobs | None = None,
    finish_reason: FinishReason | None = None,
) -> SequenceOutput:
    prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, None
    queue_s, sequence.queue_s = sequence.queue_s, None
    num_cached, sequence.num_cached = sequence.num_cached, None
    if finish_reason is not None:
        live.remove(sequence)
    return SequenceOutput(
        request_id=sequence.request.request_id,
        token_ids=token_ids,
        logprobs=() if logprobs is None else (logprobs,),
        prompt_logprobs=None if prompt_logprobs is None else tuple(prompt_logprobs),
        finish_reason=finish_reason,
        stop_token_id=token_ids[-1] if finish_reason is FinishReason.STOP else None,
        queue_s=queue_s,
        num_cached_tokens=num_cached,
    )
