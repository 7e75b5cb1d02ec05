"""What the routes work with, put together once where the server starts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fastapi import Request

from cotenant.api.logprobs import TokenTexts
from cotenant.api.metrics import Metrics
from cotenant.api.models import ModelNames
from cotenant.api.prompts import PromptEncoder
from cotenant.api.turns import Turns
from cotenant.config import ServerConfig
from cotenant.text.chat import ChatTemplate
from cotenant.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from cotenant.api.jobs.manager import JobManager
    from cotenant.api.worker_client import WorkerClient
    from cotenant.store.store import Store


@dataclass
class AppState:
    """One per application, at ``app.state.cotenant``. ``base_folder`` holds the base model's files; None with random
    weights. ``base_fingerprint`` says which model it is. What is derived from these parts is made here, so
    that each is made once."""

    config: ServerConfig
    base_folder: Path | None
    base_fingerprint: str
    worker: WorkerClient
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    store: Store
    jobs: JobManager
    metrics: Metrics = field(init=False)
    models: ModelNames = field(init=False)
    prompts: PromptEncoder = field(init=False)
    token_texts: TokenTexts = field(init=False)
    turns: Turns = field(init=False, default_factory=Turns)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.config.model.name, self.worker)
        self.models = ModelNames(self.config, self.base_folder, self.base_fingerprint, self.worker, self.store)
        self.prompts = PromptEncoder(self.tokenizer, self.chat_template)
        self.token_texts = TokenTexts(self.tokenizer)


def state_of(request: Request) -> AppState:
    """The application's state, from a request to it."""
    state: AppState = request.app.state.cotenant
    return state
