"""The one decoder: Llama, Mistral, Qwen2 and Qwen3, for prompts, decoding and training in the same batch."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from cotenant.models.attention import AttentionBackend, SdpaBackend, SegmentAttention, TrainingAttention
from cotenant.models.batch import Batch
from cotenant.models.linear import linear
from cotenant.models.products import product
from cotenant.models.rope import RopeTables, rotate
from cotenant.models.spec import ModelSpec
from cotenant.models.tape import LayerTape
from cotenant.models.weights import DecoderWeights, LayerWeights


class _PlannedSegment(NamedTuple):
    rows: slice
    attention: SegmentAttention


class _Plan(NamedTuple):
    """What every layer needs to know about a batch."""

    cos: torch.Tensor  # [tokens, 1, head_dim]
    signed_sin: torch.Tensor  # [tokens, 1, head_dim]
    segments: tuple[_PlannedSegment, ...]


class Decoder:
    """Frozen weights and the forward pass through them.

    Nothing but ``attention`` may be replaced after construction, and that before the first batch. Layers run without
    autograd: their backward pass is ``layer_backward``, from the tapes that ``layer`` fills.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        attention: AttentionBackend | None = None,
    ) -> None:
        self.spec = spec
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.weights = weights
        self.rope = RopeTables(spec, self.device, self.dtype)
        self.attention: AttentionBackend = attention or SdpaBackend(spec, self.device, self.dtype)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[tokens] -> [tokens, hidden]"""
        return self.weights.embedding.index_select(0, token_ids)

    def forward(self, batch: Batch, kv_cache: torch.Tensor | None = None) -> torch.Tensor:
        """All layers: the hidden states [tokens, hidden] before the final norm."""
        hidden = self.embed(batch.token_ids)
        for index in range(self.spec.num_layers):
            hidden = self.layer(index, hidden, batch, kv_cache)
        return hidden

    def layer(
        self,
        index: int,
        hidden: torch.Tensor,
        batch: Batch,
        kv_cache: torch.Tensor | None = None,
        tape: LayerTape | None = None,
    ) -> torch.Tensor:
        """One layer: [tokens, hidden] -> [tokens, hidden]. ``tape`` keeps what ``layer_backward`` needs of its rows.

        ``kv_cache`` [pages, layers, 2, page_tokens, kv_heads, head_dim] is read and written for the paged segments; it
        is the same for all layers of a batch. Raises ValueError if there are paged segments and no cache.
        """
        weights = self.weights.layers[index]
        plan = batch.derived.get(self) or self._make_plan(batch, kv_cache)
        normed = self.norm(hidden, weights.input_norm)
        attended = self._attend(index, normed, weights, plan, batch, kv_cache, tape)
        middle = hidden + linear(attended, weights.output, index, batch.spans, tape=tape)
        normed = self.norm(middle, weights.mlp_norm)
        gate_up = linear(normed, weights.gate_up, index, batch.spans, tape=tape)
        gate, up = gate_up.chunk(2, dim=1)
        output = middle + linear(F.silu(gate) * up, weights.down, index, batch.spans, tape=tape)
        if tape is not None:
            tape.input, tape.middle, tape.gate_up = map(tape.part, (hidden, middle, gate_up))
            tape.cos, tape.signed_sin = map(tape.part, (plan.cos, plan.signed_sin))
        return output

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, hidden]"""
        return self.norm(hidden, self.weights.final_norm)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """What ``forward`` gave, [rows, hidden] -> [rows, vocab] in float32, final norm included."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """``logits`` in the decoder's own dtype."""
        return product(self.final_norm(hidden), self.weights.head)

    def _attend(
        self,
        index: int,
        normed: torch.Tensor,
        weights: LayerWeights,
        plan: _Plan,
        batch: Batch,
        kv_cache: torch.Tensor | None,
        tape: LayerTape | None,
    ) -> torch.Tensor:
        """Projections, rotation and attention: [tokens, hidden] -> [tokens, heads * head_dim]."""
        spec = self.spec
        num_tokens, num_rotated = normed.shape[0], spec.num_heads + spec.num_kv_heads
        heads = linear(normed, weights.qkv, index, batch.spans, tape=tape).view(num_tokens, -1, spec.head_dim)
        value = heads[:, num_rotated:]  # [tokens, kv_heads, head_dim]
        rotated = heads[:, :num_rotated]  # [tokens, heads + kv_heads, head_dim]
        if weights.qk_norm is not None:
            rotated = self.norm(rotated, weights.qk_norm)
        rotated = rotate(rotated, plan.cos, plan.signed_sin)
        query, key = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        outs = []
        for rows, attention in plan.segments:
            if tape is not None and tape.rows.start == rows.start:
                assert isinstance(attention, TrainingAttention), "only training segments have a backward pass"
                out, tape.attention = attention.keep(tape.part(query), tape.part(key), tape.part(value))
                tape.heads = tape.part(heads)
            else:
                out = attention(index, query[rows], key[rows], value[rows], kv_cache)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm over the last dimension. Rounds to x's dtype before the weight is applied, as transformers does."""
        size, epsilon = x.shape[-1:], self.spec.rms_norm_eps
        if x.dtype == torch.float32 and weight.dim() == 1:
            return F.rms_norm(x, size, weight, epsilon)
        return weight * F.rms_norm(x.float(), size, None, epsilon).to(x.dtype)

    def _make_plan(self, batch: Batch, kv_cache: torch.Tensor | None) -> _Plan:
        segments = []
        start = 0
        for segment in batch.segments:
            rows = slice(start, start + segment.num_tokens)
            attention = self.attention.plan(segment, kv_cache)
            segments.append(_PlannedSegment(rows, attention))
            start = rows.stop
        assert start == batch.num_tokens, f"segments of {start} tokens in a batch of {batch.num_tokens}"
        plan = _Plan(*self.rope.at(batch.positions), tuple(segments))
        batch.derived[self] = plan
        return plan
