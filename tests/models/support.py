"""Small random models of every family, held by transformers and by our decoder, and a paged cache to run ours on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cotenant.models.batch import AdapterSpan, Batch, PagedSegment, TrainingSegment
from cotenant.models.decoder import Decoder
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.layer_backward import layer_backward
from cotenant.models.linear import AddGradient, adapter_backward, input_backward
from cotenant.models.loading import load_decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.registry import ResolvedModel, read_spec
from cotenant.models.tape import KeptDelta, LayerTape

VOCAB_SIZE = 101
CPU = torch.device("cpu")

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.18,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# Every option of every family at least once.
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3_ROPE, "head_dim": 16}),
    "llama-tied-linear": (
        LlamaConfig,
        LlamaForCausalLM,
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.5},
            "tie_word_embeddings": True,
            "num_key_value_heads": 4,
        },
    ),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "num_key_value_heads": 1}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 8}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {"sliding_window": 7}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 20}),
}


@dataclass(frozen=True)
class Pair:
    """The same model twice."""

    folder: Path
    reference: PreTrainedModel
    decoder: Decoder

    def reference_logits(self, token_ids: Sequence[int], model: torch.nn.Module | None = None) -> torch.Tensor:
        """[tokens, vocab] of one sequence, from transformers or from a peft model around it."""
        with torch.no_grad():
            return (model or self.reference)(torch.tensor([list(token_ids)])).logits[0]


def make_pair(name: str, folder: Path, seed: int = 0) -> Pair:
    """Make, save and load a model. Norms and biases are random too, so that none can be forgotten."""
    config_class, model_class, options = MODELS[name]
    torch.manual_seed(seed)
    reference = model_class(config_class(**(_SHAPE | options))).eval()
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in parameter_name else 0.0))
    reference.save_pretrained(folder)
    return Pair(folder, reference, load(folder))


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(ResolvedModel(folder.name, folder, read_spec(folder)), CPU, dtype, seed=0)


def tokens(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(length * 1000 + seed)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def training_batch(sequences: Sequence[Sequence[int]], adapter: LoraAdapter | None = None) -> Batch:
    """Whole sequences as one training segment, all of one adapter."""
    ids = torch.tensor([token for sequence in sequences for token in sequence])
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    spans = (AdapterSpan(0, len(ids), adapter),) if adapter else ()
    return Batch(ids, positions, (TrainingSegment(tuple(map(len, sequences))),), spans)


@dataclass
class CachedSequence:
    """A sequence whose first ``num_done`` tokens are in the cache."""

    pages: list[int]
    token_ids: list[int]
    num_done: int = 0
    adapter: LoraAdapter | None = None


@dataclass
class PagedCache:
    """Pages handed out in random order, so that neighbours in a sequence are none in memory. Unused ones hold NaN."""

    decoder: Decoder
    num_pages: int = 64
    page_tokens: int = 4
    seed: int = 0
    cache: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        spec = self.decoder.spec
        shape = (self.num_pages, spec.num_layers, 2, self.page_tokens, spec.num_kv_heads, spec.head_dim)
        self.cache = torch.full(shape, float("nan"), dtype=self.decoder.dtype)
        self._free = list(range(self.num_pages))
        random.Random(self.seed).shuffle(self._free)

    def add(self, token_ids: Sequence[int], adapter: LoraAdapter | None = None) -> CachedSequence:
        return CachedSequence([], list(token_ids), adapter=adapter)

    def segment(self, work: Sequence[tuple[CachedSequence, int]]) -> tuple[PagedSegment, list[int], list[int]]:
        """Give pages to the next ``count`` tokens of each sequence: (segment, token ids, positions)."""
        ids, positions, slots = [], [], []
        for sequence, count in work:
            stop = sequence.num_done + count
            while len(sequence.pages) * self.page_tokens < stop:
                sequence.pages.append(self._free.pop())
            for position in range(sequence.num_done, stop):
                page = sequence.pages[position // self.page_tokens]
                slots.append(page * self.page_tokens + position % self.page_tokens)
                positions.append(position)
                ids.append(sequence.token_ids[position])
            sequence.num_done = stop
        width = max(len(sequence.pages) for sequence, _ in work)
        tables = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence, _ in work]
        segment = PagedSegment(
            tuple(count for _, count in work),
            tuple(sequence.num_done for sequence, _ in work),
            torch.tensor(tables),
            torch.tensor(slots),
            is_decode=all(count == 1 for _, count in work),
        )
        return segment, ids, positions

    def batch(
        self,
        groups: Sequence[Sequence[tuple[CachedSequence, int]]],
        training: Sequence[Sequence[int]] = (),
        training_adapter: LoraAdapter | None = None,
    ) -> Batch:
        """One paged segment per group, then a training segment if there are sequences for one."""
        segments: list[PagedSegment | TrainingSegment] = []
        ids: list[int] = []
        positions: list[int] = []
        spans = []
        for group in groups:
            start = len(ids)
            segment, new_ids, new_positions = self.segment(group)
            segments.append(segment)
            ids += new_ids
            positions += new_positions
            for sequence, count in group:
                if sequence.adapter is not None:
                    spans.append(AdapterSpan(start, start + count, sequence.adapter))
                start += count
        if training:
            start = len(ids)
            segments.append(TrainingSegment(tuple(map(len, training))))
            for sequence in training:
                ids += sequence
                positions += range(len(sequence))
            if training_adapter is not None:
                spans.append(AdapterSpan(start, len(ids), training_adapter))
        return Batch(torch.tensor(ids), torch.tensor(positions), tuple(segments), tuple(spans))

    def run(self, *groups: Sequence[tuple[CachedSequence, int]]) -> torch.Tensor:
        """Logits [tokens, vocab] of a batch without training."""
        with torch.no_grad():
            return self.decoder.logits(self.decoder.forward(self.batch(groups), self.cache))


def random_adapter(decoder: Decoder, seed: int, **options: Any) -> LoraAdapter:
    """A trainable adapter with a random B, so that it changes the logits."""
    settings: dict[str, Any] = {"r": 4, "alpha": 8.0, "target_modules": ("q_proj", "v_proj", "down_proj")}
    adapter = LoraAdapter.trainable(decoder.spec, seed=seed, **(settings | options))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
    return adapter


def gradients(
    decoder: Decoder,
    batch: Batch,
    adapter: LoraAdapter,
    loss: Callable[[torch.Tensor], torch.Tensor],
    *,
    kv_cache: torch.Tensor | None = None,
) -> list[torch.Tensor]:
    """Of the adapter's matrices, by tapes and ``layer_backward``. The adapter's rows are the batch's last ones, and
    ``loss`` gets their logits."""
    (span,) = (span for span in batch.spans if span.adapter is adapter)
    tapes, hidden = [], decoder.embed(batch.token_ids)
    with torch.no_grad():
        for index in range(decoder.spec.num_layers):
            tapes.append(LayerTape(slice(span.start, span.stop)))
            hidden = decoder.layer(index, hidden, batch, kv_cache, tapes[-1])
    last = hidden[span.start :].requires_grad_()
    (gradient,) = torch.autograd.grad(loss(decoder.logits(last)), last)
    found: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for index in reversed(range(decoder.spec.num_layers)):
            below = layer_backward(
                decoder, index, tapes.pop(), gradient, lambda matrix, part: found.update({id(matrix): part})
            )
            assert below is not None
            gradient = below
    return [found[id(matrix)] for matrix in adapter.parameters()]


def linear_backward(
    x: torch.Tensor,
    gradient: torch.Tensor,
    base: FusedLinear,
    deltas: Sequence[KeptDelta],
    add_gradient: AddGradient,
) -> torch.Tensor:
    """Both parts of a linear's backward pass, one after the other: the gradient at ``x``."""
    x_gradient, downs = input_backward(x, gradient, base, deltas)
    adapter_backward(x, gradient, deltas, downs, add_gradient)
    assert x_gradient is not None
    return x_gradient
