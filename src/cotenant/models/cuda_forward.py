"""The decoder's forward pass for serving on a CUDA device: fused kernels, capturable, without autograd.

The same weights and the same roundings as ``Decoder.layer``, which training and the CPU use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from cotenant.models.batch import AdapterSpan
from cotenant.models.decoder import Decoder
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.kernels.elementwise import add_rms_norm, embed, rms_norm, silu_and_multiply
from cotenant.models.kernels.lora_shrink import find_pieces
from cotenant.models.kernels.rope import rope_and_cache
from cotenant.models.kernels.skinny import Unfinished, fits_unfinished, skinny_product, unfinished_product
from cotenant.models.linear import linear
from cotenant.models.lora_stacks import GroupedLora
from cotenant.models.paged_attention import without_padding
from cotenant.models.products import product
from cotenant.models.skinny_tiling import MAX_ROWS

# (layer, queries [tokens, heads, width], the layer's part of the cache) -> [tokens, heads, width], the cache's width
Attend = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """What a forward pass reads about its tokens, each int32 [tokens] on the device. A negative token id stands for the
    last token of the row's seat; a negative slot keeps nothing in the cache."""

    token_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    seats: torch.Tensor


class CudaForward:
    """``last_tokens``: int64, by seat. ``kv_cache`` [pages, layers, 2, page_tokens, kv_heads, width]."""

    def __init__(self, decoder: Decoder, kv_cache: torch.Tensor, last_tokens: torch.Tensor) -> None:
        self._spec = decoder.spec
        self._weights = decoder.weights
        self._rope_table = decoder.rope.table
        self._last_tokens = last_tokens
        self._layer_caches = [kv_cache[:, layer] for layer in range(decoder.spec.num_layers)]

    def __call__(
        self,
        tokens: TokenInputs,
        attend: Attend,
        *,
        rows: torch.Tensor | None = None,
        spans: Sequence[AdapterSpan] = (),
        grouped: GroupedLora | None = None,
        num_layers: int | None = None,
    ) -> torch.Tensor:
        """All layers and the final norm: [tokens, hidden], or [len(rows), hidden] if only those rows are wanted.
        ``num_layers``: only the first layers, which launch every kernel that the others do.

        Only their keys and values are wanted of the other rows, so the last layer ends for them before its output
        projection. Adapters that come as ``spans`` need all rows there.
        """
        spec, weights = self._spec, self._weights
        layers, epsilon = weights.layers[:num_layers], spec.rms_norm_eps
        # Now and not where it is wanted: no kernel of the chain may write what the next one fetches ahead.
        grouped_at_rows = None if grouped is None or rows is None else _with_pieces(grouped.at(rows))
        grouped = _with_pieces(grouped)
        residual = embed(tokens.token_ids, self._last_tokens, tokens.seats, weights.embedding)
        normed = rms_norm(residual, layers[0].input_norm, epsilon)
        for index, layer in enumerate(layers):
            is_last = index + 1 == len(layers)
            qkv = _linear(normed, layer.qkv, index, spans, grouped)
            cache = self._layer_caches[index]
            query = rope_and_cache(
                qkv, tokens.positions, tokens.slots, self._rope_table, layer.qk_norm, cache, spec.num_heads, epsilon
            )
            attended = without_padding(attend(index, query, cache), spec.head_dim)
            if is_last and rows is not None and not spans:
                attended, residual = attended[rows], residual[rows]
                grouped, rows = grouped_at_rows, None
            normed = add_rms_norm(
                _linear(attended, layer.output, index, spans, grouped), residual, layer.mlp_norm, epsilon
            )
            activated = silu_and_multiply(_linear(normed, layer.gate_up, index, spans, grouped))
            next_norm = weights.final_norm if is_last else layers[index + 1].input_norm
            normed = add_rms_norm(_linear(activated, layer.down, index, spans, grouped), residual, next_norm, epsilon)
        return normed if rows is None else normed[rows]

    def logits(self, normed: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, hidden] after the final norm -> [rows, vocab], in the model's dtype; written to ``out`` if given."""
        compressed = self._weights.compressed_head
        if compressed is not None and len(normed) <= MAX_ROWS:
            return skinny_product(normed, compressed, None, out)
        return product(normed, self._weights.head, out=out)


def _with_pieces(grouped: GroupedLora | None) -> GroupedLora | None:
    if grouped is None or len(grouped.slots) > MAX_ROWS:
        return grouped
    return replace(grouped, pieces=find_pieces(grouped.slots, grouped.ranks))


def _linear(
    x: torch.Tensor, base: FusedLinear, layer: int, spans: Sequence[AdapterSpan], grouped: GroupedLora | None
) -> torch.Tensor | Unfinished:
    """For a few rows the kernel that follows finishes the product: what would be launches of its own costs nothing."""
    if spans or not fits_unfinished(x, base):
        return linear(x, base, layer, spans, grouped)
    return unfinished_product(x, base, None if grouped is None else grouped.group(base, layer))
