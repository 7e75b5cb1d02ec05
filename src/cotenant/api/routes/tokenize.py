"""``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request
from starlette.responses import Response

from cotenant.api.openapi import answers, body_of
from cotenant.api.prompts import Conversation, require_ready, run_apart
from cotenant.api.responses import json_response
from cotenant.api.schemas.parsing import parse, read_object
from cotenant.api.schemas.sampling import check_token_ids
from cotenant.api.schemas.tokens import (
    MAX_TEXT_CHARACTERS,
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from cotenant.api.state import AppState, state_of
from cotenant.text.tokenizer import Tokenizer

router = APIRouter(tags=["tokens"])


@router.post(
    "/tokenize", openapi_extra=body_of(TokenizeRequest), responses=answers(TokenizeResponse, 400, 401, 404, 413, 503)
)
async def tokenize(request: Request) -> Response:
    """The token ids of a prompt, or of a conversation as the model's chat template writes it."""
    state = state_of(request)
    ready = require_ready(state)
    body = parse(await read_object(request), TokenizeRequest)
    body.check()
    await _check_model(state, body.model)
    token_ids = await _encode(state, body)
    strings = None
    if body.return_token_strs:
        strings = await run_apart(len(token_ids), lambda: list(map(state.token_texts.text, token_ids)))
    return json_response(TokenizeResponse(len(token_ids), ready.max_model_len, token_ids, strings))


@router.post(
    "/detokenize",
    openapi_extra=body_of(DetokenizeRequest),
    responses=answers(DetokenizeResponse, 400, 401, 404, 413, 503),
)
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens included."""
    state = state_of(request)
    body = parse(await read_object(request), DetokenizeRequest)
    await _check_model(state, body.model)
    return json_response(DetokenizeResponse(await asyncio.to_thread(_decode, state.tokenizer, body.tokens)))


def _decode(tokenizer: Tokenizer, token_ids: list[int]) -> str:
    check_token_ids(token_ids, tokenizer.vocab_size, "tokens")
    return tokenizer.decode(token_ids, skip_special_tokens=False)


async def _check_model(state: AppState, name: str | None) -> None:
    if name is not None:
        await state.models.resolve(name)


async def _encode(state: AppState, body: TokenizeRequest) -> list[int]:
    if body.prompt is not None:
        prompt, add_special_tokens = body.prompt, body.add_special_tokens is not False
        return await state.prompts.encode(
            prompt, add_special_tokens=add_special_tokens, max_model_len=MAX_TEXT_CHARACTERS, param="prompt"
        )
    messages = await state.prompts.check_messages(body.messages or [], max_model_len=MAX_TEXT_CHARACTERS)
    conversation = Conversation(messages, body.tools, body.add_generation_prompt, body.chat_template_kwargs)
    return await state.prompts.encode_chat(
        conversation, max_model_len=MAX_TEXT_CHARACTERS, add_special_tokens=bool(body.add_special_tokens)
    )
