"""Which models there are: the base model under its names, adapters (named by flags, or loaded and unloaded while
serving), and what jobs have trained."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from cotenant.config import ServerConfig
from cotenant.core.errors import InvalidInputError, NotFoundError
from cotenant.core.request import AdapterRef
from cotenant.store import StoreError

if TYPE_CHECKING:
    from cotenant.api.worker_client import WorkerClient
    from cotenant.store import ServedAdapter, Store

logger = logging.getLogger(__name__)

OWNER = "cotenant"
_MAX_LOGGED = 10  # names of models in a line of the log


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


@dataclass(frozen=True, slots=True)
class NamedAdapter:
    """An adapter that no job of ours has trained, in a folder of the user's."""

    ref: AdapterRef
    created_at: float


class ModelNames:
    """Looks names up among those in memory first, which costs nothing, and then in the store.

    Adapters that are loaded while serving are known until the server ends, whatever happens to the worker: requests
    tell it the folder.
    """

    def __init__(
        self,
        config: ServerConfig,
        base_folder: Path | None,
        base_fingerprint: str,
        worker: WorkerClient,
        store: Store,
    ) -> None:
        self._config = config
        self._base_folder = base_folder
        self._base_fingerprint = base_fingerprint
        self._worker = worker
        self._store = store
        self._started_at = time.time()
        self._named = {
            name: NamedAdapter(AdapterRef(name, path), self._started_at) for name, path in config.lora.modules
        }
        # Held while an adapter is loaded or unloaded, so that a name's uses follow one another.
        self._changing = asyncio.Lock()

    @property
    def base_names(self) -> tuple[str, ...]:
        model = self._config.model
        return model.served_model_names or (model.model,)

    async def resolve(self, name: str) -> ResolvedName:
        """The model called ``name``. Raises ``NotFoundError`` if there is none."""
        if name in self.base_names:
            return ResolvedName(name, None)
        named = self._named.get(name)
        if named is not None:
            return ResolvedName(name, named.ref)
        adapter = await asyncio.to_thread(self._store.find_adapter, name)
        if adapter is None:
            raise unknown_model(name)
        if not self._is_of_base(adapter):
            raise _of_another_base(adapter)
        if not self._has_room(adapter):
            raise _of_too_high_a_rank(adapter, self._max_rank)
        return ResolvedName(name, AdapterRef(adapter.name, adapter.path))

    async def check_served(self, adapter: AdapterRef) -> None:
        """Raises NotFoundError if this adapter is served no more, as one that was deleted since a request named it."""
        if (await self.resolve(adapter.name)).adapter != adapter:
            raise unknown_model(adapter.name)

    async def cards(self) -> list[ModelCard]:
        """All models, the base model first. Of several with one name, as --served-model-name may make them, the one
        that is served: the first by the order in which ``resolve`` looks."""
        base = self._config.model.name
        cards = [self._card(name, self._base_root, None, self._started_at) for name in self.base_names]
        for named in self._named.values():
            cards.append(self._card(named.ref.name, named.ref.path, base, named.created_at))
        for adapter in await asyncio.to_thread(self._store.served_adapters):
            if self._is_of_base(adapter) and self._has_room(adapter):
                cards.append(self._card(adapter.name, adapter.path, base, adapter.created_at))
        listed: dict[str, ModelCard] = {}
        for card in cards:
            listed.setdefault(card.id, card)
        return list(listed.values())

    async def log_unserved(self) -> None:
        """One line of the log names what jobs have trained that has too high a rank to be served, if there is any."""
        try:
            adapters = await asyncio.to_thread(self._store.served_adapters)
        except StoreError as error:
            logger.warning("what jobs have trained could not be listed: %s", error.message)
            return
        unserved = [adapter for adapter in adapters if self._is_of_base(adapter) and not self._has_room(adapter)]
        if not unserved:
            return
        names = [f"{adapter.name} (rank {adapter.rank})" for adapter in unserved[:_MAX_LOGGED]]
        if len(unserved) > _MAX_LOGGED:
            names.append(f"and {len(unserved) - _MAX_LOGGED} more")
        logger.warning(
            "not served, as --max-lora-rank is %d; start the server with --max-lora-rank %d to serve all of them: %s",
            self._max_rank,
            max(adapter.rank for adapter in unserved),
            ", ".join(names),
        )

    async def card(self, name: str) -> ModelCard:
        """The card of the model called ``name``. Raises ``NotFoundError`` if there is none."""
        for card in await self.cards():
            if card.id == name:
                return card
        await self.resolve(name)  # says why there is none
        raise unknown_model(name)

    async def load_adapter(self, name: str, path: str, replace: bool) -> None:
        """Serve the adapter in the folder ``path`` as ``name`` from now on, once the worker has read it.

        ``replace``: also if ``name`` is an adapter's that was named by a flag or loaded before. Raises NotFoundError
        when there is no such folder, InvalidInputError when the name is in use or the folder holds no adapter that
        fits, OverloadedError when there is no worker to ask.
        """
        async with self._changing:
            await self._check_free(name, replace)
            ref = AdapterRef(name, await asyncio.to_thread(_existing_folder, path))
            await self._worker.load_adapter(ref)
            self._named[name] = NamedAdapter(ref, time.time())

    async def unload_adapter(self, name: str) -> None:
        """Serve this adapter no more; requests that run on it end as they would have. Raises NotFoundError if there is
        no such adapter, InvalidInputError if it is a job's."""
        async with self._changing:
            if name not in self._named:
                if await asyncio.to_thread(self._store.find_adapter, name) is None:
                    raise NotFoundError(
                        f"The LoRA adapter '{name}' cannot be found.", code="not_found", param="lora_name"
                    )
                raise InvalidInputError(
                    f"The model '{name}' is a fine-tuning job's and is served as long as the job's files are there; "
                    "only adapters of --lora-modules and of /v1/load_lora_adapter can be unloaded. "
                    "DELETE /v1/models/{model} deletes those files.",
                    code="invalid_value",
                    param="lora_name",
                )
            self._worker.unload_adapter(self._named.pop(name).ref)

    def check_deletable(self, name: str) -> None:
        """Raises InvalidInputError for a model that no job has made."""
        if name in self.base_names:
            reason = "is the base model, which is served as long as the server runs"
        elif name in self._named:
            reason = (
                "is no fine-tuning job's. POST /v1/unload_lora_adapter has the server forget it; its files are left to "
                "whoever put them there"
            )
        else:
            return
        raise InvalidInputError(
            f"The model '{name}' cannot be deleted: it {reason}.", code="model_not_deletable", param="model"
        )

    async def _check_free(self, name: str, replace: bool) -> None:
        if name in self._named:
            if replace:
                return
            reason = "it has already been loaded; set 'load_inplace' to true to load it again"
        elif name in self.base_names:
            reason = "it is the base model's"
        elif await asyncio.to_thread(self._store.find_adapter, name) is not None:
            reason = "it is the name of a fine-tuning job's model"
        elif await asyncio.to_thread(self._store.is_promised, name):
            reason = "it is the name that a fine-tuning job's model will have"
        else:
            return
        raise InvalidInputError(f"The name '{name}' is in use: {reason}.", code="invalid_value", param="lora_name")

    def _is_of_base(self, adapter: ServedAdapter) -> bool:
        return adapter.base_fingerprint in (None, self._base_fingerprint)

    def _has_room(self, adapter: ServedAdapter) -> bool:
        return adapter.rank <= self._max_rank

    @property
    def _max_rank(self) -> int:
        return self._config.lora.max_lora_rank

    @property
    def _base_root(self) -> str:
        return str(self._base_folder) if self._base_folder is not None else self._config.model.model

    def _card(self, name: str, root: str, parent: str | None, created: float) -> ModelCard:
        ready = self._worker.last_ready
        max_model_len = ready.max_model_len if ready else self._config.model.max_model_len
        return ModelCard(name, int(created), str(root), parent, max_model_len)


def check_given_names(config: ServerConfig, store: Store) -> None:
    """Raises InvalidInputError where a flag gives a name that is a job's model's, or will be: whoever asks for that
    model would get other weights without a word."""
    model = config.model
    given = [("--served-model-name", name) for name in model.served_model_names] or [("MODEL", model.model)]
    given += [("--lora-modules", name) for name, _ in config.lora.modules]
    for flag, name in given:
        owner = store.owner(name)
        if owner is not None:
            way_out = "another name with --served-model-name" if flag == "MODEL" else "another name"
            raise InvalidInputError(
                f"{flag}: the name '{name}' is in use: it is that of a model of fine-tuning job '{owner}' in "
                f"{store.folder}. Give {way_out}, or another folder with --data-dir",
                param=flag.removeprefix("--"),
            )


def _existing_folder(path: str) -> str:
    """The folder's absolute path. Raises NotFoundError if there is none."""
    try:
        folder = Path(path).resolve()
        if folder.is_dir():
            return str(folder)
    except (OSError, RuntimeError, ValueError):  # no path that a file can have, a loop of links, one we may not look at
        pass
    raise NotFoundError(f"There is no folder '{path[:200]}' on the server.", code="not_found", param="lora_path")


def unknown_model(name: str) -> NotFoundError:
    return NotFoundError(f"The model '{name[:200]}' does not exist.", code="model_not_found", param="model")


def _of_another_base(adapter: ServedAdapter) -> NotFoundError:
    return NotFoundError(
        f"The model '{adapter.name}' belongs to another base model, '{adapter.parent}' ({adapter.base_root}, "
        f"fingerprint {adapter.base_fingerprint}); it is served where that one is.",
        code="model_not_found",
        param="model",
    )


def _of_too_high_a_rank(adapter: ServedAdapter, max_rank: int) -> NotFoundError:
    return NotFoundError(
        f"The model '{adapter.name}' is not served: its adapter's rank is {adapter.rank}, and this server serves none "
        f"of more than {max_rank}. Start the server with --max-lora-rank {adapter.rank} to serve it.",
        code="model_not_served",
        param="model",
    )
