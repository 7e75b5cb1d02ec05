"""From planned sequences to the arrays of a batch: filled on the host, sent to the device in one copy."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from cotenant.engine.batcher import BatchPlan
from cotenant.engine.block_table import BlockTables, IntArray
from cotenant.engine.sequence import PENDING, Sequence
from cotenant.models.batch import AdapterSpan, Batch, PagedSegment, PageLists
from cotenant.models.decode_chunks import Int32Array


class Entry(msgspec.Struct, frozen=True):
    """Rows ``start : start + count`` of the batch are the ``count`` tokens of ``sequence`` from position ``first`` on.

    ``samples``: they are its last, and the last row chooses its next token. Hence no dataclass: each batch makes one
    for each of its sequences.
    """

    sequence: Sequence
    start: int
    count: int
    first: int
    samples: bool


@dataclass(frozen=True, slots=True)
class HostSegment:
    """Sequences that attend together, and their pages. Chunks are no decodes, not even those of one token: see
    ``PagedSegment``."""

    counts: tuple[int, ...]  # new tokens of each sequence
    contexts: tuple[int, ...]  # tokens that its part of the cache holds after this batch
    tables: IntArray  # [sequences, pages], padded
    is_decode: bool

    def page_counts(self, page_tokens: int) -> Int32Array:
        """Pages that hold each sequence's context. [sequences]"""
        return -(-np.array(self.contexts, dtype=np.int32) // page_tokens)


@dataclass(frozen=True, slots=True)
class HostBatch:
    """A batch before it is sent. Decodes come first, then chunks of prompts; within each, sequences of one adapter lie
    side by side. A token id of ``PENDING`` stands for the last token of the row's seat."""

    token_ids: IntArray  # [tokens]
    positions: IntArray  # [tokens]
    slots: IntArray  # [tokens]
    seats: IntArray  # [tokens]
    segments: tuple[HostSegment, ...]
    entries: tuple[Entry, ...]
    page_tokens: int

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_decode(self) -> bool:
        return len(self.segments) == 1 and self.segments[0].is_decode

    @property
    def has_adapters(self) -> bool:
        return any(entry.sequence.adapter is not None for entry in self.entries)

    def sampled_rows(self) -> list[int]:
        """The rows that choose a next token."""
        return [entry.start + entry.count - 1 for entry in self.entries if entry.samples]

    def adapter_slots(self) -> IntArray:
        """Each row's adapter slot, -1 for the base model. [tokens]"""
        slots = [-1 if e.sequence.adapter is None else e.sequence.adapter.slot for e in self.entries]
        return np.repeat(np.array(slots, dtype=np.int64), [entry.count for entry in self.entries])

    def spans(self) -> tuple[AdapterSpan, ...]:
        """One span per run of neighbours with the same adapter; the base model's rows have none."""
        spans: list[AdapterSpan] = []
        for entry in self.entries:
            adapter, stop = entry.sequence.adapter, entry.start + entry.count
            if adapter is None:
                continue
            if spans and spans[-1].adapter is adapter and spans[-1].stop == entry.start:
                spans[-1] = AdapterSpan(spans[-1].start, stop, adapter)
            else:
                spans.append(AdapterSpan(entry.start, stop, adapter))
        return tuple(spans)


def assemble(plan: BatchPlan, tables: BlockTables) -> HostBatch:
    """The plan has been applied: every sequence has its seat, its pages and its adapter."""
    token_ids: list[int] = []
    positions: list[int] = []
    seats: list[int] = []
    counts: list[int] = []
    entries: list[Entry] = []
    segments: list[HostSegment] = []
    decodes = _by_adapter((sequence, 1) for sequence in plan.decodes)
    for members in (decodes, _by_adapter(plan.chunks)):
        if not members:
            continue
        contexts = []
        for sequence, count in members:
            first = sequence.num_computed
            samples = first + count == len(sequence.tokens) and sequence.request.sampling.max_tokens > 0
            entries.append(Entry(sequence, len(token_ids), count, first, samples))
            token_ids += sequence.tokens[first : first + count]
            positions += range(first, first + count)
            assert sequence.seat is not None
            seats.append(sequence.seat)
            counts.append(count)
            contexts.append(first + count)
        rows = tables.rows(seats[-len(members) :], max(contexts))
        new = tuple(counts[-len(members) :])
        segments.append(HostSegment(new, tuple(contexts), rows, is_decode=members is decodes))
    where = np.array(positions, dtype=np.int64)
    seat_of = np.repeat(np.array(seats), counts)
    return HostBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=where,
        slots=tables.slots(seat_of, where),
        seats=seat_of,
        segments=tuple(segments),
        entries=tuple(entries),
        page_tokens=tables.page_tokens,
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


def send(host: HostBatch, device: torch.device, last_tokens: torch.Tensor) -> Batch:
    """The batch on the device, for ``Decoder.layer``. ``last_tokens`` [seats]: what pending token ids stand for."""
    sent = _on_device(
        [host.token_ids, host.positions, host.slots, host.seats, *(s.tables.ravel() for s in host.segments)], device
    )
    count = host.num_tokens
    token_ids, positions, slots, seats = sent[: 4 * count].view(4, count)
    if PENDING in host.token_ids:
        token_ids = torch.where(token_ids < 0, last_tokens[seats], token_ids)
    segments = []
    row, place = 0, 4 * count
    for segment in host.segments:
        size, num_tokens = segment.tables.size, sum(segment.counts)
        tables = sent[place : place + size].view(segment.tables.shape)
        pages = page_lists(segment, host.page_tokens, device)
        written = slots[row : row + num_tokens]
        segments.append(PagedSegment(segment.counts, segment.contexts, tables, written, segment.is_decode, pages))
        row, place = row + num_tokens, place + size
    return Batch(token_ids, positions, tuple(segments), host.spans())


def page_indices(segment: HostSegment, page_tokens: int) -> tuple[Int32Array, Int32Array, Int32Array]:
    """(indptr, indices, last_lengths) of a segment's sequences, as in ``PageLists``, on the host."""
    counts = segment.page_counts(page_tokens)
    indptr = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=indptr[1:])
    used = np.arange(segment.tables.shape[1], dtype=np.int32) < counts[:, None]
    last = (np.asarray(segment.contexts, dtype=np.int32) - 1) % page_tokens + 1
    return indptr, segment.tables[used].astype(np.int32), last


def page_lists(segment: HostSegment, page_tokens: int, device: torch.device) -> PageLists | None:
    """A segment's pages for a CUDA device, sent without waiting for it; on others nobody reads them."""
    if device.type != "cuda":
        return None
    indptr, indices, last = (torch.from_numpy(array).pin_memory() for array in page_indices(segment, page_tokens))
    return PageLists(indptr, indices.to(device, non_blocking=True), last)


def _on_device(arrays: list[IntArray], device: torch.device) -> torch.Tensor:
    whole = torch.from_numpy(np.concatenate(arrays))
    return whole.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else whole
