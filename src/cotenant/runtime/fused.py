"""The online batch with training layers in it (LLMStation section 5.2)."""

from __future__ import annotations

from functools import partial

import msgspec
import torch

from cotenant.core.tasklet import TaskletKind, TaskletRun, TaskletShape
from cotenant.device.readback import Interval
from cotenant.engine.engine import OnlineEngine
from cotenant.engine.flight import OnlineStep, RanLayers
from cotenant.finetune.job import FusedInput
from cotenant.models.batch import AdapterSpan, Batch
from cotenant.models.decoder import Decoder
from cotenant.models.tape import LayerTape
from cotenant.runtime.training import TrainingTenant


class FusedForward:
    """Linear layers run over the tokens of both tenants, attention over each one's alone."""

    def __init__(self, decoder: Decoder, engine: OnlineEngine, training: TrainingTenant) -> None:
        self._decoder = decoder
        self._engine = engine
        self._training = training

    def forward(self, step: OnlineStep, num_fused: int) -> tuple[RanLayers | None, TaskletRun | None]:
        """All layers of the online batch; the first ``num_fused`` training layers that it meets run inside it, which
        are the run. What goes wrong because of those ends the job alone, and where there is no memory, whoever asked,
        its micro-batch begins again, in less: there is then no result, the engine runs the batch itself, and writes the
        same rows of the KV cache."""
        return self._training.attempt(partial(self._forward, step, num_fused), can_repeat=True) or (None, None)

    def _forward(self, step: OnlineStep, num_fused: int) -> tuple[RanLayers, TaskletRun | None]:
        batch = self._engine.batch_of(step)
        interval = Interval(self._decoder.device)
        interval.begin()
        hidden = self._decoder.embed(batch.token_ids)  # [tokens, hidden]
        joint: Batch | None = None
        fused: TaskletRun | None = None
        for index in range(self._decoder.spec.num_layers):
            if (fused is None or fused.count < num_fused) and self._training.fusable_layer == index:
                piece = self._training.begin_fused()
                joint = joint or join(batch, piece)
                hidden = self._layer(index, hidden, piece, joint)
                shape = TaskletShape(TaskletKind.FORWARD, piece.segment.num_tokens, max(piece.segment.lengths))
                fused = msgspec.structs.replace(fused, count=fused.count + 1) if fused else TaskletRun(shape, 1)
            else:
                hidden = self._decoder.layer(index, hidden, batch, self._engine.kv_cache)
        return RanLayers(hidden, interval), fused

    def _layer(self, index: int, hidden: torch.Tensor, piece: FusedInput, joint: Batch) -> torch.Tensor:
        rows = torch.cat([hidden, piece.hidden])  # [online + training tokens, hidden]
        tape = LayerTape(slice(hidden.shape[0], rows.shape[0]))
        output = self._decoder.layer(index, rows, joint, self._engine.kv_cache, tape)
        self._training.end_fused(output[tape.rows], tape)
        return output[: hidden.shape[0]]


def join(batch: Batch, piece: FusedInput) -> Batch:
    """The online batch with a training micro-batch behind it. Layers read hidden states, so its token ids are zeros."""
    start = batch.num_tokens
    stop = start + piece.segment.num_tokens
    return Batch(
        token_ids=torch.cat([batch.token_ids, torch.zeros_like(piece.positions)]),
        positions=torch.cat([batch.positions, piece.positions]),
        segments=(*batch.segments, piece.segment),
        spans=(*batch.spans, AdapterSpan(start, stop, piece.adapter)),
        head=batch,
    )
