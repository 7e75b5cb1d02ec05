"""A batch: tokens of several tenants that go through the decoder together.

Linear layers run over all tokens at once. Attention runs segment by segment. LoRA deltas are added span by span.
Tokens lie segment after segment, in the order of ``Batch.segments``; spans cover disjoint ranges of the same order.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from cotenant.models.lora import LoraAdapter


@dataclass(frozen=True, slots=True)
class PageLists:
    """Which pages hold each sequence's tokens, one list after the other.

    ``indptr`` [sequences + 1] and ``last_lengths`` [sequences] (tokens in a sequence's last page) are on the host;
    ``indices`` [pages] is on the device. All int32.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_lengths: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedSegment:
    """Sequences that attend over the paged KV cache: prefill chunks, or one decode token each.

    Each sequence brings ``query_lengths[i]`` new tokens, which are its last ones: after they are written to the cache
    it holds ``context_lengths[i]`` tokens in all. Its token at position p lies in page
    ``block_tables[i, p // page_tokens]``, row ``p % page_tokens``. A decode segment has only ones in ``query_lengths``,
    and so may a segment of chunks; a batch has at most one of either, since a back end may keep one plan of each.
    ``pages`` says the same as ``block_tables`` to attention back ends that want it so.
    """

    query_lengths: tuple[int, ...]
    context_lengths: tuple[int, ...]
    block_tables: torch.Tensor  # [sequences, max_pages], int64, padded with any valid page
    slots: torch.Tensor  # [tokens], int64: page * page_tokens + row, where each new token's K and V go
    is_decode: bool
    pages: PageLists | None = None

    @property
    def num_tokens(self) -> int:
        return sum(self.query_lengths)


@dataclass(frozen=True, slots=True)
class TrainingSegment:
    """Whole sequences of a training micro-batch, one after the other, each attending to itself alone, causally."""

    lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)


Segment = PagedSegment | TrainingSegment


@dataclass(frozen=True, slots=True)
class AdapterSpan:
    """Tokens ``start:stop`` of the batch belong to ``adapter``."""

    start: int
    stop: int
    adapter: LoraAdapter


@dataclass(frozen=True, slots=True)
class Batch:
    """One forward pass. ``positions`` are positions within each token's own sequence.

    ``head``: a batch whose segments are the first of this one's, and whose tokens the first. What is planned for
    attention over them holds for both, and is planned once: layers of the two may run in turn.

    ``derived`` holds what decoders work out once per batch instead of once per layer, by decoder. It lives and dies
    with the batch.
    """

    token_ids: torch.Tensor  # [tokens], int64
    positions: torch.Tensor  # [tokens], int64
    segments: tuple[Segment, ...]
    spans: tuple[AdapterSpan, ...] = ()
    head: Batch | None = None
    derived: dict[object, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])
