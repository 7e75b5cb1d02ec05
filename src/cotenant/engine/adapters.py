"""The LoRA adapters at hand: on the device in slots, behind them in host memory, behind that on disk.

Disk is read in the background. What is copied on the caller's side is only what goes from host memory into a slot, and
that copy is not waited for. Everything but the reading happens in the caller's thread.
"""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cotenant.config import LoraConfig
from cotenant.core.errors import INVALID_ADAPTER, InvalidInputError
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
    adapter: LoraAdapter


class Hold:
    """A sequence's claim on weights. ``ref`` is what they go by: a reference that nobody else asks for, once their
    name was dropped or given to others."""

    __slots__ = ("ref",)

    def __init__(self, ref: AdapterRef) -> None:
        self.ref = ref


class AdapterCache:
    """Adapters by reference; the least recently used make room, in the slots as in host memory.

    Of running sequences callers pass what is ``in_use``, which keeps its slot. What a sequence has begun with it holds
    until it ends, also while it is preempted: that stays in host memory, however much else is read, and under a
    reference of its own when its name is dropped or given to other weights.

    Invariant: what is in a slot is in host memory too, so losing the slot costs a copy and never a reading. On the CPU
    the two are one object. With ``use_stacks``, slots are those of ``stacks``, and ``LoraAdapter.slot`` says which.
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
        self._holds: dict[AdapterRef, set[Hold]] = {}
        self._generations = itertools.count(1)
        self._host: dict[AdapterRef, _Prepared] = {}
        self._recency: OrderedDict[AdapterRef, None] = OrderedDict()  # of what is in host memory or read; latest last
        self._readings: dict[AdapterRef, Reading] = {}
        self._failures: dict[AdapterRef, InvalidInputError] = {}
        self._by_ref: tuple[dict[AdapterRef, Any], ...] = (
            self._slots,
            self._host,
            self._recency,
            self._readings,
            self._failures,
        )
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="adapter-reader")

    @property
    def max_loras(self) -> int:
        """Slots."""
        return self._config.max_loras

    @property
    def max_cpu_loras(self) -> int:
        """Adapters in host memory: those in slots, and at least one that was read ahead. On top comes what is held and
        in no slot: by preempted sequences, and by those that waited for it when its name was dropped."""
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
        iteration, for the first ``max_read_ahead`` adapters that are waited for and not held. A failure that
        ``failure`` has told is forgotten.
        """
        some_left = self._settle()
        self._touch(ref)
        if ref not in self._host and ref not in self._readings:
            self._failures.pop(ref, None)
            self._readings[ref] = self.read(ref)
        return some_left

    def cancel(self, ref: AdapterRef) -> None:
        """Do not read what ``prefetch`` asked for, unless that has begun or somebody holds it. The next ``prefetch``
        asks anew."""
        if ref in self._readings and ref not in self._holds and self._readings[ref].cancel():
            self._forget(ref)

    def is_ready(self, ref: AdapterRef) -> bool:
        """Whether ``acquire`` may be called. True stays true until the next ``prefetch``, ``register`` or ``drop``."""
        if ref in self._host:
            return True
        reading = self._readings.get(ref)
        return reading is not None and reading.done() and not isinstance(reading.result(), InvalidInputError)

    def has_failed(self, ref: AdapterRef) -> bool:
        """Whether a reading has failed and ``failure`` has not told so."""
        reading = self._readings.get(ref)
        return reading is not None and reading.done() and isinstance(reading.result(), InvalidInputError)

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
            self._slots[ref] = _Slot(number, adapter)
        self._slots.move_to_end(ref)
        return self._slots[ref].adapter

    def fingerprint(self, ref: AdapterRef) -> bytes:
        """Of the weights that ``acquire`` gives: those that were read, whatever the folder holds by now. The caller has
        seen that the adapter is ready."""
        prepared = self._host[ref] if ref in self._host else self._readings[ref].result()
        assert not isinstance(prepared, InvalidInputError), f"adapter {ref.name} could not be read"
        return prepared.fingerprint

    # What is kept for sequences.

    def hold(self, ref: AdapterRef) -> Hold | None:
        """Keep the weights that are at hand as ``ref``, or are being read, until ``let_go``. None: there are none."""
        if ref not in self._host and ref not in self._readings:
            return None
        hold = Hold(ref)
        self._holds.setdefault(ref, set()).add(hold)
        return hold

    def is_held(self, ref: AdapterRef) -> bool:
        return ref in self._holds

    def let_go(self, hold: Hold) -> None:
        """Once for each hold. What is served under its name no more leaves with the last one."""
        holds = self._holds[hold.ref]
        holds.remove(hold)
        if not holds:
            del self._holds[hold.ref]
            if hold.ref.generation:
                self._forget(hold.ref)

    def drop(self, name: str) -> None:
        """Serve nothing under this name any more, but to those who hold it; and forget why it could not be read."""
        refs = (*self._host, *self._readings, *self._failures)
        for ref in [ref for ref in refs if ref.name == name and not ref.generation]:
            self.set_apart(ref)

    def set_apart(self, ref: AdapterRef) -> None:
        """Leave what goes by this reference, weights or a failed reading, to those who hold it."""
        if ref in self._holds:
            self._retire(ref)
        else:
            self._forget(ref)

    def _retire(self, ref: AdapterRef) -> None:
        """Give what is held a reference that nobody else asks for."""
        retired = replace(ref, generation=next(self._generations))
        holds = self._holds[retired] = self._holds.pop(ref)
        for hold in holds:
            hold.ref = retired
        for kept in self._by_ref:
            if ref in kept:
                kept[retired] = kept.pop(ref)

    def _forget(self, ref: AdapterRef) -> None:
        if ref in self._readings:
            self._readings[ref].cancel()
        for kept in self._by_ref:
            kept.pop(ref, None)

    def close(self) -> None:
        """Begin no more readings, and wait for the one that runs."""
        self._reader.shutdown(cancel_futures=True)

    def check_integrity(self, in_use: Set[AdapterRef]) -> None:
        """Raise AssertionError if slots or references are counted twice, or an adapter in use has no slot."""
        slots = self._slots.values()
        assert len({slot.number for slot in slots}) == len(slots) <= self.max_loras, "a slot was given twice"
        assert in_use <= self._slots.keys(), "an adapter that is in use lost its slot"
        at_hand = self._host.keys() | self._readings.keys() | self._failures.keys()
        assert self._holds.keys() <= at_hand, "what is held was forgotten"
        assert self._slots.keys() <= self._host.keys(), "an adapter in a slot left host memory"
        assert not self._readings.keys() & self._host.keys(), "what is at hand is read again"
        assert self._recency.keys() == self._readings.keys() | self._host.keys(), "the order of use lost count"
        for slot in slots if self.stacks is not None else ():
            assert slot.adapter.slot == slot.number, "an adapter lies in another slot than it was given"

    def _free_slot(self, in_use: Set[AdapterRef]) -> int:
        taken = {slot.number for slot in self._slots.values()}
        for number in range(self.max_loras):
            if number not in taken:
                return number
        victim = next((ref for ref in self._slots if ref not in in_use), None)
        assert victim is not None, "no slot can be had: all adapters are in use"
        logger.debug("adapter %s makes room for another", victim.name)
        return self._slots.pop(victim).number

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
        """Move what has been read to host memory; the least recently used that are in no slot, and that nobody holds,
        leave it. Whether any did."""
        for ref, reading in list(self._readings.items()):
            if reading.done() and not isinstance(prepared := reading.result(), InvalidInputError):
                self._host[ref] = prepared
                del self._readings[ref]
        num_over = len(self._host) - self.max_cpu_loras
        if num_over <= 0:  # as it is in most iterations
            return False
        num_over -= sum(ref in self._host and ref not in self._slots for ref in self._holds)
        idle = (ref for ref in self._recency if ref in self._host and not (ref in self._slots or ref in self._holds))
        leaving = list(itertools.islice(idle, max(0, num_over)))
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
            return _Prepared(packed, packed.fingerprint())
        except InvalidInputError as error:
            return InvalidInputError(error.message, code=INVALID_ADAPTER, param="model")
        except Exception as error:  # whatever lies in the user's folder, only requests for it may fail
            message = f"adapter '{ref.name}' cannot be loaded from {ref.path}: {error}"
            return InvalidInputError(message, code=INVALID_ADAPTER, param="model")
