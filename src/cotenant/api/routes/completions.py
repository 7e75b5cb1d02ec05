"""``/v1/completions``."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import msgspec
from fastapi import APIRouter, Request
from starlette.responses import Response

from cotenant.api.errors import request_id_of
from cotenant.api.generation import (
    Choice,
    Piece,
    TextOptions,
    collect_choices,
    make_choices,
    next_piece_is_here,
    stream_choices,
)
from cotenant.api.logprobs import completion_logprobs, completion_logprobs_parts
from cotenant.api.models import ResolvedName
from cotenant.api.openapi import answers, body_of
from cotenant.api.prompts import check_num_choices, check_num_tokens, require_ready, run_apart, token_budget
from cotenant.api.responses import JsonParts, around, joined, listed
from cotenant.api.schemas.completion import (
    DEFAULT_MAX_TOKENS,
    Completion,
    CompletionChoice,
    CompletionRequest,
    Prompt,
)
from cotenant.api.schemas.parsing import parse, read_object
from cotenant.api.schemas.sampling import check_token_ids, sampling_params
from cotenant.api.sse import EVENT_END, EVENT_START, TextEvents, event, run_until_disconnect, stream_response
from cotenant.api.state import AppState, state_of
from cotenant.api.usage import UsageCount
from cotenant.core.errors import InvalidInputError
from cotenant.core.request import TokenLogprobs
from cotenant.text.detokenizer import IncrementalDetokenizer
from cotenant.text.tokenizer import Tokenizer
from cotenant.wire.messages import Ready

logger = logging.getLogger(__name__)

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/completions",
    openapi_extra=body_of(CompletionRequest),
    responses=answers(Completion, 400, 401, 404, 413, 500, 503, streams=True),
)
async def create_completion(request: Request) -> Response:
    """Continue one prompt or several."""
    arrival_s = time.monotonic()
    state = state_of(request)
    ready = require_ready(state)
    body = parse(await read_object(request), CompletionRequest)
    body.check()
    model = await state.models.resolve(body.model)
    completion = await _Completion.prepare(state, ready, body, model, arrival_s)
    logger.debug("%s: runs as %s", request_id_of(request), completion.id)
    if body.stream:
        return await stream_response(
            request, completion.events(), partial(next_piece_is_here, state, completion.choices)
        )
    return JsonParts(await run_until_disconnect(request.receive, completion.whole()))


@dataclass(frozen=True, slots=True)
class _EncodedPrompt:
    """A prompt as ids, and as the text that ``echo`` repeats (empty without it), with each token's place in it."""

    token_ids: list[int]
    text: str = ""
    offsets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Completion:
    """One HTTP request, ready to run: each prompt with ``body.n`` choices, prompt by prompt."""

    state: AppState
    body: CompletionRequest
    id: str
    created: int
    prompts: list[_EncodedPrompt]
    choices: list[Choice]

    @classmethod
    async def prepare(
        cls, state: AppState, ready: Ready, body: CompletionRequest, model: ResolvedName, arrival_s: float
    ) -> _Completion:
        """Check what is left to check, encode the prompts, and give each choice its request."""
        check_num_choices(state, body.n, len(body.prompts))
        completion_id = f"cmpl-{uuid.uuid4().hex}"
        options = TextOptions(
            body.stop_strings, body.include_stop_str_in_output, body.skip_special_tokens, continues_prompt=True
        )
        prompts: list[_EncodedPrompt] = []
        for given in body.prompts:
            prompts.append(await _encode(state, ready, body, given))
            await asyncio.sleep(0)  # there may be hundreds: let other requests have their turn
        choices: list[Choice] = []
        for prompt in prompts:
            sampling = sampling_params(
                body,
                max_tokens=token_budget(
                    len(prompt.token_ids), body.token_limit, DEFAULT_MAX_TOKENS, ready.max_model_len, "prompt"
                ),
                vocab_size=ready.vocab_size,
                logprobs=body.logprobs,
                prompt_logprobs=body.logprobs if body.echo else None,
            )
            choices += make_choices(
                completion_id,
                prompt.token_ids,
                sampling,
                body.n,
                options=options,
                adapter=model.adapter,
                priority=body.priority,
                cache_salt=body.cache_salt,
                arrival_s=arrival_s,
                first_index=len(choices),
            )
        return cls(state, body, completion_id, int(time.time()), prompts, choices)

    async def whole(self) -> list[bytes]:
        """The answer in one piece: a ``Completion`` as JSON, in parts."""
        collected = await collect_choices(self.state, self.choices)
        count = self._new_count()
        choices: list[list[bytes]] = []
        for index, pieces in enumerate(collected):
            for piece in pieces:
                count.add(index, piece)
            text = self._prompt_of(index).text + "".join(piece.text for piece in pieces)
            last = pieces[-1]
            choice = CompletionChoice(index, text, None, last.finish_reason, last.stop_reason)
            choices.append(await self._choice_parts(choice, pieces))
            await asyncio.sleep(0)  # there may be hundreds: let other requests have their turn
        before, after = around(lambda each: Completion(self.id, self.created, self.body.model, [each], count.usage()))
        return [before, *listed(choices), after]

    async def _choice_parts(self, choice: CompletionChoice, pieces: Sequence[Piece]) -> list[bytes]:
        """``choice``, or the part of it that is news, as JSON, with the log-probabilities of ``pieces``."""
        before, after = around(lambda each: msgspec.structs.replace(choice, logprobs=each))
        if self.body.logprobs is None:
            return [before, b"null", after]
        tokens = self._tokens(self._prompt_of(choice.index), pieces)
        parts = await completion_logprobs_parts(*tokens, self.state.token_texts, self.state.turns)
        return [before, *parts, after]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as a stream: text as it comes, and usage if it was asked for. Empty for a piece without text."""
        count = self._new_count()
        started: dict[int, TextEvents | None] = {}
        async with aclosing(stream_choices(self.state, self.choices)) as pieces:
            async for index, piece in pieces:
                count.add(index, piece)
                texts = started.get(index)
                if texts is not None and piece.finish_reason is None:
                    yield texts(piece.text) if piece.text else b""
                    continue
                is_first = index not in started
                if is_first:
                    started[index] = self._text_events(index)
                if piece.prompt_logprobs is not None:
                    for part in joined(await self._long_chunk(self._choice(index, piece, is_first), piece, count)):
                        yield part
                    continue
                choice = self._choice(index, piece, is_first)
                has_news = choice.text or choice.logprobs is not None or choice.finish_reason is not None
                yield self._chunk(choice, count) if has_news else b""
        if self.body.include_usage:
            yield event(Completion(self.id, self.created, self.body.model, [], count.usage()))

    def _text_events(self, index: int) -> TextEvents | None:
        """The events between the first and the last of a choice; None if more than their text differs."""
        if self.body.logprobs is not None or self.body.continuous_usage:
            return None
        return TextEvents(lambda text: self._message(CompletionChoice(index, text, None, None)))

    def _choice(self, index: int, piece: Piece, is_first: bool) -> CompletionChoice:
        """What ``piece`` adds to its choice; the first one brings the prompt along if it is echoed, without its
        probabilities."""
        prompt = self._prompt_of(index)
        logprobs = None
        if self.body.logprobs is not None and piece.prompt_logprobs is None:
            logprobs = completion_logprobs(*self._tokens(prompt, [piece]), self.state.token_texts)
        return CompletionChoice(
            index,
            prompt.text + piece.text if is_first else piece.text,
            logprobs,
            piece.finish_reason,
            msgspec.UNSET if piece.finish_reason is None else piece.stop_reason,
        )

    def _prompt_of(self, index: int) -> _EncodedPrompt:
        return self.prompts[index // self.body.n]

    def _tokens(
        self, prompt: _EncodedPrompt, pieces: Sequence[Piece]
    ) -> tuple[list[int], list[TokenLogprobs | None], list[int]]:
        """The tokens of a choice's pieces, those of an echoed prompt before them, with their probabilities and
        places."""
        token_ids: list[int] = []
        entries: list[TokenLogprobs | None] = []
        offsets: list[int] = []
        for piece in pieces:
            if piece.prompt_logprobs is not None:
                token_ids += prompt.token_ids
                entries += piece.prompt_logprobs
                offsets += prompt.offsets
            token_ids += [entry.token_id for entry in piece.logprobs]
            entries += piece.logprobs
            offsets += [len(prompt.text) + offset for offset in piece.offsets]
        return token_ids, entries, offsets

    async def _long_chunk(self, choice: CompletionChoice, piece: Piece, count: UsageCount) -> list[bytes]:
        """The event of a piece that brings the probabilities of an echoed prompt along, which ``choice`` lacks, in
        parts."""
        parts = await self._choice_parts(choice, [piece])
        before, after = around(lambda each: self._counted(each, count))
        return [EVENT_START, before, *parts, after, EVENT_END]

    def _chunk(self, choice: CompletionChoice, count: UsageCount) -> bytes:
        return event(self._counted(choice, count))

    def _counted(self, choice: CompletionChoice, count: UsageCount) -> Completion:
        chunk = self._message(choice)
        if self.body.continuous_usage:
            chunk.usage = count.usage()
        return chunk

    def _message(self, choice: CompletionChoice) -> Completion:
        usage = None if self.body.include_usage else msgspec.UNSET
        return Completion(self.id, self.created, self.body.model, [choice], usage)

    def _new_count(self) -> UsageCount:
        return UsageCount(sum(len(prompt.token_ids) for prompt in self.prompts), self.body.n)


async def _encode(state: AppState, ready: Ready, body: CompletionRequest, prompt: Prompt) -> _EncodedPrompt:
    if isinstance(prompt, str):
        token_ids = await state.prompts.encode(
            prompt, add_special_tokens=body.add_special_tokens, max_model_len=ready.max_model_len, param="prompt"
        )
    else:
        token_ids = prompt
        check_num_tokens(len(token_ids), ready.max_model_len, "prompt")  # there may be a million
        check_token_ids(token_ids, ready.vocab_size, "prompt")
    if not token_ids:
        raise InvalidInputError("Invalid 'prompt': it is empty.", param="prompt", code="invalid_value")
    if not body.echo:
        return _EncodedPrompt(token_ids)
    if isinstance(prompt, str):
        offsets = await run_apart(len(prompt), lambda: prompt_offsets(state.tokenizer, prompt, token_ids))
        return _EncodedPrompt(token_ids, prompt, offsets)
    text, offsets = await run_apart(
        len(token_ids), lambda: prompt_text(state.tokenizer, token_ids, body.skip_special_tokens)
    )
    return _EncodedPrompt(token_ids, text, offsets)


def prompt_offsets(tokenizer: Tokenizer, prompt: str, token_ids: Sequence[int]) -> tuple[int, ...]:
    """Where in ``prompt`` each of the tokens begins that it was encoded to. Marks of special tokens are a part of it;
    those tokens that the tokenizer has put around it lie at its start and its end."""
    own, spans = tokenizer.encode_with_offsets(prompt)
    num_others = len(token_ids) - len(own)
    num_before = next((count for count in range(num_others) if token_ids[count : count + len(own)] == own), num_others)
    text, offsets = prompt_text(tokenizer, own, skip_special_tokens=False)
    if text != prompt:  # it was normalised, say, or a space was put before a part of it
        offsets = tuple(start for start, _ in spans)
    return (0,) * num_before + offsets + (len(prompt),) * (num_others - num_before)


def prompt_text(
    tokenizer: Tokenizer, token_ids: Sequence[int], skip_special_tokens: bool
) -> tuple[str, tuple[int, ...]]:
    """A prompt's text, and where in it each token begins."""
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    text = ""
    offsets: list[int] = []
    for token_id in token_ids:
        offsets.append(len(text))
        text += detokenizer.add((token_id,))
    return text + detokenizer.flush(), tuple(offsets)
