"""A request's state while it is live: its tokens, and how many of them the KV cache holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from cotenant.core.plan import RequestView
from cotenant.core.request import AdapterRef, FinishReason, Request, TokenLogprobs
from cotenant.engine.adapters import Hold
from cotenant.engine.prefix import PrefixKeys
from cotenant.engine.sampling_state import SamplingState
from cotenant.models.lora import LoraAdapter

# Stands in ``Sequence.tokens`` for a token that the device has sampled, or will have, and the host has not seen.
PENDING = -1


@dataclass(eq=False, slots=True)
class Sequence:
    """One live request. ``number`` is unique in the engine's life and owns the sequence's pages.

    Waiting: no seat, no pages, ``num_computed`` 0. Running: a seat in the block tables, and pages for at least
    ``num_computed`` tokens, which are always the first ones of ``tokens``. ``num_computed`` counts the tokens of every
    batch that was launched; the last ``num_pending`` of ``tokens`` are ``PENDING`` until their batches are collected.
    """

    request: Request
    number: int
    max_length: int
    sampling_state: SamplingState
    tokens: list[int]
    num_computed: int = 0
    num_pending: int = 0
    prefix: PrefixKeys | None = None  # None: it shares no pages
    num_registered: int = 0  # pages whose content others may use
    num_matched: int = 0  # pages that were cached for it when that was looked up last, while it waits
    seat: int | None = None
    adapter: LoraAdapter | None = None
    hold: Hold | None = None  # on its adapter's weights, since it has begun
    was_admitted: bool = False
    queue_s: float | None = None  # how long it waited for its first seat, until that is reported
    num_cached: int | None = None  # tokens that were cached for it then, until that is reported
    first_token_s: float | None = None
    has_left: bool = False  # ended or aborted; batches in flight may still name it
    is_broken: bool = False  # something that was computed for it is not finite
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_prompt: int = field(init=False)
    key: tuple[int, float, int] = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.request.sampling
        self.num_prompt = len(self.request.prompt)
        self.key = (self.request.priority, self.request.arrival_s, self.number)
        if sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None]  # nothing precedes the first token

    @property
    def adapter_ref(self) -> AdapterRef | None:
        """The adapter that it runs on, or will: what the request asks for, until other weights go by that."""
        return self.request.adapter if self.hold is None else self.hold.ref

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens that go through the decoder before the next one can be sampled; at least 1 unless ``is_spent``."""
        return len(self.tokens) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Only its newest generated token is left. A sequence that is recomputed after preemption is in prefill."""
        return self.num_prompt <= self.num_computed == len(self.tokens) - 1

    @property
    def is_spent(self) -> bool:
        """There is nothing to schedule until it is collected: its last token is on the way, or all of its prompt is and
        it generates nothing."""
        if self.num_pending == 0:
            return self.num_left == 0
        return self.num_generated >= self.request.sampling.max_tokens or len(self.tokens) >= self.max_length

    def resolve(self, position: int, token_id: int, now_s: float) -> FinishReason | None:
        """Put the token that was sampled for ``position`` in its place; say whether it was the last."""
        self.tokens[position] = token_id
        self.num_pending -= 1
        if self.first_token_s is None:
            self.first_token_s = now_s
        if token_id in self.sampling_state.stop_token_ids:
            return FinishReason.STOP
        length = position + 1
        if length - self.num_prompt >= self.request.sampling.max_tokens or length >= self.max_length:
            return FinishReason.LENGTH
        return None

    def view(self, num_cached: int = 0, *, waits_for_adapter: bool = False) -> RequestView:
        """What a policy sees; prompt tokens left include those that are recomputed after preemption, and not the
        ``num_cached`` ones that are cached for it."""
        return RequestView(
            request_id=self.request.request_id,
            arrival_s=self.request.arrival_s,
            first_token_s=self.first_token_s,
            num_generated=self.num_generated - self.num_pending,
            num_prompt_tokens_left=0 if self.is_decoding else self.num_left - num_cached,
            max_tokens=self.request.sampling.max_tokens,
            has_begun=self.was_admitted,
            priority=self.request.priority,
            waits_for_adapter=waits_for_adapter,
            num_computed=self.num_computed + num_cached,
        )
