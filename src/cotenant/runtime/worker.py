"""The worker process: `python -m cotenant.runtime.worker --address … --config …`.

Loads the model, says ``Ready``, and runs the loop. It dies with its parent, so two workers never share a data folder.
"""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from cotenant.config import ServerConfig
from cotenant.core.errors import CotenantError
from cotenant.core.plan import Slo
from cotenant.finetune.optimizer import warm_up
from cotenant.models.decoder import Decoder
from cotenant.models.products import has_triton
from cotenant.predictor.predictor import LatencyPredictor
from cotenant.processes import die_with_parent
from cotenant.runtime.build import build_serving
from cotenant.runtime.calibration import calibrate
from cotenant.runtime.executor import Executor
from cotenant.runtime.loop import WorkerLoop
from cotenant.runtime.sizing import serving_bytes
from cotenant.runtime.training import TrainingTenant
from cotenant.scheduler import create_policy
from cotenant.wire.channel import WorkerChannel
from cotenant.wire.messages import Ready, StartFailed

logger = logging.getLogger(__name__)

_CUDA_SLO = Slo(ttft_ms=500.0, tpot_ms=40.0)
START_FAILED_EXIT_CODE = 2


def build_loop(config: ServerConfig, channel: WorkerChannel, started_s: float) -> WorkerLoop:
    """Load everything and put it together. Sends ``Ready`` when requests can be served."""
    serving = build_serving(config)
    device, decoder, engine, resolved = serving.device, serving.decoder, serving.engine, serving.resolved
    max_model_len = serving.max_model_len
    predictor = LatencyPredictor(device.name, resolved.name)
    training = TrainingTenant(
        device,
        decoder,
        resolved.folder,
        serving.tasklet_tokens,
        channel.send,
        limit_is_fixed=config.coexecution.tasklet_tokens is not None,
        serving_bytes=serving_bytes(resolved.spec, config.batch.resolved(device.torch_device.type), decoder.dtype),
    )
    executor = Executor(device, decoder, engine, training)
    default_slo = calibrate(engine, executor, predictor, resolved.spec.vocab_size, max_model_len)
    if device.torch_device.type != "cpu":
        default_slo = _CUDA_SLO
    slo = config.coexecution.slo(default_slo)
    if config.coexecution.policy != "inference-only":
        warm_up()
        training.wait_for(_compile_training(decoder))  # not before: what is measured above is to be undisturbed
    fuse = device.fuses if config.coexecution.fuse is None else config.coexecution.fuse
    policy = create_policy(config.coexecution.policy, predictor)
    channel.send(
        Ready(
            max_model_len=max_model_len,
            vocab_size=resolved.spec.vocab_size,
            num_pages=engine.num_pages,
            page_tokens=config.cache.page_tokens,
            device=device.name,
            dtype=str(decoder.dtype).removeprefix("torch."),
            policy=config.coexecution.policy,
            slo=slo,
            load_s=time.monotonic() - started_s,
        )
    )
    return WorkerLoop(channel, engine, training, policy, executor, predictor, slo, fuse, sizes_chunks=device.overlaps)


def _compile_training(decoder: Decoder) -> Callable[[], bool]:
    """Begin to compile the kernels that jobs will need, where there are any; whether that is over."""
    if decoder.device.type != "cuda" or not has_triton():
        return lambda: True
    from cotenant.models.kernels.precompile import TrainingKernels

    kernels = TrainingKernels(decoder.spec, decoder.dtype)
    return lambda: kernels.ready


def main() -> int:
    """Run a worker until it is drained. Exit code 2: it could not start, and said why in ``StartFailed``."""
    parser = argparse.ArgumentParser(prog="cotenant-worker", description="the worker process of cotenant")
    parser.add_argument("--address", required=True, help="ZeroMQ address that the API process has bound")
    parser.add_argument("--config", required=True, type=Path, help="JSON file with the server's configuration")
    parser.add_argument("--parent-pid", required=True, type=int, help="the API process; this one ends with it")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    # A terminal sends Ctrl-C to the whole group; the API process decides how this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    started_s = time.monotonic()
    config = msgspec.json.decode(arguments.config.read_bytes(), type=ServerConfig)
    logging.basicConfig(level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    channel = WorkerChannel(arguments.address)
    try:
        loop = build_loop(config, channel, started_s)
    except (CotenantError, torch.OutOfMemoryError) as error:
        channel.send(StartFailed(str(error)))
        channel.close()
        return START_FAILED_EXIT_CODE
    # What was loaded stays: keep the collector from walking it during an iteration.
    gc.collect()
    gc.freeze()
    loop.run()
    channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
