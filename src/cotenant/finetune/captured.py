"""A micro-batch's layers at fixed addresses: on CUDA as captured graphs, launched in microseconds; elsewhere the same
code runs eagerly.

A frame is what graphs depend on: the number of rows, of sequences, and the longest. Everything that a frame's layers
keep for their backward pass lies in one piece of memory from its beginning, so a smaller frame touches only the lower
part of a larger one's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.device.cuda.graphs import LaneGraphs
from cotenant.finetune.captured_loss import CapturedLoss, num_parts, part_size
from cotenant.finetune.microbatch import MicroBatch, MicroBatchShape
from cotenant.models import flash_attention
from cotenant.models.attention import SegmentAttention
from cotenant.models.batch import Batch
from cotenant.models.decoder import Decoder
from cotenant.models.dropout import DropoutMasks
from cotenant.models.flash_attention import FlashAttention, Sequences
from cotenant.models.lane_products import take_settled
from cotenant.models.layer_backward import attention_backward, down_backward, up_backward
from cotenant.models.spec import ModelSpec
from cotenant.models.tape import LayerTape
from cotenant.models.training_pack import PackedLayer, TrainingPack

# A layer's tasklets, in order. The second ones come before the third where a layer has kept its input alone.
FORWARD_PARTS = (TaskletKind.FORWARD_ATTENTION, TaskletKind.FORWARD_MLP)
RECOMPUTE_PARTS = (TaskletKind.RECOMPUTE_ATTENTION, TaskletKind.RECOMPUTE_UP)
BACKWARD_PARTS = (TaskletKind.BACKWARD_DOWN, TaskletKind.BACKWARD_UP, TaskletKind.BACKWARD_ATTENTION)
# Rows of a frame come in multiples of this: few frames for many lengths, and whole tiles for the products.
_ROW_BLOCK = 128
_ALIGNMENT = 256  # bytes, as torch's allocator aligns
_NOWHERE = torch.empty(0)


@dataclass(frozen=True, slots=True)
class Frame:
    """``num_rows``: the micro-batch's tokens, and fewer than ``_ROW_BLOCK`` rows of filling, a sequence of its own.
    ``uniform``: all sequences have ``longest`` tokens. Otherwise there are at most ``num_sequences``, none longer than
    ``longest``; both are powers of 4, so that frames are few."""

    num_rows: int
    num_sequences: int
    longest: int
    uniform: bool

    @classmethod
    def of(cls, lengths: tuple[int, ...], sliding_window: int | None, device: torch.device) -> Frame:
        if device.type != "cuda":
            return cls(sum(lengths), len(lengths), max(lengths), min(lengths) == max(lengths))
        if flash_attention.is_uniform(lengths, sliding_window, device):
            return cls(sum(lengths), len(lengths), lengths[0], uniform=True)
        num_rows = rows_for(sum(lengths))
        filling = num_rows - sum(lengths)
        longest = max(*lengths, filling)
        num_sequences, longest = (_power_of_4(number, 16) for number in (len(lengths) + 1, longest))
        return cls(num_rows, num_sequences, min(num_rows, longest), uniform=False)


def rows_for(num_tokens: int) -> int:
    """The most rows of a frame for so many tokens."""
    return math.ceil(num_tokens / _ROW_BLOCK) * _ROW_BLOCK


@dataclass(frozen=True, slots=True)
class PassKind:
    """How a micro-batch goes through its frame. ``num_recomputed``: of the layers, the first ones, that keep their
    inputs alone, not all; None: no backward pass follows, and nothing is kept. ``has_adapter``: or is the base's."""

    num_recomputed: int | None
    has_adapter: bool = True

    def drops(self, pack: TrainingPack) -> bool:
        """Whether dropout is applied."""
        return self.num_recomputed is not None and pack.dropout > 0.0

    def layers_of(self, pack: TrainingPack) -> tuple[PackedLayer, ...]:
        return pack.layers if self.has_adapter else tuple(PackedLayer({}) for _ in pack.layers)


def captured_loss_run(kind: TaskletKind, shape: MicroBatchShape) -> TaskletRun:
    """The parts of a micro-batch's loss."""
    num_rows = rows_for(shape.num_tokens)
    part = TaskletShape(kind, min(part_size(num_rows), shape.num_targets))
    return TaskletRun(part, num_parts(shape.num_targets, num_rows))


def frame_bytes(spec: ModelSpec, dtype: torch.dtype, pack: TrainingPack, num_rows: int, kind: PassKind) -> int:
    """What a frame's layers keep, with the input and the output of each."""
    memory = _Memory(None)
    _Places(spec, dtype, kind, pack, num_rows, memory)
    return memory.num_bytes


class _Memory:
    """Gives out tensors of ``storage`` [bytes], uint8, from its beginning; counts only if there is none."""

    def __init__(self, storage: torch.Tensor | None) -> None:
        self._storage = storage
        self.num_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        start = self.num_bytes
        size = math.prod(shape) * dtype.itemsize
        self.num_bytes += math.ceil(size / _ALIGNMENT) * _ALIGNMENT
        if self._storage is None:
            return _NOWHERE
        return self._storage[start : start + size].view(dtype).view(shape)


class _Places:
    """Where the tensors of a frame lie. What recomputed layers make beside their inputs lies where the first of the
    others keeps it, whose forward comes after theirs and its backward before."""

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        kind: PassKind,
        pack: TrainingPack,
        num_rows: int,
        memory: _Memory,
    ) -> None:
        hidden = (num_rows, spec.hidden_size)
        keeps = kind.num_recomputed is not None
        num_recomputed = spec.num_layers - 1 if kind.num_recomputed is None else kind.num_recomputed
        # Each layer's input, and the output of the last one; two in turn where none is kept.
        edges = [memory.take(hidden, dtype) for _ in range(spec.num_layers + 1 if keeps else 2)]
        self.edges = [edges[index % len(edges)] for index in range(spec.num_layers + 1)]
        self.gradient, self.middle_gradient = (memory.take(hidden, dtype) if keeps else None for _ in range(2))
        self.cos, self.signed_sin = (memory.take((num_rows, 1, spec.head_dim), dtype) for _ in range(2))
        self.token_keys = memory.take((num_rows,), torch.int32) if kind.drops(pack) else None
        firsts = [_adapter_buffers(packed, dtype, num_rows, memory) for packed in kind.layers_of(pack)]
        # What a single layer touches comes last, so that most of the upper part can be taken away while a layer runs.
        self.shared_bytes = memory.num_bytes
        kept, ends = [], []
        for _ in range(spec.num_layers - num_recomputed):
            kept.append(_tape_buffers(spec, dtype, num_rows, memory))
            ends.append(memory.num_bytes)
        self.kept = [{**kept[max(0, layer - num_recomputed)], **first} for layer, first in enumerate(firsts)]
        self.reaches = [ends[max(0, layer - num_recomputed)] for layer in range(spec.num_layers)]


def _tape_buffers(spec: ModelSpec, dtype: torch.dtype, num_rows: int, memory: _Memory) -> dict[str, torch.Tensor]:
    num_rotated = spec.num_heads + spec.num_kv_heads
    return {
        "middle": memory.take((num_rows, spec.hidden_size), dtype),
        "heads": memory.take((num_rows, (num_rotated + spec.num_kv_heads) * spec.head_dim), dtype),
        "rotated": memory.take((num_rows, num_rotated, spec.head_dim), dtype),
        "attended": memory.take((num_rows, spec.num_heads * spec.head_dim), dtype),
        "logsumexp": memory.take((num_rows * spec.num_heads,), torch.float32),
        "gate_up": memory.take((num_rows, 2 * spec.intermediate_size), dtype),
    }


def _adapter_buffers(
    packed: PackedLayer, dtype: torch.dtype, num_rows: int, memory: _Memory
) -> dict[str, torch.Tensor]:
    """Small enough to be kept always."""
    return {first: memory.take((num_rows, num_ranks), dtype) for first, num_ranks in packed.num_ranks.items()}


class CapturedLayers:
    """The layers of one frame. ``storage``: uint8, at least ``frame_bytes``; ``pool``: where graphs find what they need
    while they run, None where nothing is captured. The first micro-batch runs eagerly, for a frame may never come
    again; graphs are made from the second one on, for each partition that layers run in, once products are settled
    there (``lane_products``). Everything is launched on the
    current stream; the caller keeps to the order in which a micro-batch goes through the layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        pack: TrainingPack,
        frame: Frame,
        storage: torch.Tensor,
        pool: Any | None,
        kind: PassKind,
    ) -> None:
        spec = decoder.spec
        self._decoder = decoder
        self._frame = frame
        self._graphs = None if pool is None else LaneGraphs(pool, take_settled)
        memory = _Memory(storage)
        self._places = places = _Places(spec, decoder.dtype, kind, pack, frame.num_rows, memory)
        dropout = None if places.token_keys is None else DropoutMasks(places.token_keys, pack.dropout)
        self._tapes = [
            LayerTape(slice(0, frame.num_rows), packed, {**kept, "output": edge}, dropout)
            for packed, kept, edge in zip(kind.layers_of(pack), places.kept, places.edges[1:], strict=True)
        ]
        self._batch = Batch(torch.empty(0), torch.empty(0), ())
        self._starts: torch.Tensor | None = None  # [sequences + 1], int32
        if self._graphs is not None:
            if not frame.uniform:
                self._starts = torch.zeros(frame.num_sequences + 1, dtype=torch.int32, device=decoder.device)
            sequences = Sequences(frame.num_sequences, frame.longest, self._starts)
            self._plan(FlashAttention(sequences, spec.sliding_window))
        self.loss = CapturedLoss(decoder, self._places.edges[-1], self._places.gradient, pool)
        self._num_loaded = 0

    @property
    def num_graphs(self) -> int:
        """That there are, on all lanes."""
        return self.loss.num_graphs + (0 if self._graphs is None else len(self._graphs))

    def take_graphs(self) -> list[torch.cuda.CUDAGraph]:
        """See ``LaneGraphs.take_all``."""
        return self.loss.take_graphs() + ([] if self._graphs is None else self._graphs.take_all())

    def load(self, micro_batch: MicroBatch, token_keys: torch.Tensor | None) -> None:
        """Begin a micro-batch of this frame: its embedded tokens are the first layer's input. ``token_keys`` [tokens]:
        see ``DropoutMasks``; None without dropout."""
        batch, places = micro_batch.batch, self._places
        num_tokens = batch.num_tokens
        torch.index_select(self._decoder.weights.embedding, 0, batch.token_ids, out=places.edges[0][:num_tokens])
        self._num_loaded += 1
        # The gradients of filling are 0. What lay there before need not even be a number, and 0 times that is none.
        places.edges[0][num_tokens:].zero_()
        for place, values in zip((places.cos, places.signed_sin), self._decoder.rope.at(batch.positions), strict=True):
            place[:num_tokens].copy_(values)
            place[num_tokens:].zero_()
        if places.token_keys is not None:
            assert token_keys is not None, "dropout is by tokens' keys"
            places.token_keys[:num_tokens].copy_(token_keys)
            places.token_keys[num_tokens:].zero_()
        if self._graphs is None:
            self._plan(self._decoder.attention.plan(micro_batch.segment, None))
        elif self._starts is not None:
            starts = torch.full((len(self._starts),), self._frame.num_rows, dtype=torch.int32)
            lengths = torch.tensor([0, *micro_batch.segment.lengths])
            starts[: len(lengths)] = lengths.cumsum(0)
            self._starts.copy_(starts.pin_memory(), non_blocking=True)

    @property
    def gradient(self) -> torch.Tensor:
        """At the output of the layer whose backward runs next [rows, hidden]."""
        assert self._places.gradient is not None, "no backward pass follows"
        return self._places.gradient

    def reach(self, layer: int) -> int:
        """Of the memory, how many bytes from its beginning the parts of a layer may touch."""
        return self._places.reaches[layer]

    @property
    def shared_bytes(self) -> int:
        """As ``reach``, of what is of no layer: ``load`` and the loss."""
        return self._places.shared_bytes

    def run(self, kind: TaskletKind, layer: int) -> None:
        """A part of a layer, forward or backward."""
        function = _FUNCTIONS[kind]  # of two kinds that do the same, graphs are the same
        if self._graphs is None:
            function(self, layer)
        else:
            launch = partial(function, self, layer)
            # The first layer has a product less: what it launches says nothing of whether the others' are settled.
            self._graphs.run((function, layer), (function, layer > 0), launch, may_capture=self._num_loaded > 1)

    def _plan(self, attention: SegmentAttention) -> None:
        self._decoder.plan(self._batch, self._places.cos, self._places.signed_sin, attention)

    @torch.no_grad()
    def _forward_attention(self, layer: int) -> None:
        self._decoder.attention_half(layer, self._places.edges[layer], self._batch, tape=self._tapes[layer])

    @torch.no_grad()
    def _forward_mlp(self, layer: int) -> None:
        self._decoder.mlp_half(layer, self._tapes[layer].middle, self._batch, tape=self._tapes[layer])

    @torch.no_grad()
    def _recompute_up(self, layer: int) -> None:
        tape = self._tapes[layer]
        self._decoder.gate_up(layer, tape.middle, self._batch, tape)

    @torch.no_grad()
    def _backward_down(self, layer: int) -> None:
        down_backward(self._decoder, layer, self._tapes[layer], self.gradient)

    @torch.no_grad()
    def _backward_up(self, layer: int) -> None:
        tape = self._tapes[layer]
        up_backward(self._decoder, layer, tape, tape.gate_up, self.gradient, out=self._places.middle_gradient)

    @torch.no_grad()
    def _backward_attention(self, layer: int) -> None:
        tape, gradient = self._tapes[layer], self._places.middle_gradient
        assert gradient is not None, "no backward pass follows"
        # Nobody learns from the first layer's input: the embedding is frozen.
        attention_backward(self._decoder, layer, tape, gradient, needs_input=layer > 0, out=self.gradient)


_FUNCTIONS = {
    TaskletKind.FORWARD_ATTENTION: CapturedLayers._forward_attention,
    TaskletKind.FORWARD_MLP: CapturedLayers._forward_mlp,
    TaskletKind.RECOMPUTE_ATTENTION: CapturedLayers._forward_attention,
    TaskletKind.RECOMPUTE_UP: CapturedLayers._recompute_up,
    TaskletKind.BACKWARD_DOWN: CapturedLayers._backward_down,
    TaskletKind.BACKWARD_UP: CapturedLayers._backward_up,
    TaskletKind.BACKWARD_ATTENTION: CapturedLayers._backward_attention,
}


def _power_of_4(number: int, least: int) -> int:
    power = least
    while power < number:
        power *= 4
    return power
