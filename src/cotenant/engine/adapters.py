"""The LoRA adapters at hand: on the device in slots, behind them in host memory, behind that on disk.

Disk is read in the background. What is copied on the caller's side is only what goes from host memory into a slot, and
that copy is not waited for. Everything but the reading happens in the caller's thread.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from cotenant.config import LoraConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.request import AdapterRef
from cotenant.models.lora import LoraAdapter, read_adapter
from cotenant.models.lora_stacks import HostAdapter, LoraStacks
from cotenant.models.spec import ModelSpec

logger = logging.getLogger(__name__)

_MIN_CPU_LORAS = 16


class _Prepared(NamedTuple):
    """In host memory: as it lies in a slot, or, without stacks, packed for products per span."""

    adapter: HostAdapter | LoraAdapter
    fingerprint: bytes


Reading = Future[_Prepared | InvalidInputError]
"""An adapter that is being read, or why it cannot be."""


class _Slot(NamedTuple):
    number: int
    ref: AdapterRef
    adapter: LoraAdapter


class AdapterCache:
    """Adapters by reference; the least recently used make room, in the slots as in host memory.

    Running sequences hold theirs: callers pass ``in_use``, which is never evicted. An adapter that was dropped while
    sequences run on it stays with them until they end, and keeps its slot until then.

    Invariant: what is in a slot is in host memory too, so losing the slot costs a copy and never a reading. On the CPU
    the two are one object. With ``use_stacks``, slots are those of
    ``stacks``, and ``LoraAdapter.slot`` says which.
    """

    def __init__(
        self, spec: ModelSpec, device: torch.device, dtype: torch.dtype, config: LoraConfig, use_stacks: bool
    ) -> None:
        self.stacks = LoraStacks(spec, config.max_loras, config.max_lora_rank, device, dtype) if use_stacks else None
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._config = config
        self._slots: OrderedDict[AdapterRef, _Slot] = OrderedDict()  # least recently used first
        self._dropped: list[_Slot] = []
        self._host: dict[AdapterRef, _Prepared] = {}
        self._recency: OrderedDict[AdapterRef, None] = OrderedDict()  # of what is in host memory or read; latest last
        self._readings: dict[AdapterRef, Reading] = {}
        self._failures: dict[AdapterRef, InvalidInputError] = {}
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")

    @property
    def max_loras(self) -> int:
        """Slots."""
        return self._config.max_loras

    @property
    def max_cpu_loras(self) -> int:
        """Adapters in host memory: those in slots, and at least one that was read ahead."""
        wanted = self._config.max_cpu_loras
        return max(4 * self.max_loras, _MIN_CPU_LORAS) if wanted is None else max(wanted, self.max_loras + 1)

    @property
    def max_read_ahead(self) -> int:
        """Adapters that host memory holds beside those in slots."""
        return self.max_cpu_loras - self.max_loras

    # Into host memory.

    def prefetch(self, ref: AdapterRef) -> bool:
        """Begin to read an adapter unless it is at hand, and count it as just used. Returns at once, and whether others
        have left host memory for what was read meanwhile.

        What is read later may push out what was read ahead and not used yet. To keep it, call this again in every
        iteration, for the first ``max_read_ahead`` adapters that are waited for. A failure that ``failure`` has told is
        forgotten.
        """
        some_left = self._settle()
        self._touch(ref)
        if ref not in self._host and ref not in self._readings:
            self._failures.pop(ref, None)
            self._readings[ref] = self.read(ref)
        return some_left

    def is_ready(self, ref: AdapterRef, in_use: Set[AdapterRef]) -> bool:
        """Whether ``acquire`` may be called. True stays true until the next ``prefetch``, ``register`` or ``drop``.

        False as well while sequences still run on an adapter that was dropped under the same reference: the two would
        need two slots.
        """
        if ref in in_use and any(slot.ref == ref for slot in self._dropped):
            return False
        if ref in self._host:
            return True
        reading = self._readings.get(ref)
        return reading is not None and reading.done() and not isinstance(reading.result(), InvalidInputError)

    def failure(self, ref: AdapterRef) -> InvalidInputError | None:
        """Why the last reading failed; told until ``drop`` or a new ``prefetch``."""
        reading = self._readings.get(ref)
        if reading is not None and reading.done() and isinstance(error := reading.result(), InvalidInputError):
            del self._readings[ref], self._recency[ref]
            self._failures[ref] = error
        return self._failures.get(ref)

    def wait(self, ref: AdapterRef) -> None:
        """Block until a reading that was begun has ended."""
        if ref in self._readings:
            self._readings[ref].exception()

    def register(self, ref: AdapterRef, adapter: LoraAdapter) -> None:
        """Serve a frozen copy as ``ref`` from now on, once it has been made ready, without reading it from disk.

        Once it has left host memory the folder is read.
        """
        snapshot = adapter.snapshot()
        self.replace(ref, self._reader.submit(self._prepared, ref, lambda _: snapshot))

    def read(self, ref: AdapterRef) -> Reading:
        """Begin to read a folder for ``replace``, whatever is at hand under its name."""
        return self._reader.submit(self._prepared, ref, self._read)

    def replace(self, ref: AdapterRef, reading: Reading) -> None:
        """Serve what ``reading`` gives as ``ref`` from now on, and forget all else of its name."""
        self.drop(ref.name)
        self._settle()
        self._touch(ref)
        self._readings[ref] = reading

    # Into a slot.

    def acquire(self, ref: AdapterRef, in_use: Set[AdapterRef]) -> LoraAdapter:
        """The adapter in a slot. The caller has seen that it is ready, and that it is in use or a slot can be had."""
        prepared = self._take_prepared(ref)
        if ref not in self._slots:
            number = self._free_slot(in_use)
            if isinstance(prepared.adapter, HostAdapter):
                assert self.stacks is not None
                adapter = self.stacks.load(number, prepared.adapter)
            else:
                adapter = prepared.adapter.on_device(self._device)
            self._slots[ref] = _Slot(number, ref, adapter)
        self._slots.move_to_end(ref)
        return self._slots[ref].adapter

    def fingerprint(self, ref: AdapterRef) -> bytes:
        """Of the weights that ``acquire`` gives: those that were read, whatever the folder holds by now. The caller has
        seen that the adapter is ready."""
        prepared = self._host[ref] if ref in self._host else self._readings[ref].result()
        assert not isinstance(prepared, InvalidInputError), f"adapter {ref.name} could not be read"
        return prepared.fingerprint

    def drop(self, name: str) -> None:
        """Forget the adapters served under this name, and why they could not be read."""
        for ref in [ref for ref in self._slots if ref.name == name]:
            self._dropped.append(self._slots.pop(ref))
        for ref in [ref for ref in self._readings if ref.name == name]:
            self._readings.pop(ref).cancel()
        for kept in (self._host, self._recency, self._failures):
            for ref in [ref for ref in kept if ref.name == name]:
                del kept[ref]

    def close(self) -> None:
        """Begin no more readings, and wait for the one that runs."""
        self._reader.shutdown(cancel_futures=True)

    def check_integrity(self, in_use: Set[AdapterRef]) -> None:
        """Raise AssertionError if slots or references are counted twice, or an adapter in use has no slot."""
        slots = [*self._slots.values(), *self._dropped]
        assert len({slot.number for slot in slots}) == len(slots) <= self.max_loras, "a slot was given twice"
        assert in_use <= {slot.ref for slot in slots}, "an adapter that is in use lost its slot"
        assert self._slots.keys() <= self._host.keys(), "an adapter in a slot left host memory"
        assert not self._readings.keys() & self._host.keys(), "what is at hand is read again"
        assert self._recency.keys() == self._readings.keys() | self._host.keys(), "the order of use lost count"
        for slot in slots if self.stacks is not None else ():
            assert slot.adapter.slot == slot.number, "an adapter lies in another slot than it was given"

    def _free_slot(self, in_use: Set[AdapterRef]) -> int:
        self._release_dropped(in_use)
        taken = {slot.number for slot in (*self._slots.values(), *self._dropped)}
        for number in range(self.max_loras):
            if number not in taken:
                return number
        victim = next((ref for ref in self._slots if ref not in in_use), None)
        assert victim is not None, "no slot can be had: all adapters are in use"
        logger.info("adapter %s makes room for another", victim.name)
        return self._slots.pop(victim).number

    def _release_dropped(self, in_use: Set[AdapterRef]) -> None:
        self._dropped = [slot for slot in self._dropped if slot.ref in in_use]

    def _take_prepared(self, ref: AdapterRef) -> _Prepared:
        """From host memory; one that was just read moves there, and nothing leaves for it."""
        if ref not in self._host:
            assert ref in self._readings, f"adapter {ref.name} is not ready"
            prepared = self._readings.pop(ref).result()
            assert not isinstance(prepared, InvalidInputError), f"adapter {ref.name} could not be read"
            self._host[ref] = prepared
        self._touch(ref)
        return self._host[ref]

    def _settle(self) -> bool:
        """Move what has been read to host memory; the least recently used that are in no slot leave it. Whether any
        did."""
        for ref, reading in list(self._readings.items()):
            if reading.done() and not isinstance(prepared := reading.result(), InvalidInputError):
                self._host[ref] = prepared
                del self._readings[ref]
        num_over = max(0, len(self._host) - self.max_cpu_loras)
        idle = (ref for ref in self._recency if ref in self._host and ref not in self._slots)
        leaving = list(islice(idle, num_over))
        for ref in leaving:
            del self._host[ref], self._recency[ref]
        return bool(leaving)

    def _touch(self, ref: AdapterRef) -> None:
        self._recency[ref] = None
        self._recency.move_to_end(ref)

    # In the background.

    def _read(self, ref: AdapterRef) -> LoraAdapter:
        return read_adapter(Path(ref.path), self._spec, self._config.max_lora_rank)

    def _prepared(self, ref: AdapterRef, read: Callable[[AdapterRef], LoraAdapter]) -> _Prepared | InvalidInputError:
        """As it is kept in host memory. Errors are returned: raised, they would keep what was read alive."""
        try:
            adapter = read(ref)
            packed: HostAdapter | LoraAdapter
            if self.stacks is not None:
                packed = self.stacks.pack(adapter)
            else:
                packed = adapter.for_serving(torch.device("cpu"), self._dtype)
            # Of the copy that is served: what was read may still be the file's own pages, which change with the file.
            return _Prepared(packed, packed.fingerprint())
        except InvalidInputError as error:
            return InvalidInputError(error.message, code="invalid_adapter", param="model")
        except Exception as error:  # whatever lies in the user's folder, only requests for it may fail
            message = f"adapter '{ref.name}' cannot be loaded from {ref.path}: {error}"
            return InvalidInputError(message, code="invalid_adapter", param="model")
