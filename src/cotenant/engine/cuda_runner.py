"""Batches on a CUDA device: decode steps as captured graphs, batches with prompt chunks as pieces between attention.

A graph holds the kernels of one batch size. What changes from step to step (tokens, positions, pages, adapters) lies in
buffers of fixed addresses, which one copy fills. A batch between two sizes is padded: a padded row attends to nothing,
so it may hold any numbers, keeps nothing, and its result is dropped.

A graph has the SMs of the lane that it was captured on, so decode steps are captured for each partition, and prompts'
pieces for those that prompts come in. What is not captured for the partition that it is launched in is launched
operation by operation.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from cotenant.device.cuda.graphs import capture_graph, current_lane
from cotenant.device.readback import Interval
from cotenant.engine.assemble import HostBatch, HostSegment, page_indices
from cotenant.engine.runner import EagerRunner, Forwarded
from cotenant.models.batch import PageLists
from cotenant.models.cuda_forward import CudaForward, TokenInputs
from cotenant.models.cuda_pieces import CapturedPieces, LayerPieces
from cotenant.models.decode_chunks import Int32Array
from cotenant.models.decoder import Decoder
from cotenant.models.kernels.lora_shrink import find_pieces
from cotenant.models.kernels.together import compiled_together
from cotenant.models.lora_stacks import GroupedLora, LoraStacks
from cotenant.models.paged_attention import PagedAttention, PagedBackend
from cotenant.models.skinny_tiling import MAX_ROWS, sms_at_hand

logger = logging.getLogger(__name__)

_NUM_FIELDS = 6  # token ids, positions, slots, seats, adapter slots, their ranks
# With more runs of rows per adapter than this, one grouped kernel is cheaper than a product per run.
_MAX_SPANS = 4
# Tokens of batches with prompt chunks that are captured in pieces. The device is busy with the larger ones for longer
# than the host takes to launch them operation by operation, but meanwhile the host does nothing else: the tokens of the
# batch before wait for it.
_PIECE_SIZES = (16, 32, 48, 64, 96, 128, 160, 192, 224, *range(256, 1024, 64), *range(1024, 4097, 128))
# Batch sizes that are captured for a partition: few, for each is captured for each of them.
_PARTITION_SIZES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def _padded(count: int) -> int:
    """Triton compiles a kernel again for addresses that are not multiples of 16 bytes: each field begins at one."""
    return -(-count // 4) * 4


def _blank_fields(count: int) -> Int32Array:
    """[fields, padded count]: nothing is kept in the cache, and nobody has an adapter."""
    fields = np.zeros((_NUM_FIELDS, _padded(count)), dtype=np.int32)
    fields[2] = fields[4] = -1
    return fields


def choose_graph_sizes(max_num_seqs: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Batch sizes to capture: ``wanted``, or 1, 2, 4, multiples of 8 up to 64, of 16 up to 256, of 32 beyond."""
    if wanted:
        return tuple(sorted({min(size, max_num_seqs) for size in wanted}))
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, 1025, 32)]
    return tuple(sorted({size for size in sizes if size < max_num_seqs} | {min(max_num_seqs, 1024)}))


def choose_compiled_sizes(max_num_seqs: int, max_num_batched_tokens: int) -> tuple[int, ...]:
    """Batch sizes of which one or another launches each kernel of decode steps, and of prompts that are as short:
    products are cut otherwise from 17 and from 33 rows on, and other kernels for one row, for whole sixteens, and for
    many."""
    largest = choose_graph_sizes(max_num_seqs)[-1]
    most = max(largest, min(MAX_ROWS, max_num_batched_tokens))
    return tuple(size for size in sorted({1, 2, 16, 17, 33, largest}) if size <= most)


def choose_piece_sizes(max_num_batched_tokens: int) -> tuple[int, ...]:
    """Those that batches of so many tokens may need."""
    num_smaller = bisect.bisect_left(_PIECE_SIZES, max_num_batched_tokens)
    return _PIECE_SIZES[: num_smaller + 1]


class _Lists(NamedTuple):
    """Which pages a segment's sequences have, on the host, see ``PageLists``. ``sent``: what the device reads of it,
    the pages of prompts, and what ``PagedAttention.decode`` reads of decodes; a multiple of 16 bytes."""

    indptr: Int32Array
    sent: Int32Array
    last: Int32Array


# (layer, queries, where the result goes) -> the result
_AttendInto = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]


class _Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor  # [size, vocab]


class _Unfinished(NamedTuple):
    """Of a lane: decode steps by batch size, and prompts' pieces by tokens."""

    steps: dict[int, dict[bool, _Captured]]
    pieces: dict[int, CapturedPieces]


class CudaRunner:
    """Needs what ``is_supported`` asks for, and NVRTC. ``kv_cache``, ``last_tokens`` and ``stacks`` stay where they are
    for good."""

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: torch.Tensor,
        last_tokens: torch.Tensor,
        stacks: LoraStacks | None,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_pages_per_sequence: int,
    ) -> None:
        self._decoder = decoder
        self._device = decoder.device
        self._max_num_seqs = max_num_seqs
        self._compiled_sizes = choose_compiled_sizes(max_num_seqs, max_num_batched_tokens)
        self._piece_sizes = choose_piece_sizes(max_num_batched_tokens)
        self._stacks = stacks
        most_tokens = max_pages_per_sequence * kv_cache.shape[3]
        self._attention = PagedAttention(
            decoder.spec, decoder.device, decoder.dtype, kv_cache, max_num_seqs, most_tokens
        )
        decoder.attention = PagedBackend(self._attention)
        self._forward = CudaForward(decoder, kv_cache, last_tokens)
        self._eager = EagerRunner(decoder, kv_cache, last_tokens)
        self._layer_caches = [kv_cache[:, layer] for layer in range(decoder.spec.num_layers)]
        self._keys_values = [tuple(cache.unbind(1)) for cache in self._layer_caches]
        most_rows = max(max_num_seqs, MAX_ROWS)
        num_inputs = _NUM_FIELDS * _padded(most_rows) + _padded(max_num_seqs * max_pages_per_sequence)
        num_inputs += self._attention.most_chunk_fields
        self._inputs = torch.zeros(num_inputs, dtype=torch.int32, device=decoder.device)
        self._logits = torch.empty((0, decoder.spec.vocab_size), dtype=decoder.dtype, device=decoder.device)
        self._pool: Any = None
        # By lane, None for all SMs: by batch size, the smallest first, without adapters and with.
        self._captured: dict[int | None, dict[int, dict[bool, _Captured]]] = {None: {}}
        self._unfinished: dict[int, _Unfinished] = {}  # lanes that lack sizes
        self._layers = LayerPieces(decoder, kv_cache, last_tokens)
        self._pieces: dict[int | None, dict[int, CapturedPieces]] = {None: {}}  # by tokens, the smallest first

    def wait_for_kernels(self) -> None:
        self._attention.kernels.wait("fa3")

    def warm_up(
        self, graph_sizes: Sequence[int], lanes: Sequence[int], also: Callable[[], None], *, enforce_eager: bool
    ) -> None:
        self._compile(lanes, also)  # while nvcc is at work on prompts' attention
        if not enforce_eager:
            self.capture(choose_graph_sizes(self._max_num_seqs, graph_sizes))
        self._attention.kernels.wait("fa2")

    def compile_the_rest(self) -> None:
        self._attention.kernels.compile_the_rest()

    @torch.no_grad()
    def capture(self, sizes: Sequence[int]) -> None:
        """Capture prompts' pieces, and decode steps of these batch sizes, with and without adapters, on the current
        stream."""
        start = time.perf_counter()
        self._pool = torch.cuda.graph_pool_handle()
        self._logits = self._logits.new_empty((max(sizes), self._logits.shape[1]))
        torch.cuda.synchronize(self._device)
        self._pieces[None] = self._layers.worthwhile(self._layers.capture(self._piece_sizes, self._pool))
        pieces = " ".join(map(str, self._pieces[None]))
        logger.info("captured in %.1f s: prompts of %s", time.perf_counter() - start, pieces)
        start = time.perf_counter()
        self._captured[None] = self._capture_sizes(sizes)
        torch.cuda.synchronize(self._device)
        logger.info("captured in %.1f s: %d sizes of decode steps", time.perf_counter() - start, len(sizes))

    @torch.no_grad()
    def capture_lane(self, num_sms: int, *, with_prompts: bool) -> bool:
        lane, wanted = current_lane(), {min(size, len(self._logits)) for size in _PARTITION_SIZES}
        if not self._captured[None]:
            return True
        steps, pieces = self._unfinished.setdefault(lane, _Unfinished({}, {}))
        pieces_wanted = set(self._piece_sizes) if with_prompts else set()
        with sms_at_hand(num_sms):
            if wanted > steps.keys():
                steps |= self._capture_sizes([max(wanted - steps.keys())])
            else:
                pieces |= self._layers.capture([max(pieces_wanted - pieces.keys())], self._pool)
        if wanted > steps.keys() or pieces_wanted > pieces.keys():
            return False
        del self._unfinished[lane]
        self._captured[lane], self._pieces[lane] = dict(sorted(steps.items())), self._layers.worthwhile(pieces)
        logger.info("on %d SMs are captured: %d sizes of decode steps, %d of prompts", num_sms, len(steps), len(pieces))
        return True

    def drop_lanes(self) -> None:
        self._unfinished.clear()
        self._captured, self._pieces = {None: self._captured[None]}, {None: self._pieces[None]}

    def _capture_sizes(self, sizes: Sequence[int]) -> dict[int, dict[bool, _Captured]]:
        captured = {
            size: {with_adapters: self._capture(size, with_adapters) for with_adapters in self._kinds}
            for size in sorted(sizes, reverse=True)  # the largest first: the smaller ones fit into its memory
        }
        return dict(sorted(captured.items()))

    @property
    def _kinds(self) -> tuple[bool, ...]:
        """Of captured steps: without adapters and, where there may be any, with them."""
        return (False,) if self._stacks is None else (False, True)

    @torch.no_grad()
    def _compile(self, lanes: Sequence[int], also: Callable[[], None]) -> None:
        """Have the kernels compiled that decode steps launch, captured or not, on all SMs and on those of each lane,
        and what ``also`` launches."""
        start = time.perf_counter()
        self._attention.decode.compile()
        sizes = self._compiled_sizes
        if self._stacks is not None:
            for size in (size for size in sizes if size <= MAX_ROWS):
                find_pieces(*self._blank_views(size)[1])  # to the end: other kernels take it for indices
        try:
            with compiled_together():
                also()
                self._run_without_attention(sizes, lanes)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # another version of Triton may collect otherwise
            logger.warning("kernels are compiled one by one: %s", error)
            also()
            self._run_without_attention(sizes, lanes)
        torch.cuda.synchronize(self._device)
        logger.info("kernels compiled in %.1f s", time.perf_counter() - start)

    def _run_without_attention(self, sizes: Sequence[int], lanes: Sequence[int]) -> None:
        """Decode steps of the first layers, on all SMs and cut for each lane's."""
        for num_sms, size in itertools.product((None, *lanes), sizes):
            tokens, adapters = self._blank_views(size)
            for with_adapters in self._kinds:
                grouped = self._grouped(adapters) if with_adapters else None
                with nullcontext() if num_sms is None else sms_at_hand(num_sms):
                    normed = self._forward(tokens, lambda layer, query, cache: query, grouped=grouped, num_layers=2)
                    self._forward.logits(normed)

    def _blank_views(self, size: int) -> tuple[TokenInputs, torch.Tensor]:
        """Of the input buffer, for tokens that nothing is kept of and that have no adapters."""
        self._inputs.zero_()  # what another size left there is no token and no position
        tokens, _, adapters = self._views(size)
        tokens.slots.fill_(-1)
        adapters[0].fill_(-1)
        return tokens, adapters

    def _capture(self, size: int, with_adapters: bool) -> _Captured:
        tables = np.zeros((size, 1), dtype=np.int64)  # page 0 is always there
        segment = HostSegment((1,) * size, (1,) * size, tables, is_decode=True)
        fields = _blank_fields(size)
        tokens, lists, adapters = self._views(size)
        self._fill(fields, segment)
        grouped = self._grouped(adapters) if with_adapters else None
        logits = self._logits[:size]

        def attend(layer: int, query: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
            return self._attention.decode(query, cache, lists, torch.empty_like(query), begins_early=True)

        def run() -> None:
            self._forward.logits(self._forward(tokens, attend, grouped=grouped), out=logits)

        return _Captured(capture_graph(run, self._pool), logits)

    def _views(self, size: int) -> tuple[TokenInputs, torch.Tensor, torch.Tensor]:
        """A graph's parts of the input buffer: what it knows of tokens, chunks and pages, adapter slots and ranks."""
        end = _NUM_FIELDS * _padded(size)
        fields = self._inputs[:end].view(_NUM_FIELDS, -1)[:, :size]
        return TokenInputs(*fields[:4]), self._inputs[end:], fields[4:]

    def _grouped(self, adapters: torch.Tensor) -> GroupedLora | None:
        """``adapters`` [2, rows]: slots and ranks."""
        return None if self._stacks is None else GroupedLora(self._stacks, *adapters)

    def _adapter_fields(self, host: HostBatch) -> Int32Array:
        """[2, tokens]: each token's slot, -1 without an adapter, and its rank."""
        assert self._stacks is not None
        slots = host.adapter_slots()
        return np.stack([slots, np.array([*self._stacks.ranks, 0], dtype=np.int32)[slots]])

    def _lists(self, segment: HostSegment) -> _Lists:
        indptr, pages, last = page_indices(segment, self._attention.page_tokens)
        chunks = [self._attention.decode_chunks(indptr, segment.contexts)] if segment.is_decode else []
        padding = np.zeros(_padded(len(pages)) - len(pages), dtype=np.int32)
        return _Lists(indptr, np.concatenate([*chunks, pages, padding]), last)

    def _fill(self, fields: Int32Array, segment: HostSegment) -> None:
        """Send what a graph reads. ``fields`` as from ``_blank_fields``, of whose rows the segment may have fewer."""
        sent = torch.from_numpy(np.concatenate([fields.ravel(), self._lists(segment).sent])).pin_memory()
        self._inputs[: len(sent)].copy_(sent, non_blocking=True)

    def forward(self, host: HostBatch, interval: Interval, *, keep_hidden: bool) -> Forwarded:
        if keep_hidden:
            return self._eager.forward(host, interval, keep_hidden=True)
        lane = current_lane()
        captured_on = lane if lane in self._captured else None
        if host.is_decode:
            for size, captured in self._captured[captured_on].items():
                if size >= host.num_tokens:
                    return Forwarded(self._replay(host, interval, size, captured[host.has_adapters]), None)
        return Forwarded(self._launch(host, interval, self._pieces[captured_on]), None)

    def _replay(self, host: HostBatch, interval: Interval, size: int, captured: _Captured) -> torch.Tensor:
        count = host.num_tokens
        fields = _blank_fields(size)
        fields[:4, :count] = host.token_ids, host.positions, host.slots, host.seats
        if host.has_adapters:
            fields[4:, :count] = self._adapter_fields(host)
        self._fill(fields, host.segments[0])
        interval.begin()
        captured.graph.replay()
        return captured.logits[:count]

    def _launch(self, host: HostBatch, interval: Interval, captured: dict[int, CapturedPieces]) -> torch.Tensor | None:
        """A batch with prompt chunks, or larger than the largest graph. ``captured``: for the SMs that it has."""
        count, sampled = host.num_tokens, host.sampled_rows()
        spans = host.spans()
        # Few rows go through the kernels of captured steps, which are compiled at the start.
        most_spans = 0 if count <= MAX_ROWS else _MAX_SPANS
        use_grouped = self._stacks is not None and len(spans) > most_spans
        fields = _blank_fields(count)
        fields[:4, :count] = host.token_ids, host.positions, host.slots, host.seats
        if use_grouped:
            fields[4:, :count] = self._adapter_fields(host)
        rows = np.array(sampled or [0], dtype=np.int32)
        lists = [self._lists(segment) for segment in host.segments]
        parts = [fields.ravel(), *(each.sent for each in lists), rows]
        sent = torch.from_numpy(np.concatenate(parts, dtype=np.int32)).pin_memory().to(self._device, non_blocking=True)
        tensors = sent[: fields.size].view(_NUM_FIELDS, -1)[:, :count]
        wanted = sent[-len(rows) :]
        attend = self._plan(host, lists, sent[fields.size :])
        interval.begin()
        pieces = next((one for size, one in captured.items() if size >= count), None)
        if pieces is not None and not spans:
            normed = self._run_pieces(pieces, tensors[:4], attend, wanted)
        else:
            normed = self._forward(
                TokenInputs(*tensors[:4]),
                lambda layer, query, cache: attend(layer, query, torch.empty_like(query)),
                rows=wanted,
                spans=() if use_grouped else spans,
                grouped=self._grouped(tensors[4:]) if use_grouped else None,
            )
        if not sampled:
            return None
        # Where decode steps have theirs, for batches do not overlap. For new memory of the device the host waits until
        # what is in flight has ended, and logits are larger with every request.
        fits = len(sampled) <= len(self._logits)
        return self._forward.logits(normed, self._logits[: len(sampled)] if fits else None)

    def _plan(self, host: HostBatch, lists: Sequence[_Lists], sent: torch.Tensor) -> _AttendInto:
        """The attention of every segment, one after the other; that of prompts is planned. ``sent``: what the device
        reads of them, in the same order."""
        parts, place, row = [], 0, 0
        for segment, (indptr, own, last) in zip(host.segments, lists, strict=True):
            mine, rows = sent[place : place + len(own)], slice(row, row + sum(segment.counts))
            if segment.is_decode:
                parts.append((rows, partial(self._attend_decodes, mine)))
            else:
                pages = PageLists(torch.from_numpy(indptr).pin_memory(), mine, torch.from_numpy(last).pin_memory())
                wrapper = self._attention.plan_prefill(segment.counts, pages)
                parts.append((rows, partial(self._attend_prompts, wrapper)))
            place, row = place + len(own), rows.stop

        def attend(layer: int, query: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
            for rows, run in parts:
                run(layer, query[rows], out[rows])
            return out

        return attend

    def _attend_decodes(self, lists: torch.Tensor, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        self._attention.decode(query, self._layer_caches[layer], lists, out)

    def _attend_prompts(self, wrapper: Any, layer: int, query: torch.Tensor, out: torch.Tensor) -> None:
        wrapper.run(query, self._keys_values[layer], out=out)

    def _run_pieces(
        self, pieces: CapturedPieces, fields: torch.Tensor, attend: _AttendInto, rows: torch.Tensor
    ) -> torch.Tensor:
        count = fields.shape[1]
        pieces.inputs[:, :count].copy_(fields)
        pieces.inputs[2, count:].fill_(-1)
        for layer in range(self._decoder.spec.num_layers):
            pieces.launch(layer)
            attend(layer, pieces.query, pieces.attended)
        return self._layers.end(pieces.attended[rows], pieces.residual[rows])
