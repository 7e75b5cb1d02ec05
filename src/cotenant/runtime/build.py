"""The online tenant, put together from its configuration."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from cotenant.config import ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.device import Device, create_device
from cotenant.engine.engine import OnlineEngine
from cotenant.models.attention_kernels import begin_import, prepare
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.paged_attention import is_supported
from cotenant.models.product_check import check_products
from cotenant.models.registry import ResolvedModel, resolve_model
from cotenant.runtime.compression import compresses, tell
from cotenant.runtime.sizing import batch_bytes, num_pages
from cotenant.scheduler.space import NEED_PARTITIONS, sm_shares

logger = logging.getLogger(__name__)

# Of a micro-batch at most, on each type of device, unless --tasklet-tokens says otherwise.
TASKLET_TOKENS = {"cpu": 256, "cuda": 2048}


@dataclass(frozen=True, slots=True)
class Serving:
    """A device, a model on it, and the engine that serves it, warmed up but for the partitions of the SMs.
    ``batch_bytes``: of the device's free memory, what batches need while they run."""

    device: Device
    resolved: ResolvedModel
    decoder: Decoder
    engine: OnlineEngine
    max_model_len: int
    tasklet_tokens: int
    batch_bytes: int


def runs_on_cuda(device: str) -> bool:
    """``device`` as for `--device`."""
    return device != "cpu" and torch.cuda.is_available()


def default_tasklet_tokens(device: str) -> int:
    """Of a micro-batch at most, where nothing else is said; ``device`` as for `--device`."""
    return TASKLET_TOKENS["cuda" if runs_on_cuda(device) else "cpu"]


def choose_dtype(name: str, checkpoint_dtype: str | None, device: Device) -> torch.dtype:
    """The dtype of weights and KV cache for `--dtype`. ``auto`` keeps a checkpoint's half precision on a GPU."""
    if name == "auto" and device.torch_device.type != "cpu" and checkpoint_dtype in ("bfloat16", "float16"):
        name = checkpoint_dtype
    return device.default_dtype() if name == "auto" else getattr(torch, name)


def build_serving(config: ServerConfig, meanwhile: Callable[[Decoder], None] | None = None) -> Serving:
    """Load the model and make everything ready that a request needs. Raises CotenantError for what cannot be served.
    ``meanwhile`` is run on a thread of its own while compilers are waited for."""
    shares = config.coexecution.sm_shares
    shares = sm_shares(config.coexecution.policy) if shares is None else shares
    if shares:
        # Streams share the host's queues to the device, 8 unless said otherwise: work of one would wait for another's.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    resolved = resolve_model(config.model)
    if runs_on_cuda(config.model.device):
        begin_import()
    device = create_device(config.model.device)
    dtype = choose_dtype(config.model.dtype, resolved.spec.dtype, device)
    has_kernels = is_supported(resolved.spec, device.torch_device, dtype)
    if has_kernels:
        prepare(resolved.spec, device.torch_device, dtype)  # before all else: it takes the longest
    if shares and device.num_multiprocessors is not None:
        # A step that is launched kernel by kernel keeps the host for about as long as the device: tasklets beside it,
        # which the plan counts on, would be launched when it has ended.
        if has_kernels and not config.batch.enforce_eager:
            device.split(round(share * device.num_multiprocessors) for share in shares)
        else:
            logger.info("decode steps are not captured, so no SMs are divided")
    _warn_of_partitions(config, device)
    decoder = _load(config, resolved, device, dtype)
    if runs_on_cuda(config.model.device):
        with device.online():
            check_products(decoder.weights)
        torch.cuda.empty_cache()  # the KV cache's size follows from what is free
    max_model_len = config.model.max_model_len or resolved.spec.max_position_embeddings
    tasklet_tokens = config.coexecution.tasklet_tokens or TASKLET_TOKENS[device.torch_device.type]
    less = " or give --compress-weights off" if decoder.weights.is_compressed else ""  # which nobody may have asked for
    pages, max_pages = num_pages(config, device, resolved.spec, dtype, max_model_len, tasklet_tokens, less)
    try:
        with ThreadPoolExecutor(1, "meanwhile") as thread, device.online():
            other = thread.submit(meanwhile or (lambda decoder: None), decoder)
            engine = OnlineEngine(
                decoder,
                pages,
                config.cache.page_tokens,
                config.batch,
                max_model_len,
                config.lora,
                (*resolved.spec.eos_token_ids, *config.model.eos_token_ids),
                device=device,
                max_pages=max_pages,
                enable_prefix_caching=config.cache.enable_prefix_caching,
            )
            lanes = tuple(partition.online_sms for partition in device.partitions)
            engine.warm_up(config.batch.cuda_graph_sizes, lanes, enforce_eager=config.batch.enforce_eager)
            other.result()
    except torch.OutOfMemoryError as error:
        raise InvalidInputError(
            f"the KV cache and what serving needs beside it do not fit into the device's memory: lower "
            f"--gpu-memory-utilization or --num-pages{less} ({error})",
            param="gpu-memory-utilization",
        ) from error
    num_bytes = batch_bytes(resolved.spec, config.batch.resolved(device.torch_device.type), decoder.dtype)
    if not device.set_aside(num_bytes):  # --num-pages has left less, say
        logger.warning("batches may wait for memory while they run: no %d MiB could be set aside", num_bytes >> 20)
    spare_host_threads(device)
    return Serving(device, resolved, decoder, engine, max_model_len, tasklet_tokens, num_bytes)


def _load(config: ServerConfig, resolved: ResolvedModel, device: Device, dtype: torch.dtype) -> Decoder:
    compress = compresses(config.model, config.cache, device.torch_device, resolved.spec, dtype)
    method = config.model.quantization
    decoder = load_decoder(resolved, device.torch_device, dtype, config.model.seed, method, compress=compress)
    tell(config.model, decoder)
    return decoder


def _warn_of_partitions(config: ServerConfig, device: Device) -> None:
    """Where somebody asked for them and there are none."""
    if device.partitions:
        return
    if config.coexecution.policy in NEED_PARTITIONS:
        logger.warning(
            "--policy %s divides a GPU's multiprocessors, which is not done here: training runs only while nobody asks",
            config.coexecution.policy,
        )
    is_measured = bool(config.coexecution.policies)  # then nobody has asked for these shares
    if config.coexecution.sm_shares and not is_measured:
        logger.warning("--sm-shares: no multiprocessors are divided here, so nothing comes of it")


def spare_host_threads(device: Device) -> None:
    """Beside a GPU the host's own tensors are small. Threads that share the work on them, and then wait busily for
    more, cost more than they do."""
    if device.torch_device.type == "cuda":
        torch.set_num_threads(1)
