"""The LoRA adapters on the device: at most ``max_loras``, the least recently used makes room."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Set
from pathlib import Path

import torch

from cotenant.config import LoraConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef
from cotenant.models.lora import LoraAdapter, load_adapter
from cotenant.models.spec import ModelSpec

logger = logging.getLogger(__name__)


class AdapterSlots:
    """Adapters by reference. Running sequences hold theirs: callers pass ``in_use``, which is never evicted.

    An adapter that was dropped while sequences run on it stays with them until they end, and counts until then.
    """

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, config: LoraConfig) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._config = config
        self._loaded: OrderedDict[AdapterRef, LoraAdapter] = OrderedDict()  # least recently used first
        self._valid: set[AdapterRef] = set()

    @property
    def max_loras(self) -> int:
        return self._config.max_loras

    def validate(self, ref: AdapterRef, in_use: Set[AdapterRef]) -> None:
        """Raise InvalidInputError if the folder does not hold an adapter for this model. Loads it if there is room."""
        if ref in self._loaded or ref in self._valid:
            return
        if self._make_room(in_use):
            self._loaded[ref] = self._load(ref, self._device)
        else:
            self._load(ref, torch.device("cpu"))
        self._valid.add(ref)

    def acquire(self, ref: AdapterRef, in_use: Set[AdapterRef]) -> LoraAdapter:
        """The adapter, loaded if need be. The caller has seen that it is in use or that a slot can be had.

        Raises InvalidInputError when the folder no longer holds what it held.
        """
        if ref not in self._loaded:
            has_room = self._make_room(in_use - {ref})
            assert has_room or ref in in_use, f"no slot for adapter {ref.name}"
            self._loaded[ref] = self._load(ref, self._device)
        self._loaded.move_to_end(ref)
        return self._loaded[ref]

    def register(self, ref: AdapterRef, adapter: LoraAdapter, in_use: Set[AdapterRef]) -> None:
        """Serve a frozen copy as ``ref`` from now on. Without a slot to be had it is read from disk on first use."""
        self.drop(ref.name)
        if self._make_room(in_use):
            self._loaded[ref] = adapter.for_serving(self._device, self._dtype)

    def drop(self, name: str) -> None:
        """Forget the adapters served under this name."""
        for ref in [ref for ref in self._loaded if ref.name == name]:
            del self._loaded[ref]
        self._valid = {ref for ref in self._valid if ref.name != name}

    def check_integrity(self, in_use: Set[AdapterRef]) -> None:
        """Raise AssertionError if more adapters are on the device than there are slots."""
        held = len(self._loaded.keys() | in_use)
        assert held <= self.max_loras, f"{held} adapters are held in {self.max_loras} slots"

    def _make_room(self, in_use: Set[AdapterRef]) -> bool:
        """Evict until one more adapter fits; False if the ones in use leave no slot."""
        if len(in_use) >= self.max_loras:
            return False
        while len(self._loaded.keys() | in_use) >= self.max_loras:
            evicted = next(ref for ref in self._loaded if ref not in in_use)
            logger.info("adapter %s makes room for another", evicted.name)
            del self._loaded[evicted]
        return True

    def _load(self, ref: AdapterRef, device: torch.device) -> LoraAdapter:
        try:
            return load_adapter(Path(ref.path), self._spec, device, self._dtype, self._config.max_lora_rank)
        except InvalidInputError:
            self._valid.discard(ref)
            raise
        except Exception as error:  # whatever lies in the user's folder, only requests for it may fail
            self._valid.discard(ref)
            raise InvalidInputError(f"adapter '{ref.name}' cannot be loaded from {ref.path}: {error}") from error
