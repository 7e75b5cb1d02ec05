"""The decoder's tensors, fused for few kernels, and which checkpoint tensor goes where."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from cotenant.core.module_pattern import module_name
from cotenant.models.compressed import CompressedWeight, compress
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.lora import MODULE_GROUPS
from cotenant.models.quantization import FP8, Fp8Linear, quantize_rows
from cotenant.models.spec import ModelSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # in checkpoints


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. ``qk_norm``: the scales of q_norm and k_norm, one row per query and key head."""

    input_norm: torch.Tensor  # [hidden]
    qkv: FusedLinear
    qk_norm: torch.Tensor | None  # [heads + kv_heads, head_dim]
    output: FusedLinear
    mlp_norm: torch.Tensor  # [hidden]
    gate_up: FusedLinear
    down: FusedLinear

    @property
    def matrices(self) -> tuple[FusedLinear, ...]:
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All of them. ``head`` is ``embedding`` itself in models that tie the two."""

    embedding: torch.Tensor  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor  # [hidden]
    head: torch.Tensor  # [vocab, hidden]
    compressed_head: CompressedWeight | None = None  # the same, for decode steps

    @property
    def is_compressed(self) -> bool:
        """Whether decode steps read compressed copies of matrices, of one at least."""
        return any(base.compressed is not None for layer in self.layers for base in layer.matrices)

    @property
    def copies_bytes(self) -> int:
        """What the compressed copies take."""
        bases = (base for layer in self.layers for base in layer.matrices)
        copies = [*(base.compressed for base in bases), self.compressed_head]
        return sum(copy.num_bytes for copy in copies if copy is not None)

    @property
    def share_read(self) -> float:
        """Of the layers' bytes, those that a decode step reads."""
        return 0.75 if self.is_compressed else 1.0


@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint tensor's place. ``view`` may be wider than ``shape``: the tensor is then repeated over its rows.

    With ``scales``, ``view`` is fp8, and the tensor is quantised on its way. It is staged alone, not with its layer or
    its fused neighbours: scales belong to rows, so nothing else needs to be there.
    """

    shape: tuple[int, ...]
    view: torch.Tensor
    dtype: torch.dtype  # of what is stored here, before it is quantised
    scales: torch.Tensor | None = None  # [rows, 1]

    def staging(self) -> torch.Tensor:
        """An uninitialised tensor of ``shape`` to fill and then give to ``store``: contiguous, on the same device."""
        if self.view.dtype == self.dtype and tuple(self.view.shape) == self.shape:
            return self.view
        return torch.empty(self.shape, device=self.view.device, dtype=self.dtype)

    def store(self, staged: torch.Tensor) -> None:
        """Put what ``staging`` gave in its place."""
        if self.scales is not None:
            values, scales = quantize_rows(staged)
            self.view.copy_(values)
            self.scales.copy_(scales)
        elif staged is not self.view:
            self.view.copy_(staged)


def allocate(
    spec: ModelSpec, device: torch.device, dtype: torch.dtype, quantization: str | None = None
) -> DecoderWeights:
    """Uninitialised weights. ``quantization`` "fp8": those of the layers' linear modules are fp8."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device=device, dtype=dtype)

    def fused(modules: tuple[str, ...], has_bias: bool) -> FusedLinear:
        sizes = tuple(spec.module_shape(module)[0] for module in modules)
        num_out, num_in = spec.group_shape(modules)
        bias = empty(num_out) if has_bias else None
        if quantization is None:
            return FusedLinear(modules, sizes, empty(num_out, num_in), bias)
        scales = torch.empty((num_out, 1), device=device, dtype=torch.float32)
        weight = torch.empty((num_out, num_in), device=device, dtype=FP8)
        return Fp8Linear(modules, sizes, weight, bias, scales=scales)

    qkv, output, gate_up, down = MODULE_GROUPS
    embedding = empty(spec.vocab_size, spec.hidden_size)
    layers = tuple(
        LayerWeights(
            input_norm=empty(spec.hidden_size),
            qkv=fused(qkv, spec.attention_bias),
            qk_norm=empty(spec.num_heads + spec.num_kv_heads, spec.head_dim) if spec.qk_norm else None,
            output=fused(output, spec.output_bias),
            mlp_norm=empty(spec.hidden_size),
            gate_up=fused(gate_up, False),
            down=fused(down, False),
        )
        for _ in range(spec.num_layers)
    )
    head = embedding if spec.tie_word_embeddings else empty(spec.vocab_size, spec.hidden_size)
    return DecoderWeights(embedding, layers, empty(spec.hidden_size), head)


def with_compressed(weights: DecoderWeights) -> DecoderWeights:
    """``weights``, filled, and beside each of their matrices that can be compressed what decode steps read instead."""

    def add(base: FusedLinear) -> FusedLinear:
        return replace(base, compressed=compress(base.weight))

    layers = tuple(
        replace(layer, qkv=add(layer.qkv), output=add(layer.output), gate_up=add(layer.gate_up), down=add(layer.down))
        for layer in weights.layers
    )
    return replace(weights, layers=layers, compressed_head=compress(weights.head))


def targets(spec: ModelSpec, weights: DecoderWeights) -> dict[str, Target]:
    """Every tensor that a checkpoint must hold, by its name there, and the place it goes to."""
    named = _named(spec, weights)
    return {name: to if isinstance(to, Target) else Target(tuple(to.shape), to, to.dtype) for name, to in named}


def _named(spec: ModelSpec, weights: DecoderWeights) -> Iterator[tuple[str, torch.Tensor | Target]]:
    dtype = weights.embedding.dtype
    yield EMBEDDING, weights.embedding
    for index, layer in enumerate(weights.layers):
        prefix = f"model.layers.{index}"
        yield f"{prefix}.input_layernorm.weight", layer.input_norm
        yield f"{prefix}.post_attention_layernorm.weight", layer.mlp_norm
        for group in layer.matrices:
            for module, columns in group.columns():
                scales = group.scales[columns] if isinstance(group, Fp8Linear) else None
                view = group.weight[columns]
                yield f"{module_name(index, module)}.weight", Target(tuple(view.shape), view, dtype, scales)
                if group.bias is not None:
                    yield f"{module_name(index, module)}.bias", group.bias[columns]
        if layer.qk_norm is not None:
            q_norm, k_norm = layer.qk_norm[: spec.num_heads], layer.qk_norm[spec.num_heads :]
            yield f"{prefix}.self_attn.q_norm.weight", Target((spec.head_dim,), q_norm, dtype)
            yield f"{prefix}.self_attn.k_norm.weight", Target((spec.head_dim,), k_norm, dtype)
    yield "model.norm.weight", weights.final_norm
    if not spec.tie_word_embeddings:
        yield HEAD, weights.head
