"""Served adapters in slots on the device, where kernels find every row's own by its slot number.

A slot holds one adapter as one piece of memory: group after group, layer after layer, a group's A matrices one below
the other, then its B matrices, scales folded in and transposed, side by side, so that what one rank adds to a row lies
in one piece. All of them are padded to the adapter's largest rank, rounded up to a
multiple of 16, and packed at that rank: the part of a group begins at ``offset * rank``, so an adapter of rank 16 costs
in bytes what rank 16 needs, however large ranks may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from cotenant.device.transfer import host_tensor, pinned
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.lora import MODULE_GROUPS, LoraAdapter, ModuleKey, PackedBlock, PackedGroup, fingerprint
from cotenant.models.products import has_triton
from cotenant.models.spec import ModelSpec

_RANK_MULTIPLE = 16


class StackGroup(NamedTuple):
    """Where a module group of one layer lies in a slot, in elements per unit of rank."""

    modules: tuple[str, ...]
    sizes: tuple[int, ...]
    num_in: int
    a_offset: int
    b_offset: int

    @property
    def end(self) -> int:
        return self.b_offset + sum(self.sizes)


def rounded_rank(rank: int) -> int:
    """The rank that an adapter of this largest rank has in a slot."""
    return -(-rank // _RANK_MULTIPLE) * _RANK_MULTIPLE


def stack_bytes(spec: ModelSpec, num_slots: int, max_rank: int, dtype: torch.dtype) -> int:
    """Device memory of ``LoraStacks``: ``num_slots * max_rank * elements per rank * element size``."""
    return num_slots * rounded_rank(max_rank) * _elements_per_rank(_groups(spec)) * dtype.itemsize


def _groups(spec: ModelSpec) -> dict[ModuleKey, StackGroup]:
    """By (layer, the group's first module)."""
    groups, offset = {}, 0
    for layer in range(spec.num_layers):
        for modules in MODULE_GROUPS:
            shapes = [spec.module_shape(module) for module in modules]
            sizes, num_in = tuple(num_out for num_out, _ in shapes), shapes[0][1]
            group = StackGroup(modules, sizes, num_in, offset, offset + len(modules) * num_in)
            groups[layer, modules[0]] = group
            offset = group.end
    return groups


def _elements_per_rank(groups: dict[ModuleKey, StackGroup]) -> int:
    return max(group.end for group in groups.values())


def _matrices(data: torch.Tensor, group: StackGroup, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A group's part of a slot: a [modules * rank, in], and b [sum of sizes, rank], which lies there transposed."""
    a = data[group.a_offset * rank : group.b_offset * rank].view(-1, group.num_in)
    return a, data[group.b_offset * rank : group.end * rank].view(rank, -1).T


@dataclass(frozen=True, slots=True, eq=False)
class HostAdapter:
    """An adapter as it lies in a slot, in host memory; ``modules`` are those that have LoRA, the others are zeros."""

    name: str
    rank: int
    modules: frozenset[ModuleKey]
    parts: tuple[torch.Tensor, ...]  # together [elements per rank * rank]; pinned for CUDA

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def fingerprint(self) -> bytes:
        """As ``LoraAdapter.fingerprint``."""
        return fingerprint(str(self.rank), self.parts)


class LoraStacks:
    """``num_slots`` slots for adapters up to ``max_rank``. The memory stays where it is for good: captured graphs hold
    its address. ``ranks``: that of the adapter in each slot; 0 for a slot that was never filled."""

    def __init__(
        self, spec: ModelSpec, num_slots: int, max_rank: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.spec = spec
        self.num_slots = num_slots
        self.max_rank = rounded_rank(max_rank)
        self.groups = _groups(spec)
        self._elements_per_rank = _elements_per_rank(self.groups)
        num_elements = self.max_rank * self._elements_per_rank
        self.storage = torch.empty((num_slots, num_elements), device=device, dtype=dtype)
        self.ranks = [0] * num_slots

    def pack(self, adapter: LoraAdapter) -> HostAdapter:
        """A copy of ``adapter`` in host memory, ready for ``load``. May be called from any thread; on another than the
        loop's no request waits for it."""
        rank = rounded_rank(max(len(a) for a, _ in adapter.weights.values()))
        assert rank <= self.max_rank, f"rank {rank} in slots for {self.max_rank}"
        data = host_tensor((rank * self._elements_per_rank,), self.storage.dtype)
        for (layer, _), group in self.groups.items():
            a, b = _matrices(data, group, rank)
            for index, (module, b_rows) in enumerate(zip(group.modules, b.split(group.sizes), strict=True)):
                pair = adapter.weights.get((layer, module))
                if pair is not None:
                    a[index * rank : index * rank + len(pair.a)].copy_(pair.a.detach())
                    scaled = pair.b.detach().float() * adapter.scale_of(layer, module)
                    b_rows[:, : len(pair.a)].copy_(scaled)  # rounded once, to the stacks' dtype
        parts = pinned(data) if self.storage.device.type == "cuda" else (data,)
        return HostAdapter(adapter.name, rank, frozenset(adapter.weights), parts)

    def load(self, slot: int, host: HostAdapter) -> LoraAdapter:
        """Copy an adapter into a slot, on the current stream and without waiting for it. What the slot held is gone."""
        # By .data, a write does not count as a change of the tensors that a training step beside it keeps for its
        # backward: what it computes for the rows of served adapters is dropped.
        num_elements = sum(len(part) for part in host.parts)
        places = self.storage.data[slot, :num_elements].split([len(part) for part in host.parts])
        for place, part in zip(places, host.parts, strict=True):
            place.copy_(part, non_blocking=True)
        self.ranks[slot] = host.rank
        return _SlotAdapter(self, slot, host)


class _SlotAdapter(LoraAdapter):
    """What lies in a slot as an adapter for spans of rows; its matrices are views into the stacks."""

    def __init__(self, stacks: LoraStacks, slot: int, host: HostAdapter) -> None:
        super().__init__(host.name, stacks.spec, host.rank, host.rank, {})
        self.slot = slot
        self._data = stacks.storage[slot]
        self._groups = stacks.groups
        self._modules = host.modules
        self._views: dict[ModuleKey, PackedGroup | None] = {}

    @property
    def is_packed(self) -> bool:
        return True

    def packed(self, layer: int, first_module: str) -> PackedGroup | None:
        key = (layer, first_module)
        if key not in self._views:
            self._views[key] = self._view(layer, self._groups[key])
        return self._views[key]

    def _view(self, layer: int, group: StackGroup) -> PackedGroup | None:
        a, b = _matrices(self._data, group, self.rank)
        blocks, start = [], 0
        for index, (module, size) in enumerate(zip(group.modules, group.sizes, strict=True)):
            if (layer, module) in self._modules:
                columns = slice(start, start + size)
                blocks.append(PackedBlock(columns, slice(index * self.rank, (index + 1) * self.rank), b[columns]))
            start += size
        return PackedGroup(a, tuple(blocks)) if blocks else None


class GroupAdapters(NamedTuple):
    """One module group's adapters by row, as kernels read them.

    In a row's slot of ``stack``, from ``a_offset * rank`` elements on, there is a [modules * rank, in], and from
    ``b_offset * rank`` on b transposed, [rank, sum of sizes]. Module m's columns go with ranks ``m * rank`` and on of
    a. Ranks are multiples of 16.
    """

    slots: torch.Tensor  # [rows]; -1: none
    ranks: torch.Tensor  # [rows], of the row's adapter; 0 without one
    pieces: torch.Tensor | None  # as of ``GroupedLora``
    stack: torch.Tensor  # [slots, elements]
    a_offset: int
    b_offset: int
    sizes: tuple[int, ...]
    max_rank: int

    @property
    def num_modules(self) -> int:
        return len(self.sizes)

    @property
    def width(self) -> int:
        """Columns of ``x @ a.T`` at the largest rank."""
        return self.num_modules * self.max_rank


@dataclass(frozen=True, slots=True)
class GroupedLora:
    """Which slot each row of a batch takes its adapter from.

    ``slots`` [rows], int32 on the device, -1: the base model. ``ranks`` [rows], int32: what ``stacks.ranks`` says of
    that slot, 0 for the base model; with it no row has to look that up behind its slot. Both are read when the kernels
    run, so a captured graph serves whatever stands there at each replay; nothing that runs within the forward pass may
    write them. Rows of one adapter should lie side by side: it is then read once for several of them, up to 16 in a
    large batch. A row's result does not depend on the others. ``pieces``: from ``find_pieces``, for the kernels of a
    few rows.
    """

    stacks: LoraStacks
    slots: torch.Tensor
    ranks: torch.Tensor
    pieces: torch.Tensor | None = None

    @classmethod
    def of(cls, stacks: LoraStacks, slots: Sequence[int]) -> GroupedLora:
        """For rows with these slots, -1: none."""
        device = stacks.storage.device
        ranks = [stacks.ranks[slot] if slot >= 0 else 0 for slot in slots]
        on_device = torch.tensor([slots, ranks], dtype=torch.int32, device=device)
        return cls(stacks, *on_device)

    def at(self, rows: torch.Tensor) -> GroupedLora:
        """For a batch of these rows only."""
        return replace(self, slots=self.slots[rows], ranks=self.ranks[rows], pieces=None)

    def linear(self, x: torch.Tensor, base: FusedLinear, layer: int) -> torch.Tensor:
        """``base``'s product and every row's delta: [rows, in] -> [rows, sum of sizes]. Without autograd.

        With Triton nothing waits for the device and no shape depends on data. Without, it is slow and can not be
        captured.
        """
        assert x.shape[0] == self.slots.shape[0], f"{self.slots.shape[0]} slots for {x.shape[0]} rows"
        out = base.product(x)
        if x.is_cuda and has_triton():
            from cotenant.models.kernels.lora import expand, shrink

            expand(out, shrink(x, self.group(base, layer)))
        else:
            self._add_slot_by_slot(out, x, self.stacks.groups[layer, base.modules[0]])
        return out

    def group(self, base: FusedLinear, layer: int) -> GroupAdapters:
        """What kernels need to know about the adapters of one module group."""
        stacks, group = self.stacks, self.stacks.groups[layer, base.modules[0]]
        return GroupAdapters(
            self.slots,
            self.ranks,
            self.pieces,
            stacks.storage,
            group.a_offset,
            group.b_offset,
            group.sizes,
            stacks.max_rank,
        )

    def _add_slot_by_slot(self, out: torch.Tensor, x: torch.Tensor, group: StackGroup) -> None:
        for slot in self.slots.unique().tolist():
            rank = self.stacks.ranks[slot] if slot >= 0 else 0
            if rank == 0:
                continue
            rows = (self.slots == slot).nonzero().squeeze(1)
            a, b = _matrices(self.stacks.storage[slot], group, rank)
            downs = (x[rows] @ a.T).split(rank, dim=1)
            deltas = [down @ part.T for down, part in zip(downs, b.split(group.sizes), strict=True)]
            out.index_add_(0, rows, torch.cat(deltas, dim=1))
