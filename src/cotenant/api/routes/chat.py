"""``/v1/chat/completions``."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator
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
from cotenant.api.logprobs import chat_logprobs, chat_logprobs_parts
from cotenant.api.models import ResolvedName
from cotenant.api.openapi import answers, body_of
from cotenant.api.prompts import Conversation, check_num_choices, require_ready, token_budget
from cotenant.api.responses import JsonParts, around, listed
from cotenant.api.schemas.chat import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from cotenant.api.schemas.parsing import parse, read_object
from cotenant.api.schemas.sampling import sampling_params
from cotenant.api.sse import TextEvents, event, run_until_disconnect, stream_response
from cotenant.api.state import AppState, state_of
from cotenant.api.usage import UsageCount
from cotenant.wire.messages import Ready

logger = logging.getLogger(__name__)

router = APIRouter(tags=["completions"])


@router.post(
    "/v1/chat/completions",
    openapi_extra=body_of(ChatRequest),
    responses=answers(ChatCompletion, 400, 401, 404, 413, 500, 503, streams=True),
)
async def create_chat_completion(request: Request) -> Response:
    """Answer a conversation."""
    arrival_s = time.monotonic()
    state = state_of(request)
    ready = require_ready(state)
    body = parse(await read_object(request), ChatRequest)
    body.check()
    model = await state.models.resolve(body.model)
    chat = await _Chat.prepare(state, ready, body, model, arrival_s)
    logger.debug("%s: runs as %s", request_id_of(request), chat.id)
    if body.stream:
        return await stream_response(request, chat.events(), partial(next_piece_is_here, state, chat.choices))
    return JsonParts(await run_until_disconnect(request.receive, chat.whole()))


@dataclass(frozen=True, slots=True)
class _Chat:
    """One HTTP request, ready to run: a conversation with ``body.n`` choices."""

    state: AppState
    body: ChatRequest
    id: str
    created: int
    num_prompt: int
    choices: list[Choice]

    @classmethod
    async def prepare(
        cls, state: AppState, ready: Ready, body: ChatRequest, model: ResolvedName, arrival_s: float
    ) -> _Chat:
        """Check what is left to check, write the prompt, and give each choice its request."""
        check_num_choices(state, body.n)
        messages = await state.prompts.check_messages(body.messages, max_model_len=ready.max_model_len)
        conversation = Conversation(messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs)
        prompt = await state.prompts.encode_chat(
            conversation, max_model_len=ready.max_model_len, add_special_tokens=body.add_special_tokens
        )
        sampling = sampling_params(
            body,
            max_tokens=token_budget(len(prompt), body.token_limit, None, ready.max_model_len, "messages"),
            vocab_size=ready.vocab_size,
            logprobs=body.num_logprobs,
        )
        chat_id = f"chatcmpl-{uuid.uuid4().hex}"
        options = TextOptions(body.stop_strings, body.include_stop_str_in_output, body.skip_special_tokens)
        choices = make_choices(
            chat_id,
            prompt,
            sampling,
            body.n,
            options=options,
            adapter=model.adapter,
            priority=body.priority,
            cache_salt=body.cache_salt,
            arrival_s=arrival_s,
        )
        return cls(state, body, chat_id, int(time.time()), len(prompt), choices)

    async def whole(self) -> list[bytes]:
        """The answer in one piece: a ``ChatCompletion`` as JSON, in parts."""
        collected = await collect_choices(self.state, self.choices)
        count = UsageCount(self.num_prompt, self.body.n)
        choices: list[list[bytes]] = []
        for index, pieces in enumerate(collected):
            for piece in pieces:
                count.add(index, piece)
            choices.append(await self._whole_choice(index, pieces))
            await asyncio.sleep(0)  # there may be hundreds: let other requests have their turn
        before, after = around(
            lambda each: ChatCompletion(self.id, self.created, self.body.model, [each], count.usage())
        )
        return [before, *listed(choices), after]

    async def _whole_choice(self, index: int, pieces: list[Piece]) -> list[bytes]:
        text = "".join(piece.text for piece in pieces)
        last = pieces[-1]
        before, after = around(
            lambda each: ChatChoice(index, ChatMessage(text), each, last.finish_reason or "stop", last.stop_reason)
        )
        if not self.body.logprobs:
            return [before, b"null", after]
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return [before, *await chat_logprobs_parts(entries, self.state.token_texts, self.state.turns), after]

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The answer as a stream: roles, text as it comes, reasons for the ends, usage if it was asked for.

        Empty for a piece without text."""
        count = UsageCount(self.num_prompt, self.body.n)
        texts: dict[int, TextEvents] = {}
        is_plain = not self.body.logprobs and not self.body.continuous_usage
        head = b"".join(self._chunk(ChunkChoice(index, Delta("assistant", "")), count) for index in range(self.body.n))
        async with aclosing(stream_choices(self.state, self.choices)) as pieces:
            async for index, piece in pieces:
                count.add(index, piece)
                if is_plain and not head and piece.finish_reason is None:
                    if index not in texts:
                        texts[index] = self._text_events(index)
                    yield texts[index](piece.text) if piece.text else b""
                    continue
                data = head + self._piece(index, piece, count)
                head = b""
                yield data
        if self.body.include_usage:
            yield event(ChatChunk(self.id, self.created, self.body.model, [], count.usage()))

    def _text_events(self, index: int) -> TextEvents:
        """The events of a choice that differ in nothing but their text."""
        return TextEvents(lambda text: self._message(ChunkChoice(index, Delta(content=text))))

    def _piece(self, index: int, piece: Piece, count: UsageCount) -> bytes:
        data = b""
        if piece.text or piece.logprobs:
            choice = ChunkChoice(index, Delta(content=piece.text), self._piece_logprobs(piece))
            data += self._chunk(choice, count)
        if piece.finish_reason is not None:
            choice = ChunkChoice(index, Delta(), None, piece.finish_reason, piece.stop_reason)
            data += self._chunk(choice, count)
        return data

    def _piece_logprobs(self, piece: Piece) -> ChatLogprobs | None:
        return chat_logprobs(piece.logprobs, self.state.token_texts) if self.body.logprobs else None

    def _chunk(self, choice: ChunkChoice, count: UsageCount) -> bytes:
        chunk = self._message(choice)
        if self.body.continuous_usage:
            chunk.usage = count.usage()
        return event(chunk)

    def _message(self, choice: ChunkChoice) -> ChatChunk:
        usage = None if self.body.include_usage else msgspec.UNSET
        return ChatChunk(self.id, self.created, self.body.model, [choice], usage)
