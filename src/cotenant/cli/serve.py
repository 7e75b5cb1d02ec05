"""``cotenant serve``: from flags to a running server."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cotenant.cli.options import build_config, option
from cotenant.cli.output import fail
from cotenant.config import LoraConfig, ServerConfig
from cotenant.core.errors import InvalidInputError
from cotenant.core.user_path import check_utf8
from cotenant.processes import importing

if TYPE_CHECKING:
    from cotenant.api.prepared import PreparedWorker
    from cotenant.models.spec import ModelSpec

_MODEL_HELP = "'tiny', a Hugging Face folder or id, or with --load-format dummy a known architecture."
_CONFIG_HELP = "YAML file of these flags, without the dashes in front. The command line wins."


def serve(
    context: typer.Context,
    model: Annotated[str | None, typer.Argument(metavar="MODEL", help=_MODEL_HELP, show_default=False)] = None,
    config: Annotated[Path | None, typer.Option("--config", help=_CONFIG_HELP, show_default=False)] = None,
    served_model_name: Annotated[list[str] | None, option("served-model-name")] = None,
    max_model_len: Annotated[int | None, option("max-model-len")] = None,
    dtype: Annotated[str | None, option("dtype")] = None,
    quantization: Annotated[str | None, option("quantization")] = None,
    compress_weights: Annotated[str | None, option("compress-weights")] = None,
    load_format: Annotated[str | None, option("load-format")] = None,
    device: Annotated[str | None, option("device")] = None,
    seed: Annotated[int | None, option("seed")] = None,
    chat_template: Annotated[str | None, option("chat-template")] = None,
    page_tokens: Annotated[int | None, option("page-tokens")] = None,
    num_pages: Annotated[int | None, option("num-pages")] = None,
    gpu_memory_utilization: Annotated[float | None, option("gpu-memory-utilization")] = None,
    enable_prefix_caching: Annotated[bool | None, option("enable-prefix-caching")] = None,
    max_num_seqs: Annotated[int | None, option("max-num-seqs")] = None,
    max_num_batched_tokens: Annotated[int | None, option("max-num-batched-tokens")] = None,
    max_queue: Annotated[int | None, option("max-queue")] = None,
    enforce_eager: Annotated[bool | None, option("enforce-eager")] = None,
    cuda_graph_sizes: Annotated[list[int] | None, option("cuda-graph-sizes")] = None,
    max_loras: Annotated[int | None, option("max-loras")] = None,
    max_cpu_loras: Annotated[int | None, option("max-cpu-loras")] = None,
    max_lora_rank: Annotated[int | None, option("max-lora-rank")] = None,
    lora_modules: Annotated[list[str] | None, option("lora-modules")] = None,
    policy: Annotated[str | None, option("policy")] = None,
    slo_ttft_ms: Annotated[float | None, option("slo-ttft-ms")] = None,
    slo_tpot_ms: Annotated[float | None, option("slo-tpot-ms")] = None,
    slo_itl_ms: Annotated[float | None, option("slo-itl-ms")] = None,
    slo_attainment: Annotated[float | None, option("slo-attainment")] = None,
    tasklet_tokens: Annotated[int | None, option("tasklet-tokens")] = None,
    fuse: Annotated[bool | None, option("fuse")] = None,
    sm_shares: Annotated[list[float] | None, option("sm-shares")] = None,
    self_profile: Annotated[bool | None, option("self-profile")] = None,
    host: Annotated[str | None, option("host")] = None,
    port: Annotated[int | None, option("port")] = None,
    api_key: Annotated[str | None, option("api-key")] = None,
    allowed_origins: Annotated[list[str] | None, option("allowed-origins")] = None,
    max_upload_bytes: Annotated[int | None, option("max-upload-bytes")] = None,
    worker_timeout: Annotated[float | None, option("worker-timeout")] = None,
    data_dir: Annotated[str | None, option("data-dir")] = None,
    log_level: Annotated[str | None, option("log-level")] = None,
    trace_file: Annotated[str | None, option("trace-file")] = None,
) -> None:
    """Serve MODEL over HTTP: requests, and fine-tuning jobs beside them."""
    run(build_config(model, context.params, config))


def run(config: ServerConfig) -> None:
    """Run the server to its end. Raises typer.Exit if its exit code is not 0, CotenantError if it cannot start."""
    # Here and not above: the other commands should not wait for them.
    from cotenant.api.prepared import PreparedWorker

    with PreparedWorker() as prepared:
        _run(config, prepared)


def _run(config: ServerConfig, prepared: PreparedWorker) -> None:
    with importing():
        from cotenant.api.server import BaseModel, ServerFailedError, run_server
        from cotenant.models.fingerprint import fingerprint
        from cotenant.models.registry import resolve_model

    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    # At its info level each of them has a line for every request of ours.
    for name in ("httpx", "huggingface_hub", "uvicorn"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
    resolved = resolve_model(config.model)
    _check_lora_modules(config.lora, resolved.spec)
    # Absolute, for adapters name their base by it, wherever they are read.
    folder = None if resolved.folder is None else resolved.folder.absolute()
    check_utf8(folder, "MODEL")
    base = BaseModel(folder, resolved.spec.vocab_size, fingerprint(resolved, config.model))
    try:
        code = run_server(config, base, typer.echo, prepared=prepared)
    except ServerFailedError as error:
        fail(error.message, error.exit_code)
    if code != 0:
        raise typer.Exit(code)


def _check_lora_modules(lora: LoraConfig, spec: ModelSpec) -> None:
    """Raise InvalidInputError for an adapter that no request could be served with."""
    from cotenant.models.adapter_files import read_adapter_files

    for name, folder in lora.modules:
        try:
            read_adapter_files(Path(folder), spec, lora.max_lora_rank)
        except InvalidInputError as error:
            raise InvalidInputError(
                f"--lora-modules: '{name}' in {folder} cannot be served: {error.message}. Mend it, or leave "
                f"{name}={folder} out",
                param="lora-modules",
            ) from error
