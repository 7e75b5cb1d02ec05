"""Attention over one segment of a batch, on PyTorch's scaled_dot_product_attention.

What depends on the segment alone (indices, masks) is worked out once per batch by ``plan`` and used by every layer.

Rows of the KV cache: seen as [rows, kv_heads * head_dim], the page-major cache holds key ``r`` of page ``p`` of layer
0 in row ``p * page_rows + r`` with page_rows = layers * 2 * page_tokens, its value ``page_tokens`` rows further on, and
the next layer's ``2 * page_tokens`` rows further on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F

from cotenant.models import flash_attention
from cotenant.models.batch import PagedSegment, Segment, TrainingSegment
from cotenant.models.flash_attention import FlashAttention, Sequences
from cotenant.models.spec import ModelSpec
from cotenant.models.tape import KeptAttention, KeptGraph


class SegmentAttention(Protocol):
    """Attention of one segment's tokens in any layer."""

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor | None
    ) -> torch.Tensor:
        """``query`` [tokens, heads, head_dim], ``key`` and ``value`` [tokens, kv_heads, head_dim], rotated; the result
        is [tokens, heads * head_dim]. A paged segment writes its keys and values to ``kv_cache`` first."""


@runtime_checkable
class KeepingAttention(Protocol):
    """Attention of a training segment, which has a backward pass."""

    def keep(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, buffers: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, KeptAttention]:
        """As ``SegmentAttention``'s call, outside any graph, and what its backward pass needs. ``buffers``: those of
        the tape, of which "attended" and "logsumexp" are attention's."""
        ...


class AttentionBackend(Protocol):
    """An implementation of attention for one model on one device."""

    def plan(self, segment: Segment, kv_cache: torch.Tensor | None) -> SegmentAttention:
        """Prepare for a segment. ``kv_cache`` [pages, layers, 2, page_tokens, kv_heads, head_dim]; not needed for
        training segments."""


class SdpaBackend:
    """Runs everywhere: gathers pages, pads training sequences to the longest."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype

    def plan(self, segment: Segment, kv_cache: torch.Tensor | None) -> SegmentAttention:
        """Raises ValueError for a paged segment without a cache."""
        if isinstance(segment, TrainingSegment):
            window = self._spec.sliding_window
            if flash_attention.is_supported(self._device, self._dtype, self._spec.head_dim):
                return FlashAttention(Sequences.of(segment, window, self._device), window)
            return TrainingAttention(segment, window, self._device, self._dtype)
        if kv_cache is None:
            raise ValueError("a PagedSegment needs a kv_cache")
        rows = _CacheRows(segment, kv_cache)
        if segment.is_decode:
            return _Decode(segment, rows, self._spec.sliding_window, self._dtype)
        return _Prefill(segment, rows, self._spec.sliding_window, self._dtype)


class _CacheRows:
    """Where a paged segment's keys and values are, as rows of layer 0 (see the module's docstring)."""

    def __init__(self, segment: PagedSegment, kv_cache: torch.Tensor) -> None:
        _, num_layers, _, self._page_tokens, self._num_heads, self._head_dim = kv_cache.shape
        self._page_rows = num_layers * 2 * self._page_tokens
        self._width = self._num_heads * self._head_dim
        self._tables = segment.block_tables
        self._key_slots = self._rows_of(segment.slots // self._page_tokens, segment.slots)  # [tokens]
        self._value_slots = self._key_slots + self._page_tokens  # [tokens]

    def of_positions(self, positions: torch.Tensor, sequences: slice) -> torch.Tensor:
        """The rows to read for ``positions`` [sequences, n]: keys, then values: [2 * sequences * n]."""
        pages = self._tables[sequences].gather(1, positions // self._page_tokens)
        keys = self._rows_of(pages, positions).flatten()
        return torch.cat([keys, keys + self._page_tokens])

    def of_layer(self, layer: int, kv_cache: torch.Tensor) -> torch.Tensor:
        """The cache as [rows, kv_heads * head_dim], shifted so that row numbers of layer 0 mean this layer's rows."""
        return kv_cache.view(-1, self._width)[layer * 2 * self._page_tokens :]

    def write(self, layer_rows: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the segment's own tokens into the cache."""
        layer_rows.index_copy_(0, self._key_slots, key.flatten(1))
        layer_rows.index_copy_(0, self._value_slots, value.flatten(1))

    def read(
        self, layer_rows: torch.Tensor, rows: torch.Tensor, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values, each [sequences, kv_heads, n, head_dim], of what ``of_positions`` gave."""
        gathered = layer_rows.index_select(0, rows).view(2, num_sequences, -1, self._num_heads, self._head_dim)
        keys, values = gathered.transpose(2, 3).unbind()
        return keys, values

    def _rows_of(self, pages: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        return pages * self._page_rows + tokens % self._page_tokens


class _Decode:
    """One token per sequence, all sequences in one call.

    Shorter contexts are padded with the sequence's own last token, behind a mask, so no sequence ever reads another's
    memory. The query heads that share a key head are that head's queries, which spares repeating keys.
    """

    def __init__(self, segment: PagedSegment, rows: _CacheRows, sliding_window: int | None, dtype: torch.dtype) -> None:
        device = segment.slots.device
        lengths = [min(context, sliding_window or context) for context in segment.context_lengths]
        longest = max(lengths)
        last = torch.tensor(segment.context_lengths, device=device).sub_(1).unsqueeze(1)  # [sequences, 1]
        within = torch.arange(longest, device=device)  # [longest]
        self._mask: torch.Tensor | None = None
        if min(lengths) == longest:
            positions = last - (longest - 1) + within  # [sequences, longest]
        else:
            valid = torch.tensor(lengths, device=device).unsqueeze(1)  # [sequences, 1]
            positions = torch.minimum(last - (valid - 1) + within, last)
            self._mask = _additive(within < valid, dtype)[:, None, None]  # [sequences, 1, 1, longest]
        self._rows = rows
        self._num_sequences = len(lengths)
        self._read_rows = rows.of_positions(positions, slice(None))

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor | None
    ) -> torch.Tensor:
        assert kv_cache is not None
        layer_rows = self._rows.of_layer(layer, kv_cache)
        self._rows.write(layer_rows, key, value)
        keys, values = self._rows.read(layer_rows, self._read_rows, self._num_sequences)
        grouped = query.view(self._num_sequences, keys.shape[1], -1, keys.shape[3])  # [sequences, kv_heads, group, dim]
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return out.reshape(self._num_sequences, -1)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence's new tokens ``start:stop``. ``read_rows`` None: they are its whole context."""

    start: int
    stop: int
    read_rows: torch.Tensor | None  # [2 * keys]
    mask: torch.Tensor | None  # [queries, keys]; None: plain causal


class _Prefill:
    """Chunks of prompts, one call per sequence."""

    def __init__(self, segment: PagedSegment, rows: _CacheRows, sliding_window: int | None, dtype: torch.dtype) -> None:
        device = segment.slots.device
        self._rows = rows
        self._chunks: list[_Chunk] = []
        start = 0
        for index, (length, context) in enumerate(zip(segment.query_lengths, segment.context_lengths, strict=True)):
            window = sliding_window or context
            read_rows = mask = None
            if length < context or window < context:
                first = max(0, context - length - window + 1)  # what the chunk's first token can see
                keys = torch.arange(first, context, device=device)
                queries = torch.arange(context - length, context, device=device)
                read_rows = rows.of_positions(keys.unsqueeze(0), slice(index, index + 1))
                mask = _causal_mask(queries, keys, window, dtype)
            self._chunks.append(_Chunk(start, start + length, read_rows, mask))
            start += length

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor | None
    ) -> torch.Tensor:
        assert kv_cache is not None
        layer_rows = self._rows.of_layer(layer, kv_cache)
        self._rows.write(layer_rows, key, value)
        outs = []
        for chunk in self._chunks:
            if chunk.read_rows is None:
                keys, values = (
                    tensor[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0) for tensor in (key, value)
                )
            else:
                keys, values = self._rows.read(layer_rows, chunk.read_rows, 1)
            queries = query[chunk.start : chunk.stop].transpose(0, 1).unsqueeze(0)  # [1, heads, queries, dim]
            outs.append(_attend(queries, keys, values, chunk.mask)[0])
        return torch.cat(outs) if len(outs) > 1 else outs[0]


# Rows that sequences may have when padded to the longest, for each of their tokens; with more, they go one by one.
MOST_PADDED = 1.25


class TrainingAttention:
    """Whole sequences, padded on the right to the longest: a causal query never sees what comes after it. Sequences of
    very different lengths go one by one, so that memory follows their tokens."""

    def __init__(
        self, segment: TrainingSegment, sliding_window: int | None, device: torch.device, dtype: torch.dtype
    ) -> None:
        lengths = segment.lengths
        longest = max(lengths)
        self._num_sequences = len(lengths)
        self._padded_rows: torch.Tensor | None = None  # [tokens]: each token's row of [sequences * longest]
        if min(lengths) < longest:
            rows = [torch.arange(length, device=device) + index * longest for index, length in enumerate(lengths)]
            self._padded_rows = torch.cat(rows)
        self._num_padded = len(lengths) * longest
        self._one_by_one = lengths if self._num_padded > MOST_PADDED * sum(lengths) else None
        self._mask: torch.Tensor | None = None  # [longest, longest]; None: plain causal
        if sliding_window is not None and longest > sliding_window:
            positions = torch.arange(longest, device=device)
            self._mask = _causal_mask(positions, positions, sliding_window, dtype)

    def __call__(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor | None
    ) -> torch.Tensor:
        if self._one_by_one is not None:
            parts = zip(*(tensor.split(self._one_by_one) for tensor in (query, key, value)), strict=True)
            return torch.cat([self._alone(*part) for part in parts])
        queries, keys, values = (self._padded(tensor) for tensor in (query, key, value))
        out = _attend(queries, keys, values, self._mask).flatten(0, 1)  # [sequences * longest, heads * dim]
        return out if self._padded_rows is None else out.index_select(0, self._padded_rows)

    def keep(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, buffers: Mapping[str, torch.Tensor]
    ) -> tuple[torch.Tensor, KeptGraph]:
        if buffers:  # they share their memory with others: autograd would take a write there for one to these
            query, key, value = query.clone(), key.clone(), value.clone()
        query, key, value = (tensor.detach().requires_grad_() for tensor in (query, key, value))
        with torch.enable_grad():
            out = self(0, query, key, value, None)
        return out.detach(), KeptGraph((query, key, value), out)

    def _alone(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """One sequence: [tokens, heads * dim]."""
        mask = None if self._mask is None else self._mask[: len(query), : len(query)]
        queries, keys, values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (query, key, value))
        return _attend(queries, keys, values, mask)[0]

    def _padded(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, dim] -> [sequences, heads, longest, dim]."""
        if self._padded_rows is not None:
            blank = tensor.new_zeros(self._num_padded, *tensor.shape[1:])
            tensor = blank.index_copy(0, self._padded_rows, tensor)
        return tensor.view(self._num_sequences, -1, *tensor.shape[1:]).transpose(1, 2)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[sequences, heads, queries, dim] over [sequences, kv_heads, keys, dim] -> [sequences, queries, heads * dim].

    Without a mask: causal, with as many keys as queries.
    """
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, enable_gqa=True)
    return out.transpose(1, 2).flatten(2)


def _causal_mask(queries: torch.Tensor, keys: torch.Tensor, window: int, dtype: torch.dtype) -> torch.Tensor:
    """Which positions ``keys`` each of the positions ``queries`` sees: [queries, keys], to be added to the scores."""
    distance = queries.unsqueeze(1) - keys
    return _additive((distance >= 0) & (distance < window), dtype)


def _additive(visible: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where visible, -inf elsewhere."""
    return torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, float("-inf"))
