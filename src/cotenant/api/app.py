"""The FastAPI application: routes, and what surrounds them."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

import cotenant
from cotenant.api import openapi
from cotenant.api.auth import ApiKeyMiddleware
from cotenant.api.errors import install_handlers
from cotenant.api.middleware import BodyLimitMiddleware, RequestContextMiddleware
from cotenant.api.models import ModelCard, ModelList
from cotenant.api.routes import adapters, chat, completions, files, fine_tuning, health, metrics, models, tokenize
from cotenant.api.schemas.chat import ChatChunk, ChatCompletion, ChatRequest
from cotenant.api.schemas.completion import Completion, CompletionRequest
from cotenant.api.schemas.tokens import DetokenizeRequest, DetokenizeResponse, TokenizeRequest, TokenizeResponse
from cotenant.api.state import AppState

_ROUTERS = (
    chat.router,
    completions.router,
    models.router,
    adapters.router,
    tokenize.router,
    files.router,
    fine_tuning.router,
    health.router,
    metrics.router,
)
_DOCUMENTED = (
    ChatRequest,
    ChatCompletion,
    ChatChunk,
    CompletionRequest,
    Completion,
    ModelCard,
    ModelList,
    TokenizeRequest,
    TokenizeResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    health.Version,
    *adapters.DOCUMENTED,
    *files.DOCUMENTED,
    *fine_tuning.DOCUMENTED,
    *models.DOCUMENTED,
)


def create_app(state: AppState) -> FastAPI:
    """The whole HTTP side over ``state``. It starts nothing: worker and jobs are the caller's to run."""
    app = FastAPI(title="cotenant", version=cotenant.__version__, redirect_slashes=False)
    app.state.cotenant = state
    for router in _ROUTERS:
        app.include_router(router)
    openapi.install(app, _DOCUMENTED)
    install_handlers(app, state.metrics.count_refused)
    # The last one added is the outermost.
    app.add_middleware(BodyLimitMiddleware, max_upload_bytes=state.config.api.max_upload_bytes)
    if state.config.api.api_key:
        app.add_middleware(ApiKeyMiddleware, api_key=state.config.api.api_key)
    app.add_middleware(RequestContextMiddleware)
    if state.config.api.allowed_origins:  # outside of the key's check: a browser asks first, and without it
        app.add_middleware(
            CORSMiddleware,
            allow_origins=state.config.api.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app
