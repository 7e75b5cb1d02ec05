"""Which models there are: the base model under its names, adapters named by flags, and what jobs have trained."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cotenant.config import ServerConfig
from cotenant.core.errors import NotFoundError
from cotenant.core.request import AdapterRef

if TYPE_CHECKING:
    from cotenant.api.worker_client import WorkerClient
    from cotenant.store.store import Store

OWNER = "cotenant"


class ModelCard(msgspec.Struct):
    """One entry of ``/v1/models``. ``root``: the folder of the weights or of the adapter; ``parent``: an adapter's
    base model."""

    id: str
    created: int
    root: str
    parent: str | None
    max_model_len: int | None
    object: str = "model"
    owned_by: str = OWNER
    permission: list[str] = msgspec.field(default_factory=list)


class ModelList(msgspec.Struct):
    data: list[ModelCard]
    object: str = "list"


@dataclass(frozen=True, slots=True)
class ResolvedName:
    """What a request's ``model`` stands for; ``adapter`` None: the base model itself."""

    name: str
    adapter: AdapterRef | None


@dataclass(slots=True)
class ModelNames:
    """Looks names up in the configuration first, which costs nothing, and then in the store."""

    config: ServerConfig
    base_folder: Path | None
    worker: WorkerClient
    store: Store
    started_at: int = field(default_factory=lambda: int(time.time()))

    @property
    def base_names(self) -> tuple[str, ...]:
        model = self.config.model
        return model.served_model_names or (model.model,)

    async def resolve(self, name: str) -> ResolvedName:
        """The model called ``name``. Raises ``NotFoundError`` if there is none."""
        if name in self.base_names:
            return ResolvedName(name, None)
        for module_name, path in self.config.lora.modules:
            if name == module_name:
                return ResolvedName(name, AdapterRef(name, path))
        adapter = await asyncio.to_thread(self.store.find_adapter, name)
        if adapter is None:
            raise unknown_model(name)
        return ResolvedName(name, AdapterRef(adapter.name, adapter.path))

    async def cards(self) -> list[ModelCard]:
        """All models, the base model first."""
        base = self.config.model.name
        cards = [self._card(name, self._base_root, None, self.started_at) for name in self.base_names]
        cards += [self._card(name, path, base, self.started_at) for name, path in self.config.lora.modules]
        for adapter in await asyncio.to_thread(self.store.served_adapters):
            cards.append(self._card(adapter.name, adapter.path, adapter.parent, adapter.created_at))
        return cards

    async def card(self, name: str) -> ModelCard:
        """The card of the model called ``name``. Raises ``NotFoundError`` if there is none."""
        for card in await self.cards():
            if card.id == name:
                return card
        raise unknown_model(name)

    @property
    def _base_root(self) -> str:
        return str(self.base_folder) if self.base_folder is not None else self.config.model.model

    def _card(self, name: str, root: str, parent: str | None, created: float) -> ModelCard:
        ready = self.worker.last_ready
        max_model_len = ready.max_model_len if ready else self.config.model.max_model_len
        return ModelCard(name, int(created), str(root), parent, max_model_len)


def unknown_model(name: str) -> NotFoundError:
    return NotFoundError(f"The model '{name[:200]}' does not exist.", code="model_not_found", param="model")
