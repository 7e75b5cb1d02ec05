"""The memory of a job's activations: an arena that holds one micro-batch's, and the captured layers over it.

Addresses stay for as long as the job runs. Memory lies under the lower part of them, as far as any tasklet has reached
since some was given away; that is taken from the top. A layer's comes when its forward runs: that of all at once would
keep requests waiting for longer than a step.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable

import torch

from cotenant.core.tasklet import TaskletKind
from cotenant.device import Device
from cotenant.device.arena import CHUNK_BYTES
from cotenant.device.cuda.graphs import capture_graph, current_lane
from cotenant.finetune.captured import (
    BACKWARD_PARTS,
    FORWARD_PARTS,
    CapturedLayers,
    Frame,
    PassKind,
    frame_bytes,
    rows_for,
)
from cotenant.finetune.microbatch import MicroBatch
from cotenant.finetune.state import TrainingState
from cotenant.models import flash_attention
from cotenant.models.decoder import Decoder
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.products import has_triton
from cotenant.models.training_pack import TrainingPack

# Beyond either, the frame that was not used for longest is captured anew when it comes again. One of 32 layers has some
# hundred graphs on each lane that it has run on, and their memory is in no account.
_MAX_FRAMES, _MAX_GRAPHS = 64, 8192
# So many notes of what was launched may lie there before those of what has ended are looked for.
_MOST_NOTES = 64


def can_capture(decoder: Decoder) -> bool:
    """Whether a job's layers can be captured: in half precision, on a GPU that has the kernels, over plain weights."""
    linears = (decoder.weights.layers[0].qkv, decoder.weights.layers[0].gate_up)
    return (
        flash_attention.is_supported(decoder.device, decoder.dtype, decoder.spec.head_dim)
        and has_triton()
        and all(type(linear) is FusedLinear for linear in linears)
    )


class Activations:
    """For micro-batches of at most ``max_tokens`` tokens, of whose layers ``num_recomputed`` keep their inputs alone,
    or for what takes less, and for such that no backward pass follows, of at most ``max_passing_tokens``, which may be
    more. ``pack``: of what they train. Where ``device`` is no GPU, nothing is captured, and the same functions run
    eagerly."""

    def __init__(
        self,
        decoder: Decoder,
        pack: TrainingPack,
        device: Device,
        max_tokens: int,
        num_recomputed: int = 0,
        *,
        max_passing_tokens: int = 0,
    ) -> None:
        self._decoder = decoder
        self._device = device
        self._pack = pack
        self._bytes: dict[tuple[int, PassKind], int] = {}
        most = max(self.bytes_for(max_tokens, num_recomputed), self.passing_bytes_for(max_passing_tokens))
        self._arena = device.create_arena(most, CHUNK_BYTES)
        self._storage = self._arena.tensor(torch.uint8)
        self._num_mapped = 0  # chunks, the first ones
        self._pool = torch.cuda.graph_pool_handle() if decoder.device.type == "cuda" else None
        self._frames: OrderedDict[tuple[Frame, PassKind], CapturedLayers] = OrderedDict()
        self._refreshing: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}  # by layer and lane
        self._num_fresh = 0  # layers, from the first on, that know of the adapter's weights as they are
        self._reaches = _Reaches(device)

    @classmethod
    def for_job(
        cls,
        decoder: Decoder,
        state: TrainingState,
        device: Device,
        max_tokens: int,
        *,
        recompute_all: bool,
        longest_measured: int = 0,
        pack: TrainingPack | None = None,
    ) -> Activations | None:
        """None for a job whose layers cannot be captured. ``longest_measured``: tokens of the longest validation
        example, which is never cut; 0: there is none. ``pack``: the state's; None: it is made here."""
        if not can_capture(decoder):
            return None
        return cls(
            decoder,
            pack or TrainingPack(state.adapter, decoder.dtype, state.optimizer.gradient),
            device,
            max_tokens,
            decoder.spec.num_layers - 1 if recompute_all else 0,
            max_passing_tokens=longest_measured,
        )

    @property
    def num_lanes(self) -> int:
        """That layers are captured on at most; what passes while they run is kept for each."""
        return 1 + len(self._device.partitions)

    @property
    def chunk_bytes(self) -> int:
        return self._arena.chunk_bytes

    @property
    def mapped_bytes(self) -> int:
        """Of the memory that is there now."""
        return self._num_mapped * self.chunk_bytes

    def bytes_for(self, num_tokens: int, num_recomputed: int) -> int:
        """What a micro-batch of so many tokens needs at most."""
        return self._frame_bytes(rows_for(num_tokens), PassKind(num_recomputed))

    def passing_bytes_for(self, num_tokens: int) -> int:
        """The same without a backward pass."""
        return self._frame_bytes(rows_for(num_tokens), PassKind(None))

    def _frame_bytes(self, num_rows: int, kind: PassKind) -> int:
        found = self._bytes.get((num_rows, kind))
        if found is None:
            found = frame_bytes(self._decoder.spec, self._decoder.dtype, self._pack, num_rows, kind)
            self._bytes[num_rows, kind] = found
        return found

    def refresh(self) -> None:
        """The adapter's weights have changed. Each layer takes them over when its next forward runs: all at once would
        be as long as several tasklets."""
        self._num_fresh = 0

    def _refresh_layer(self, layer: int) -> None:
        if layer < self._num_fresh:
            return
        refresh = self._pack.layers[layer].refresh
        if self._pool is None:
            refresh()
        else:
            key = (layer, current_lane())
            if key not in self._refreshing:
                self._refreshing[key] = capture_graph(refresh, self._pool)
            self._refreshing[key].replay()
        self._num_fresh = layer + 1

    def begin(self, micro_batch: MicroBatch, kind: PassKind, token_keys: torch.Tensor | None = None) -> CapturedPass:
        """Ends whatever micro-batch was there. ``token_keys``: see ``CapturedLayers.load``. It raises
        torch.OutOfMemoryError if the device has not enough memory, and so may each tasklet of a forward pass."""
        spec, lengths = self._decoder.spec, micro_batch.segment.lengths
        frame = Frame.of(lengths, spec.sliding_window, self._decoder.device)
        key = (frame, kind)
        layers = self._frames.get(key)
        if layers is None:
            self._make_room_for_frame()
            storage = self._storage[: self._frame_bytes(frame.num_rows, kind)]
            layers = CapturedLayers(self._decoder, self._pack, frame, storage, self._pool, kind)
            self._frames[key] = layers
        self._frames.move_to_end(key)
        self._reach(layers.shared_bytes)
        layers.load(micro_batch, token_keys)
        refresh = self._refresh_layer if kind.has_adapter else None
        return CapturedPass(self._pack, layers, micro_batch, refresh, self._reach)

    def _reach(self, num_bytes: int) -> None:
        """Something is launched next that touches so much of the arena, from its beginning: have memory there."""
        num_chunks = -(-num_bytes // self.chunk_bytes)
        if num_chunks > self._num_mapped:
            self._arena.map(range(self._num_mapped, num_chunks))
            self._num_mapped = num_chunks
            num_bytes = num_chunks * self.chunk_bytes  # they are cleared
        self._reaches.note(num_bytes)

    def _make_room_for_frame(self) -> None:
        num_graphs = sum(layers.num_graphs for layers in self._frames.values())
        if len(self._frames) < _MAX_FRAMES and num_graphs < _MAX_GRAPHS:
            return
        self._device.wait_for_tasklets()  # its graphs, maybe
        while len(self._frames) >= _MAX_FRAMES or num_graphs >= _MAX_GRAPHS:
            _, layers = self._frames.popitem(last=False)
            num_graphs -= layers.num_graphs

    def give_back(self, num_kept: int) -> None:
        """Unmap all memory beyond ``num_kept`` bytes, once the device is done with what reaches that far; the device
        keeps it for the arena of whoever asked. No micro-batch that lies there goes on."""
        num_kept = num_kept // self.chunk_bytes
        if num_kept >= self._num_mapped:
            return
        # A tasklet in flight goes on meanwhile below, in the layer that it belongs to; nobody wants what it computes.
        if self._reaches.in_flight() > num_kept * self.chunk_bytes:
            self._device.wait_for_tasklets()
        self._unmap(num_kept, keep=True)

    def drop(self) -> None:
        """Give all memory back, that of the graphs and what the device has kept too. No micro-batch goes on."""
        self._retire_graphs()
        self._unmap(0, keep=False)
        self._device.release_kept_memory()

    def close(self) -> None:
        """As ``drop``, but the device keeps the arena's memory for others and lets go of the graphs later: to do so at
        once would be a long pause."""
        self._retire_graphs()
        self._unmap(0, keep=True)
        self._arena.close()

    def _unmap(self, num_kept: int, *, keep: bool) -> None:
        """All but the first so many chunks."""
        self._arena.unmap(range(num_kept, self._num_mapped), keep=keep)
        self._num_mapped = num_kept

    def _retire_graphs(self) -> None:
        self._device.wait_for_tasklets()
        for layers in self._frames.values():
            self._device.retire(layers.take_graphs())
        self._device.retire(self._refreshing.values())
        self._frames.clear()
        self._refreshing.clear()
        if self._pool is not None:  # whose memory can be given back once it has no graph left
            self._pool = torch.cuda.graph_pool_handle()


class _Reaches:
    """How far from the arena's beginning what is in flight may touch it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._notes: deque[tuple[int, int]] = deque()  # which tasklet, and how many bytes

    def note(self, num_bytes: int) -> None:
        """Something is launched now that touches so much."""
        self._notes.append((self._device.num_launched, num_bytes))
        if len(self._notes) > _MOST_NOTES:
            self._forget_ended()

    def in_flight(self) -> int:
        self._forget_ended()
        return max((num_bytes for _, num_bytes in self._notes), default=0)

    def _forget_ended(self) -> None:
        num_ended = self._device.num_ended()
        while self._notes and self._notes[0][0] < num_ended:
            self._notes.popleft()


class CapturedPass:
    """As ``TrainingPass`` or ``EvaluationPass``, in parts of layers and of the loss, at fixed addresses."""

    def __init__(
        self,
        pack: TrainingPack,
        layers: CapturedLayers,
        micro_batch: MicroBatch,
        refresh: Callable[[int], None] | None,
        reach: Callable[[int], None],
    ) -> None:
        """``refresh``: makes a layer ready for its forward. ``reach``: told what each tasklet reaches, before that is
        launched."""
        self._pack = pack
        self._layers = layers
        self._refresh = refresh
        self._reach = reach
        self.micro_batch = micro_batch
        self._num_done = 0  # layers whose forward has run, less those whose backward has

    def run(self, kind: TaskletKind) -> None:
        """The next tasklet of the forward or the backward pass, which the caller knows to be of this kind."""
        layer = self._num_done if kind in FORWARD_PARTS else self._num_done - 1
        if kind is FORWARD_PARTS[0] and self._refresh is not None:
            self._refresh(layer)
        self._reach(self._layers.reach(layer))
        self._layers.run(kind, layer)
        if kind is FORWARD_PARTS[-1]:
            self._num_done += 1
        elif kind is BACKWARD_PARTS[-1]:
            self._num_done -= 1

    def begin_loss(self, scales: torch.Tensor | None = None) -> None:
        """On the last layer's output. ``scales`` [targets]: of the targets' gradients, where a backward follows."""
        self._reach(self._layers.shared_bytes)
        self._layers.loss.begin(self.micro_batch, scales)

    def loss_part(self, part: int) -> None:
        """All parts in order; then there are ``losses``, and backward can begin."""
        self._reach(self._layers.shared_bytes)
        self._layers.loss.run(part)

    def losses(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``token_losses``; until the next micro-batch."""
        return self._layers.loss.losses()

    @property
    def gradient(self) -> torch.Tensor:
        """At the last layer's output, once there are ``losses`` [tokens, hidden]."""
        return self._layers.gradient[: self.micro_batch.batch.num_tokens]

    def commit(self) -> None:
        self._pack.commit()
