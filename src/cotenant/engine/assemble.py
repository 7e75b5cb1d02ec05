"""From planned sequences to the tensors of a batch: all arrays are filled on the host and sent in one copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch

from cotenant.engine.batcher import BatchPlan
from cotenant.engine.block_table import BlockTables, IntArray
from cotenant.engine.sequence import Sequence
from cotenant.models.batch import AdapterSpan, Batch, PagedSegment


@dataclass(frozen=True, slots=True)
class Entry:
    """Rows ``start : start + count`` of the batch are the next ``count`` tokens of ``sequence``."""

    sequence: Sequence
    start: int
    count: int


def assemble(plan: BatchPlan, tables: BlockTables, device: torch.device) -> tuple[Batch, tuple[Entry, ...]]:
    """Decodes as one segment, prompt chunks as the next; within each, sequences of one adapter side by side.

    The plan has been applied: every sequence has its seat, its pages and its adapter.
    """
    work = [_by_adapter((sequence, 1) for sequence in plan.decodes), _by_adapter(plan.chunks)]
    groups = [_Group.of(members, tables) for members in work if members]
    sent = _send(
        [
            *(group.token_ids for group in groups),
            *(group.positions for group in groups),
            *(group.slots for group in groups),
            *(group.tables.ravel() for group in groups),
        ],
        device,
    )
    num_tokens = sum(len(group.token_ids) for group in groups)
    token_ids, positions, slots, rows = sent.split_with_sizes([num_tokens] * 3 + [len(sent) - 3 * num_tokens])
    group_slots = slots.split_with_sizes([len(group.token_ids) for group in groups])
    group_rows = rows.split_with_sizes([group.tables.size for group in groups])
    segments = tuple(
        PagedSegment(group.counts, group.contexts, row.view(group.tables.shape), slot)
        for group, row, slot in zip(groups, group_rows, group_slots, strict=True)
    )
    entries = _entries(groups)
    return Batch(token_ids, positions, segments, _spans(entries)), entries


@dataclass(frozen=True, slots=True)
class _Group:
    """One segment's sequences and its arrays on the host."""

    sequences: tuple[Sequence, ...]
    counts: tuple[int, ...]
    contexts: tuple[int, ...]
    token_ids: IntArray  # [tokens]
    positions: IntArray  # [tokens]
    slots: IntArray  # [tokens]
    tables: IntArray  # [sequences, pages]

    @classmethod
    def of(cls, members: list[tuple[Sequence, int]], tables: BlockTables) -> _Group:
        sequences = tuple(sequence for sequence, _ in members)
        counts = tuple(count for _, count in members)
        token_ids: list[int] = []
        positions: list[int] = []
        seats: list[int] = []
        for sequence, count in members:
            first = sequence.num_computed
            token_ids += sequence.tokens[first : first + count]
            positions += range(first, first + count)
            assert sequence.seat is not None
            seats.append(sequence.seat)
        contexts = tuple(sequence.num_computed + count for sequence, count in members)
        where = np.array(positions, dtype=np.int64)
        return cls(
            sequences=sequences,
            counts=counts,
            contexts=contexts,
            token_ids=np.array(token_ids, dtype=np.int64),
            positions=where,
            slots=tables.slots(np.repeat(np.array(seats), counts), where),
            tables=tables.rows(seats, max(contexts)),
        )


def _by_adapter(work: Iterable[tuple[Sequence, int]]) -> list[tuple[Sequence, int]]:
    """The base model's sequences first, then each adapter's; the order within stays."""
    members = list(work)
    order: dict[int, int] = {id(None): 0}
    for sequence, _ in members:
        order.setdefault(id(sequence.adapter), len(order))
    if len(order) > 1:
        members.sort(key=lambda member: order[id(member[0].adapter)])
    return members


def _send(arrays: list[IntArray], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays)).to(device)


def _entries(groups: list[_Group]) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    start = 0
    for group in groups:
        for sequence, count in zip(group.sequences, group.counts, strict=True):
            entries.append(Entry(sequence, start, count))
            start += count
    return tuple(entries)


def _spans(entries: tuple[Entry, ...]) -> tuple[AdapterSpan, ...]:
    """One span per run of neighbours with the same adapter; the base model's rows have none."""
    spans: list[AdapterSpan] = []
    for entry in entries:
        adapter, stop = entry.sequence.adapter, entry.start + entry.count
        if adapter is None:
            continue
        if spans and spans[-1].adapter is adapter and spans[-1].stop == entry.start:
            spans[-1] = AdapterSpan(spans[-1].start, stop, adapter)
        else:
            spans.append(AdapterSpan(entry.start, stop, adapter))
    return tuple(spans)
