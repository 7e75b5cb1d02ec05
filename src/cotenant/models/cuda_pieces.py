"""Batches with prompt chunks, captured piece by piece: all that lies between the attention of one layer and the next.

Attention depends on how a batch is made up, the rest on its number of tokens alone. Launching a layer's kernels one by
one takes the host longer than a small batch takes the device; a piece is one launch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from cotenant.device.cuda.graphs import capture_graph
from cotenant.models.cuda_forward import TokenInputs
from cotenant.models.decoder import Decoder
from cotenant.models.kernels.elementwise import add_rms_norm, embed, rms_norm, silu_and_multiply
from cotenant.models.kernels.rope import rope_and_cache
from cotenant.models.linear import linear
from cotenant.models.paged_attention import without_padding

_NUM_TIMES = 10  # the host is busy with compilers


class PieceTensors:
    """Tensors of fixed addresses, for batches of ``size`` tokens and smaller ones: one batch at a time is in them.

    ``inputs`` int32 [4, size]: token ids, positions, slots, seats (see ``TokenInputs``). Rows past a batch's own tokens
    have slot -1: they are computed and keep nothing.
    """

    def __init__(self, decoder: Decoder, size: int, width: int) -> None:
        """``width``: of a head in the cache."""
        weights, spec = decoder.weights.embedding, decoder.spec
        self.inputs = torch.zeros((4, size), dtype=torch.int32, device=weights.device)
        self.inputs[2] = -1
        self.residual = weights.new_zeros((size, spec.hidden_size))
        self.query = weights.new_zeros((size, spec.num_heads, width))
        self.attended = weights.new_zeros((size, spec.num_heads, width))


class CapturedPieces:
    """One batch size: what is captured for it, and its parts of the tensors that the pieces share."""

    def __init__(self, layers: LayerPieces, size: int, tensors: PieceTensors, pool: Any) -> None:
        self.inputs = tensors.inputs[:, :size]
        self.residual = tensors.residual[:size]
        self.query, self.attended = tensors.query[:size], tensors.attended[:size]
        self._layers = layers
        num_layers = layers.decoder.spec.num_layers
        self._graphs = [capture_graph(partial(self._run_piece, index), pool) for index in range(num_layers)]

    def _run_piece(self, index: int) -> None:
        tokens = TokenInputs(*self.inputs)
        if index == 0:
            self._layers.begin(tokens, self.residual, self.query)
        else:
            self._layers.between(index - 1, self.attended, self.residual, tokens, self.query)

    def launch(self, index: int) -> None:
        """Up to the queries of layer ``index``, which are then in ``query``; its keys and values are in the cache."""
        self._graphs[index].replay()

    def layer_ms(self) -> float:
        """What the device needs from one layer's attention to the next one's: the least of a few times."""
        index = len(self._graphs) // 2
        times_ms: list[float] = []
        for _ in range(_NUM_TIMES):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.launch(index)  # the device is busy with it while the host launches what is timed
            start.record()
            self.launch(index)
            end.record()
            end.synchronize()
            times_ms.append(start.elapsed_time(end))
        return min(times_ms)


def not_slower_than_larger(times_ms: Mapping[int, float]) -> list[int]:
    """Of sizes with these times those that are faster than every larger one, the smallest first."""
    kept: list[int] = []
    for size in sorted(times_ms, reverse=True):
        if not kept or times_ms[size] < times_ms[kept[-1]]:
            kept.append(size)
    return kept[::-1]


class LayerPieces:
    """The decoder without adapters, cut at each layer's attention. The same operations as ``CudaForward``. What is
    captured for one lane and for another runs in the same tensors: batches do not overlap."""

    def __init__(self, decoder: Decoder, kv_cache: torch.Tensor, last_tokens: torch.Tensor) -> None:
        self.decoder = decoder
        self._last_tokens = last_tokens
        self._caches = [kv_cache[:, layer] for layer in range(decoder.spec.num_layers)]
        self._tensors: PieceTensors | None = None

    def capture(self, sizes: Sequence[int], pool: Any) -> dict[int, CapturedPieces]:
        """Pieces for batches of these many tokens, on the current stream. The first call has the largest."""
        if self._tensors is None:
            self._tensors = PieceTensors(self.decoder, max(sizes), self._caches[0].shape[-1])
        return {size: CapturedPieces(self, size, self._tensors, pool) for size in sorted(sizes, reverse=True)}

    @staticmethod
    def worthwhile(captured: Mapping[int, CapturedPieces]) -> dict[int, CapturedPieces]:
        """By size, the smallest first, without those that take longer on the current stream than a larger one: a
        matrix product is slow in some of them."""
        times_ms = {size: pieces.layer_ms() for size, pieces in captured.items()}
        return {size: captured[size] for size in not_slower_than_larger(times_ms)}

    def begin(self, tokens: TokenInputs, residual: torch.Tensor, query: torch.Tensor) -> None:
        """From token ids to the first layer's queries; writes ``residual`` and ``query``."""
        weights = self.decoder.weights
        residual.copy_(embed(tokens.token_ids, self._last_tokens, tokens.seats, weights.embedding))
        normed = rms_norm(residual, weights.layers[0].input_norm, self.decoder.spec.rms_norm_eps)
        self._make_query(0, normed, tokens, query)

    def between(
        self, index: int, attended: torch.Tensor, residual: torch.Tensor, tokens: TokenInputs, query: torch.Tensor
    ) -> None:
        """From what layer ``index`` attended to, to the next layer's queries; updates ``residual``, writes
        ``query``."""
        next_norm = self.decoder.weights.layers[index + 1].input_norm
        normed = self._after_attention(index, attended, residual, next_norm)
        self._make_query(index + 1, normed, tokens, query)

    def end(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """What the last layer attended to [rows, heads, width] and the residual [rows, hidden] of the wanted rows to
        their hidden states after the final norm."""
        last = self.decoder.spec.num_layers - 1
        return self._after_attention(last, attended, residual, self.decoder.weights.final_norm)

    def _after_attention(
        self, index: int, attended: torch.Tensor, residual: torch.Tensor, next_norm: torch.Tensor
    ) -> torch.Tensor:
        layer, epsilon = self.decoder.weights.layers[index], self.decoder.spec.rms_norm_eps
        attended = without_padding(attended, self.decoder.spec.head_dim)
        normed = add_rms_norm(linear(attended, layer.output, index), residual, layer.mlp_norm, epsilon)
        activated = silu_and_multiply(linear(normed, layer.gate_up, index))
        return add_rms_norm(linear(activated, layer.down, index), residual, next_norm, epsilon)

    def _make_query(self, index: int, normed: torch.Tensor, tokens: TokenInputs, query: torch.Tensor) -> None:
        spec, layer = self.decoder.spec, self.decoder.weights.layers[index]
        qkv = linear(normed, layer.qkv, index)
        rotated = rope_and_cache(
            qkv,
            tokens.positions,
            tokens.slots,
            self.decoder.rope.table,
            layer.qk_norm,
            self._caches[index],
            spec.num_heads,
            spec.rms_norm_eps,
        )
        query.copy_(rotated)
