"""The one decoder: Llama, Mistral, Qwen2 and Qwen3, for prompts, decoding and training in the same batch."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import NamedTuple

import torch

from cotenant.models.attention import AttentionBackend, KeepingAttention, SdpaBackend, SegmentAttention
from cotenant.models.batch import Batch
from cotenant.models.elementwise_ops import norm, rotate_heads, silu_and_multiply
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.linear import linear
from cotenant.models.products import product
from cotenant.models.rope import RopeTables
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

    def first_layers(self, num_layers: int) -> Decoder:
        """The same model without its other layers, over the same weights."""
        found = copy.copy(self)
        found.spec = replace(self.spec, num_layers=num_layers)
        found.weights = replace(self.weights, layers=self.weights.layers[:num_layers])
        return found

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
        middle = self.attention_half(index, hidden, batch, kv_cache, tape)
        return self.mlp_half(index, middle, batch, tape)

    def attention_half(
        self,
        index: int,
        hidden: torch.Tensor,
        batch: Batch,
        kv_cache: torch.Tensor | None = None,
        tape: LayerTape | None = None,
    ) -> torch.Tensor:
        """The first half of ``layer``: [tokens, hidden] -> [tokens, hidden], the second half's input."""
        weights = self.weights.layers[index]
        plan = self._plan_of(batch, kv_cache)
        normed = self.norm(hidden, weights.input_norm)
        attended = self._attend(index, normed, weights, plan, batch, kv_cache, tape)
        middle = self._linear(attended, weights.output, index, batch, tape, out="middle", add=hidden)
        if tape is not None:
            tape.input, tape.middle = map(tape.part, (hidden, middle))
            tape.cos, tape.signed_sin = map(tape.part, (plan.cos, plan.signed_sin))
        return middle

    def mlp_half(
        self,
        index: int,
        middle: torch.Tensor,
        batch: Batch,
        tape: LayerTape | None = None,
    ) -> torch.Tensor:
        """The second half of ``layer``: [tokens, hidden] -> [tokens, hidden]."""
        activated = silu_and_multiply(self.gate_up(index, middle, batch, tape))
        return self._linear(activated, self.weights.layers[index].down, index, batch, tape, out="output", add=middle)

    def gate_up(self, index: int, middle: torch.Tensor, batch: Batch, tape: LayerTape | None = None) -> torch.Tensor:
        """The MLP up to its activation, all that a tape keeps of it: [tokens, hidden] -> [tokens, 2 * intermediate]."""
        weights = self.weights.layers[index]
        normed = self.norm(middle, weights.mlp_norm)
        gate_up = self._linear(normed, weights.gate_up, index, batch, tape, out="gate_up")
        if tape is not None:
            tape.gate_up = tape.part(gate_up)
        return gate_up

    def _linear(
        self,
        x: torch.Tensor,
        base: FusedLinear,
        index: int,
        batch: Batch,
        tape: LayerTape | None,
        *,
        out: str,
        add: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``linear``, plus ``add`` [tokens, sum of sizes]. ``out``: the tape's buffer for the result, if it has any."""
        if tape is not None and tape.packed is not None:
            down = tape.buffers.get(base.modules[0])
            return tape.packed.linear(x, base, down, add=add, out=tape.buffers[out], dropout=tape.dropout)
        result = linear(x, base, index, batch.spans, tape=tape)
        return result if add is None else add + result

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
        heads = self._linear(normed, weights.qkv, index, batch, tape, out="heads").view(num_tokens, -1, spec.head_dim)
        value = heads[:, num_rotated:]  # [tokens, kv_heads, head_dim]
        # [tokens, heads + kv_heads, head_dim]
        rotated = rotate_heads(
            heads,
            plan.cos,
            plan.signed_sin,
            num_rotated,
            weights.qk_norm,
            spec.rms_norm_eps,
            out=None if tape is None else tape.buffers.get("rotated"),
        )
        query, key = rotated[:, : spec.num_heads], rotated[:, spec.num_heads :]
        outs = []
        for rows, attention in plan.segments:
            if tape is not None and tape.rows.start == rows.start:
                assert isinstance(attention, KeepingAttention), "only training segments have a backward pass"
                out, tape.attention = attention.keep(tape.part(query), tape.part(key), tape.part(value), tape.buffers)
                tape.heads = tape.part(heads)
            else:
                out = attention(index, query[rows], key[rows], value[rows], kv_cache)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMS norm of ``x`` [rows, hidden] with one of the model's scales."""
        return norm(x, weight, self.spec.rms_norm_eps)

    def _plan_of(self, batch: Batch, kv_cache: torch.Tensor | None) -> _Plan:
        plan: _Plan = batch.derived.get(self) or self._make_plan(batch, kv_cache)
        return plan

    def _make_plan(self, batch: Batch, kv_cache: torch.Tensor | None) -> _Plan:
        segments = [] if batch.head is None else list(self._plan_of(batch.head, kv_cache).segments)
        start = segments[-1].rows.stop if segments else 0
        for segment in batch.segments[len(segments) :]:
            rows = slice(start, start + segment.num_tokens)
            attention = self.attention.plan(segment, kv_cache)
            segments.append(_PlannedSegment(rows, attention))
            start = rows.stop
        assert start == batch.num_tokens, f"segments of {start} tokens in a batch of {batch.num_tokens}"
        plan = _Plan(*self.rope.at(batch.positions), tuple(segments))
        batch.derived[self] = plan
        return plan

    def plan(self, batch: Batch, cos: torch.Tensor, signed_sin: torch.Tensor, attention: SegmentAttention) -> None:
        """Say what layers would work out for a batch of one segment: the caller's own tables, as of ``RopeTables.at``,
        and attention over all rows. The batch's other fields are then never read."""
        batch.derived[self] = _Plan(cos, signed_sin, (_PlannedSegment(slice(0, len(cos)), attention),))
