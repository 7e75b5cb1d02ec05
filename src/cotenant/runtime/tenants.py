"""Both tenants on one device, put together from the configuration, with what plans, runs and predicts them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from cotenant.config import ServerConfig
from cotenant.core.plan import Slo
from cotenant.device.base import Device
from cotenant.finetune.warm_up import warm_up
from cotenant.models.decoder import Decoder
from cotenant.models.products import has_triton
from cotenant.models.spec import ModelSpec
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.predictor.prior import Prior
from cotenant.predictor.roofline import RATES, ModelSizes, Roofline, rates_by_clocks
from cotenant.runtime.build import Serving, build_serving
from cotenant.runtime.calibration import calibrate
from cotenant.runtime.executor import Executor
from cotenant.runtime.lanes import LaneCaptures
from cotenant.runtime.latency_file import LatencyFile
from cotenant.runtime.loop import Channel, WorkerLoop
from cotenant.runtime.rehearsal import Rehearsal
from cotenant.runtime.self_profile import SelfProfile
from cotenant.runtime.sizing import prompt_partitions
from cotenant.runtime.trace import Trace
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import create_policy
from cotenant.scheduler.space import nearest
from cotenant.wire.messages import FromWorker

logger = logging.getLogger(__name__)

_CUDA_SLO = Slo(ttft_ms=500.0, tpot_ms=40.0)
_NUM_DIGITS = 12  # that tell models of different shapes apart


@dataclass(frozen=True, slots=True)
class Tenants:
    """``default_slo``: the targets where none are given. ``can_fuse``: training forwards may run in decode steps.
    ``lanes``: no partition of the SMs is used before they are done, and no job begins; nor does one before the
    ``rehearsal`` is over, if there is one."""

    serving: Serving
    lanes: LaneCaptures
    rehearsal: Rehearsal | None
    training: TrainingTenant
    executor: Executor
    predictor: LatencyPredictor
    latencies: LatencyFile
    default_slo: Slo
    can_fuse: bool
    trace: Trace | None

    def loop(
        self,
        channel: Channel,
        policy: str,
        slo: Slo,
        shares: tuple[float, ...] | None = None,
        *,
        profiles_itself: bool = False,
    ) -> WorkerLoop:
        """``shares``: of the SMs, that batches may have; None: all that there are partitions for. ``profiles_itself``:
        in idle time. Raises InvalidInputError for an unknown policy."""
        partitions, engine = self.serving.device.partitions, self.serving.engine
        partitions = partitions if shares is None else nearest(partitions, shares)
        vocab_size = self.serving.resolved.spec.vocab_size
        return WorkerLoop(
            channel,
            engine,
            self.training,
            create_policy(policy, self.predictor),
            self.executor,
            self.predictor,
            slo,
            self.can_fuse,
            partitions,
            sizes_chunks=self.serving.device.overlaps,
            trace=self.trace,
            save_part=lambda: self.latencies.save_part(self.predictor),
            self_profile=SelfProfile(engine, self.predictor, partitions, vocab_size) if profiles_itself else None,
            lanes=self.lanes,
            rehearsal=self.rehearsal,
        )


def _timed_model(serving: Serving, quantization: str | None, *, enforce_eager: bool) -> str:
    """What its latencies depend on, whatever name it is served under and wherever its folder lies."""
    spec, decoder = serving.resolved.spec, serving.decoder
    shapes = replace(spec, eos_token_ids=(), dtype=None)
    digest = hashlib.sha256(repr(shapes).encode()).hexdigest()[:_NUM_DIGITS]
    dtype = str(decoder.dtype).removeprefix("torch.")
    compressed = "compressed" if decoder.weights.is_compressed else None
    eager = "eager" if enforce_eager else None
    return " ".join(filter(None, (f"{spec.family}-{digest}", dtype, quantization, compressed, eager)))


def _about(config: ServerConfig) -> str:
    """What a trace is of. Of several policies its marks tell."""
    policy = "" if config.coexecution.policies else f", policy {config.coexecution.policy}"
    return f": {config.model.name}{policy}, since {datetime.now().astimezone():%Y-%m-%d %H:%M:%S %z}"


def build_tenants(config: ServerConfig, send: Callable[[FromWorker], None]) -> Tenants:
    """Load everything. ``send``: what the training tenant has to say. Raises CotenantError for what cannot be served,
    and torch.OutOfMemoryError."""
    trace = None if config.trace_file is None else Trace(Path(config.trace_file), _about(config))
    trains = config.coexecution.trains
    serving = build_serving(config, meanwhile=warm_up if trains else None)
    device, decoder, engine, spec = serving.device, serving.decoder, serving.engine, serving.resolved.spec
    model = _timed_model(serving, config.model.quantization, enforce_eager=config.batch.enforce_eager)
    prior = _prior(spec, decoder, config.model.quantization, device)
    predictor = LatencyPredictor(device.name, model, prior)
    latencies = LatencyFile(Path(config.data_dir), device.name, model)
    num_records = latencies.load(predictor)
    if num_records:
        logger.info("%d latencies were measured before", num_records)
    training = TrainingTenant(
        device,
        decoder,
        serving.resolved.folder,
        serving.tasklet_tokens,
        send,
        limit_is_fixed=config.coexecution.tasklet_tokens is not None,
        batch_bytes=serving.batch_bytes,
    )
    executor = Executor(device, decoder, engine, training, trace)
    # On CUDA for what it teaches the predictor alone.
    slo = calibrate(engine, executor, predictor, spec.vocab_size, serving.max_model_len)
    if device.torch_device.type != "cpu":
        slo = _CUDA_SLO
    lanes = LaneCaptures(device, engine, prompt_partitions(config, device))
    rehearsal = None
    if trains and device.torch_device.type == "cuda":
        is_compiled = _compile_training(decoder)  # not before: what is measured above is to be undisturbed
        rehearsal = Rehearsal(
            device,
            decoder,
            serving.tasklet_tokens,
            is_compiled,
            training.free_bytes,
            limit_is_fixed=config.coexecution.tasklet_tokens is not None,
        )
        training.wait_for(lambda: lanes.done and rehearsal.done, lambda: lanes.reserved_bytes)
    fuse = device.fuses if config.coexecution.fuse is None else config.coexecution.fuse
    return Tenants(serving, lanes, rehearsal, training, executor, predictor, latencies, slo, fuse, trace)


def _prior(spec: ModelSpec, decoder: Decoder, quantization: str | None, device: Device) -> Prior | None:
    """None for a device whose rates nobody knows, a CPU above all."""
    element_bytes = decoder.dtype.itemsize
    rates = RATES.get(device.name)
    if rates is None and device.clocks is not None:
        capability, sm_hz, bytes_per_s = device.clocks
        rates = rates_by_clocks(capability, device.num_multiprocessors or 0, sm_hz, bytes_per_s)
    if rates is None:
        return None
    sizes = ModelSizes(
        num_layers=spec.num_layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        vocab_size=spec.vocab_size,
        bytes_per_weight=element_bytes * decoder.weights.share_read if quantization is None else 1.0,
        bytes_per_element=element_bytes,
    )
    return Prior(Roofline(sizes, rates))


def _compile_training(decoder: Decoder) -> Callable[[], bool]:
    """Begin to compile the kernels that jobs will need, where there are any; whether that is over."""
    if not has_triton():
        return lambda: True
    from cotenant.models.kernels.precompile import TrainingKernels

    kernels = TrainingKernels(decoder.spec, decoder.dtype)
    return lambda: kernels.ready
