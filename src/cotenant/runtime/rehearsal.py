"""A job of nobody's, before the first real one: what its tasklets do for the first time, libraries that load kernels
above all, no job's tasklets do while requests wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

import torch

from cotenant.core.job import Hyperparameters, JobSpec
from cotenant.device import Device
from cotenant.finetune.activations import can_capture
from cotenant.finetune.captured import rows_for
from cotenant.finetune.dataset import Dataset
from cotenant.finetune.job_setup import new_adapter
from cotenant.finetune.job_training import make_training
from cotenant.finetune.order import DataOrder
from cotenant.finetune.preparation import Prepared
from cotenant.finetune.trainer import Trainer
from cotenant.finetune.warm_up import attend
from cotenant.models.decoder import Decoder
from cotenant.models.lane_products import load_algorithms

logger = logging.getLogger(__name__)

_NUM_LAYERS = 2  # the first one's backward is another than the others'
# Of examples, in sixteenths of what a micro-batch has at most: several share one.
_LENGTHS = (5, 3, 5, 3, 5, 3)
# While requests are live and a job waits, they are kept waiting for so little of the time.
_LIVE_SHARE = 0.2


class Rehearsal:
    """``step`` runs one tasklet, until ``done``; no job may run before. Then, while there is neither a job nor a
    request, it has attention plan for a full row, which takes longer than all else, and which not every job has. It
    belongs to the thread that launches.

    ``only_for_jobs``: a server without a job rehearses nothing. ``is_compiled``: whether training's kernels are,
    without which nothing is run here.
    """

    def __init__(
        self,
        device: Device,
        decoder: Decoder,
        max_tasklet_tokens: int,
        is_compiled: Callable[[], bool],
        free_bytes: Callable[[], int | None],
        *,
        limit_is_fixed: bool = True,
    ) -> None:
        """``max_tasklet_tokens`` and ``limit_is_fixed`` are a job's. ``free_bytes``: what a job could have of the
        device's memory now."""
        self._device = device
        self._decoder = decoder.first_layers(min(_NUM_LAYERS, decoder.spec.num_layers))
        self._max_tasklet_tokens = max_tasklet_tokens
        self._num_tokens = min(max_tasklet_tokens, decoder.spec.max_position_embeddings)
        self._limit_is_fixed = limit_is_fixed
        self.is_compiled = is_compiled
        self._free_bytes = free_bytes
        self._parts: Iterator[None] = self._run()
        self._plans = [self._plan_forward, self._plan_backward] if can_capture(decoder) else []
        self._next_s = 0.0
        self.only_for_jobs = False
        self.done = False

    def is_wanted(self, *, has_job: bool, delays_requests: bool) -> bool:
        """Whether the next step is to be done now. Requests are delayed for a job alone, and not all the time."""
        if (self.only_for_jobs and not has_job) or not self.is_compiled():
            return False
        if self.done:
            return bool(self._plans) and not has_job and not delays_requests
        return not delays_requests or (has_job and time.monotonic() >= self._next_s)

    def step(self) -> None:
        """Batches in flight end first. If it fails there is no rehearsal."""
        self._device.synchronize()
        begin_s = time.monotonic()
        try:
            if self.done:
                self._plans.pop(0)()
            else:
                self.done = next(self._parts, self) is self
                if self.done:
                    logger.info("what a job's first tasklets run has run before")
        except Exception as error:
            logger.warning("the first job's first steps may keep requests waiting, nothing was rehearsed: %s", error)
            self.done = True
            self._plans.clear()
        self._device.synchronize()  # raises if the device is of no use any more
        self._device.finished_tasklets()  # nobody is to learn from these
        end_s = time.monotonic()
        self._next_s = end_s + (end_s - begin_s) * (1 / _LIVE_SHARE - 1)

    def _run(self) -> Iterator[None]:
        """All of it, with a pause behind each part."""
        trainer = self._make_trainer()
        try:
            trainer.start()
            yield
            while trainer.next_shape is not None:
                self._device.run_tasklet(trainer.run_tasklet)
                yield
            if can_capture(self._decoder):
                yield from self._load_algorithms()
        finally:
            trainer.close()
            self._device.release_kept_memory()

    def _load_algorithms(self) -> Iterator[None]:
        """What full micro-batches' products would try in each partition."""
        layer = self._decoder.weights.layers[0]
        for partition in self._device.partitions:
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down):
                for matrix in (linear.weight.T, linear.weight):
                    yield from load_algorithms(matrix, rows_for(self._num_tokens), partition.best_effort_sms)

    def _plan_forward(self) -> None:
        attend(self._decoder, (self._num_tokens,), backward=False)

    def _plan_backward(self) -> None:
        attend(self._decoder, (self._num_tokens,))

    def _make_trainer(self) -> Trainer:
        model, num_tokens = self._decoder.spec, self._num_tokens
        # A token more: where all have one length, a multiple of 128, they count as full rows.
        lengths = torch.tensor(_LENGTHS) * num_tokens // 16 + 1
        hyper = Hyperparameters(n_epochs=1, batch_size=len(lengths), max_length=num_tokens)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        token_ids = torch.arange(int(offsets[-1]), dtype=torch.int32) % model.vocab_size
        dataset = Dataset(token_ids, torch.ones(len(token_ids)), offsets, hyper.max_length)
        spec = JobSpec("rehearsal", "", "", "", None, "rehearsal", hyper)
        order = DataOrder(dataset.lengths, hyper)
        prepared = Prepared(dataset, order, "", new_adapter(spec, model), None, (), None, ())
        return make_training(
            self._decoder,
            spec,
            prepared,
            self._max_tasklet_tokens,
            resume=lambda state, checkpoint: None,
            on_step=lambda metrics: None,
            clock=time.monotonic,
            free_bytes=self._free_bytes(),
            device=self._device,
            limit_is_fixed=self._limit_is_fixed,
        ).trainer
