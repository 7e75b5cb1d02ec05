"""The flags of ``cotenant serve``: where each one goes in the configuration, on the command line or in a YAML file."""

from __future__ import annotations

import dataclasses
import json
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import typer

from cotenant.cli.config_file import read_settings
from cotenant.cli.output import check_outputs
from cotenant.config import (
    COMPRESS_WEIGHTS,
    DEVICES,
    DTYPE_ALIASES,
    DTYPES,
    LOAD_FORMATS,
    LOG_LEVELS,
    POLICIES,
    QUANTIZATIONS,
    ApiConfig,
    BatchConfig,
    CacheConfig,
    CoExecutionConfig,
    LoraConfig,
    ModelConfig,
    ServerConfig,
    api_key_from_environment,
)
from cotenant.core.errors import InvalidInputError
from cotenant.core.output_file import check_trace_file
from cotenant.core.user_path import check_utf8, looking_up
from cotenant.models.registry import resolve_model


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting: its name without the dashes, and the configuration class and field that it sets."""

    name: str
    section: type
    field: str
    help: str
    declaration: str = ""

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def default(self) -> object:
        field = next(field for field in dataclasses.fields(self.section) if field.name == self.field)
        return field.default

    @property
    def type(self) -> Any:
        return typing.get_type_hints(self.section)[self.field]


_ALL_FLAGS = (
    Flag("served-model-name", ModelConfig, "served_model_names", "Name in the API; may be given several times."),
    Flag("max-model-len", ModelConfig, "max_model_len", "Longest prompt plus answer, in tokens."),
    Flag(
        "dtype",
        ModelConfig,
        "dtype",
        f"Of weights and KV cache: {', '.join(DTYPES)}; "
        + ", ".join(f"{alias} is {name}" for alias, name in DTYPE_ALIASES.items())
        + ".",
    ),
    Flag("quantization", ModelConfig, "quantization", f"Of weights: none (default) or {', '.join(QUANTIZATIONS)}."),
    Flag(
        "compress-weights",
        ModelConfig,
        "compress_weights",
        f"Let decode steps read copies of the weights, compressed without loss: {', '.join(COMPRESS_WEIGHTS)}.",
    ),
    Flag("load-format", ModelConfig, "load_format", f"{' or '.join(LOAD_FORMATS)}; dummy means random weights."),
    Flag("device", ModelConfig, "device", f"{', '.join(DEVICES)}."),
    Flag("seed", ModelConfig, "seed", "Of random weights."),
    Flag("chat-template", ModelConfig, "chat_template", "Jinja file, or the template itself, in place of the model's."),
    Flag("page-tokens", CacheConfig, "page_tokens", "Tokens in a page of KV memory."),
    Flag("num-pages", CacheConfig, "num_pages", "Pages of KV memory, in place of what fits."),
    Flag("gpu-memory-utilization", CacheConfig, "gpu_memory_utilization", "Share of the GPU's memory to use."),
    Flag(
        "enable-prefix-caching",
        CacheConfig,
        "enable_prefix_caching",
        "Use the KV pages of equal beginnings of prompts again.",
        "--enable-prefix-caching/--no-enable-prefix-caching",
    ),
    Flag("max-num-seqs", BatchConfig, "max_num_seqs", "Most sequences in a batch; 0: 256 on CUDA, 64 on a CPU."),
    Flag(
        "max-num-batched-tokens",
        BatchConfig,
        "max_num_batched_tokens",
        "Most tokens in a batch; 0: 4096 on CUDA, 512 on a CPU.",
    ),
    Flag("max-queue", BatchConfig, "max_queue", "Most live requests; beyond it the answer is 503."),
    Flag(
        "enforce-eager",
        BatchConfig,
        "enforce_eager",
        "Run without CUDA graphs.",
        "--enforce-eager/--no-enforce-eager",
    ),
    Flag(
        "cuda-graph-sizes",
        BatchConfig,
        "cuda_graph_sizes",
        "Batch size to capture a decode graph for, in place of the server's choice; may be given several times.",
    ),
    Flag("max-loras", LoraConfig, "max_loras", "Most adapters on the device at once."),
    Flag(
        "max-cpu-loras",
        LoraConfig,
        "max_cpu_loras",
        "Most adapters in host memory; no fewer than --max-loras.",
    ),
    Flag("max-lora-rank", LoraConfig, "max_lora_rank", "Highest rank of an adapter."),
    Flag("lora-modules", LoraConfig, "modules", "NAME=FOLDER of an adapter to serve; may be given several times."),
    Flag("policy", CoExecutionConfig, "policy", f"{', '.join(POLICIES)}."),
    Flag("slo-ttft-ms", CoExecutionConfig, "slo_ttft_ms", "Target for the time to the first token."),
    Flag("slo-tpot-ms", CoExecutionConfig, "slo_tpot_ms", "Target for the time per token after it."),
    Flag("slo-itl-ms", CoExecutionConfig, "slo_itl_ms", "Longest gap between two tokens that training may plan for."),
    Flag("slo-attainment", CoExecutionConfig, "slo_attainment", "Share of requests that should meet both targets."),
    Flag("tasklet-tokens", CoExecutionConfig, "tasklet_tokens", "Training tokens in a micro-batch."),
    Flag("fuse", CoExecutionConfig, "fuse", "Run forward tasklets inside online batches.", "--fuse/--no-fuse"),
    Flag(
        "sm-shares",
        CoExecutionConfig,
        "sm_shares",
        "Share of the GPU's SMs that batches may have beside training, in place of the policy's choice; may be given "
        "several times.",
    ),
    Flag(
        "self-profile",
        CoExecutionConfig,
        "self_profile",
        "While nobody asks and nothing trains, measure decode steps of sizes that have not come yet; on CUDA unless "
        "said otherwise.",
        "--self-profile/--no-self-profile",
    ),
    Flag("host", ApiConfig, "host", "Address to listen on."),
    Flag("port", ApiConfig, "port", "Port to listen on; 0 picks a free one."),
    Flag("api-key", ApiConfig, "api_key", "Key that /v1 asks for; or set COTENANT_API_KEY."),
    Flag(
        "allowed-origins",
        ApiConfig,
        "allowed_origins",
        "Origin of web pages whose scripts may call the API, * for all; may be given several times.",
    ),
    Flag("max-upload-bytes", ApiConfig, "max_upload_bytes", "Largest file that can be uploaded."),
    Flag(
        "worker-timeout",
        ApiConfig,
        "worker_timeout_s",
        "Seconds after which a worker that says nothing is reported, and /health answers 503; 0: never.",
    ),
    Flag("data-dir", ServerConfig, "data_dir", "Folder of files, jobs and adapters."),
    Flag("trace-file", ServerConfig, "trace_file", "Write a Chrome trace of the worker here."),
    Flag("log-level", ServerConfig, "log_level", f"{', '.join(LOG_LEVELS)}."),
)
FLAGS = {flag.key: flag for flag in _ALL_FLAGS}
# Keys of a YAML file that are not flags: the positional argument.
_MODEL_KEY = "model"
MOST_ALONE_S = 3600.0  # that training is timed by itself
# What --quantization takes besides the methods, so that the command line can undo a file's.
_NO_QUANTIZATION = "none"
# How msgspec names types and says which of them was expected; and those that YAML makes of text without quotes.
_WRONG_TYPE = re.compile(r"Expected `(?P<wanted>[^`]+)`, got `(?P<got>[^`]+)`(?: - at `\$\[(?P<index>\d+)\]`)?")
_TYPES = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "nothing",
    "date": "a date",
    "datetime": "a time",
    "bytes": "binary data",
}
_TEXT_IN_QUOTES = ("int", "float", "bool", "date", "datetime")


def option(name: str) -> Any:
    """typer's description of a flag. Its value is None when the flag was not given: the file or the default counts."""
    flag = FLAGS[name.replace("-", "_")]
    default = flag.default
    shown = "" if default in (None, "", ()) or default is dataclasses.MISSING else f" (default: {default})"
    return typer.Option(flag.declaration or f"--{flag.name}", help=flag.help + shown, show_default=False)


def build_config(model: str | None, given: Mapping[str, object], file: Path | None) -> ServerConfig:
    """The configuration from the positional argument, the flags (None or empty: not given) and a YAML file.

    The command line wins over the file. The API key comes from the flag, the file, or the environment, in this order.
    Raises InvalidInputError that names the flag or key.
    """
    values = _read_file(file) if file is not None else {}
    sources = dict.fromkeys(values, file)
    flags = {key: value for key, value in given.items() if key in FLAGS and value not in (None, (), [])}
    flags |= {} if model is None else {_MODEL_KEY: model}
    values |= flags
    sources |= dict.fromkeys(flags)
    if _MODEL_KEY not in values:
        raise InvalidInputError("MODEL is missing: give a folder, a Hugging Face id, or 'tiny'", param="model")
    if not str(values.get("api_key", "none")).strip():
        raise InvalidInputError("--api-key: is empty; leave it out for a server that asks for no key", param="api-key")
    values.setdefault("api_key", api_key_from_environment())
    if values.get("quantization") == _NO_QUANTIZATION:
        del values["quantization"]
    dtype = values.get("dtype")
    if isinstance(dtype, str):
        values["dtype"] = DTYPE_ALIASES.get(dtype, dtype)
    if isinstance(values.get("compress_weights"), bool):  # as YAML reads on and off
        values["compress_weights"] = "on" if values["compress_weights"] else "off"
    if "lora_modules" in values:
        values["lora_modules"] = _parse_lora_modules(values["lora_modules"])
    if "allowed_origins" in values:
        values["allowed_origins"] = _parse_origins(values["allowed_origins"])
    sections: dict[type, dict[str, Any]] = {flag.section: {} for flag in _ALL_FLAGS}
    sections[ModelConfig]["model"] = _convert(_MODEL_KEY, values.pop(_MODEL_KEY), str, sources[_MODEL_KEY])
    for key, value in values.items():
        flag = FLAGS[key]
        sections[flag.section][flag.field] = _convert(flag.name, value, flag.type, sources.get(key))
    server = sections[ServerConfig]
    model_config = ModelConfig(**sections[ModelConfig])
    lora_config = LoraConfig(**sections[LoraConfig])
    _check_lora_names(model_config, lora_config)
    data_dir = server.get("data_dir", FLAGS["data_dir"].default)
    server["data_dir"] = str(folder_of_data(data_dir))
    if server.get("trace_file") is not None:
        with looking_up(server["trace_file"], "--trace-file"):
            trace_file = Path(server["trace_file"]).expanduser().resolve()
        check_outputs(**{"trace-file": trace_file})
        check_trace_file(trace_file)
        check_utf8(trace_file, "--trace-file")
        server["trace_file"] = str(trace_file)
    return ServerConfig(
        model=model_config,
        cache=CacheConfig(**sections[CacheConfig]),
        batch=BatchConfig(**sections[BatchConfig]),
        lora=lora_config,
        coexecution=CoExecutionConfig(**sections[CoExecutionConfig]),
        api=ApiConfig(**sections[ApiConfig]),
        **server,
    )


def folder_of_data(data_dir: str | Path) -> Path:
    """The folder that --data-dir names, which may have to be made. Raises InvalidInputError where none can be, and for
    no name, as of a variable that is not set: files would go where the command happens to be run."""
    if not str(data_dir).strip():
        raise InvalidInputError(f"--data-dir: is empty; leave it out for {FLAGS['data_dir'].default}", param="data-dir")
    with looking_up(data_dir, "--data-dir"):
        folder = Path(data_dir).expanduser().resolve()
        folder.exists()  # which says what a longest name is
    check_utf8(folder, "--data-dir")
    return folder


def _read_file(file: Path) -> dict[str, object]:
    """A YAML file's settings by key, in the spelling with underscores."""
    values: dict[str, object] = {}
    for name, value in read_settings(file).items():
        key = str(name).replace("-", "_")
        if key not in FLAGS and key != _MODEL_KEY:
            raise InvalidInputError(f"--config: {file}: unknown key '{name}'{_instead(key, value)}", param="config")
        if value is not None:
            values[key] = value
    return values


def _instead(key: str, value: object) -> str:
    """What a file has in place of ``--no-…``; empty for what is no such flag."""
    flag = FLAGS.get(key.removeprefix("no_"))
    if flag is None or f"--{key.replace('_', '-')}" not in flag.declaration.split("/"):
        return ""
    return f": write '{flag.name}: {'true' if value is False else 'false'}'"


def _convert(name: str, value: object, kind: Any, file: Path | None) -> Any:
    """``file``: where the value is from; None: the command line."""
    is_list = any(typing.get_origin(each) is tuple for each in (kind, *typing.get_args(kind)))
    is_one_alone = is_list and not isinstance(value, list | tuple)
    if is_one_alone:
        value = [value]
    for each in value if isinstance(value, list | tuple) else (value,):
        check_utf8(each, "MODEL" if name == _MODEL_KEY else f"--{name}")
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        place = f"--{name}" if file is None else f"--config: {file}: {name}"
        raise InvalidInputError(f"{place}: {_in_words(str(error), is_one_alone)}", param=name) from error


def _in_words(complaint: str, is_one_alone: bool) -> str:
    """What msgspec says of a value of the wrong type, or of a list; ``is_one_alone``: one that was given without it."""
    found = _WRONG_TYPE.fullmatch(complaint)
    if found is None:
        return complaint[0].lower() + complaint[1:].replace("`", "'")
    wanted = [_TYPES.get(each, each) for each in found["wanted"].split(" | ") if each != "null"]
    got = found["got"]
    entry = "" if is_one_alone or found["index"] is None else f"entry {int(found['index']) + 1}: "
    advice = ": put it in quotes" if wanted == [_TYPES["str"]] and got in _TEXT_IN_QUOTES else ""
    return f"{entry}expected {' or '.join(wanted)}, got {_TYPES.get(got, got)}{advice}"


def _parse_lora_modules(value: object) -> tuple[tuple[str, str], ...]:
    """``name=folder`` or ``{"name": …, "path": …}``, one or a list of them, as text or as YAML has read it."""
    items = value if isinstance(value, list | tuple) else [value]
    modules: dict[str, str] = {}
    for item in items:
        name, folder = _parse_lora_module(item)
        check_utf8(name, "--lora-modules")
        if name in modules:
            raise InvalidInputError(f"--lora-modules: '{name}' is given twice", param="lora-modules")
        with looking_up(folder, "--lora-modules"):
            is_there, path = Path(folder).is_dir(), Path(folder).resolve()
        if not is_there:
            raise InvalidInputError(f"--lora-modules: '{name}': there is no folder {folder}", param="lora-modules")
        check_utf8(path, "--lora-modules")
        modules[name] = str(path)
    return tuple(modules.items())


def _parse_origins(value: object) -> list[object]:
    """One or a list of them; each may be a JSON list itself, which is vLLM's form."""
    origins: list[object] = []
    for item in value if isinstance(value, list | tuple) else [value]:
        if not isinstance(item, str) or not item.lstrip().startswith("["):
            origins.append(item)
            continue
        try:
            origins += json.loads(item)
        except ValueError as error:
            raise InvalidInputError(f"--allowed-origins: not valid JSON: {item}", param="allowed-origins") from error
    return origins


def _check_lora_names(model: ModelConfig, lora: LoraConfig) -> None:
    """Raise InvalidInputError for an adapter under the base model's name, where no request could reach it."""
    for name, _ in lora.modules:
        if name in (model.served_model_names or (model.model,)):
            raise InvalidInputError(f"--lora-modules: '{name}' is the base model's name", param="lora-modules")


def _parse_lora_module(item: object) -> tuple[str, str]:
    if isinstance(item, str) and item.lstrip().startswith("{"):
        try:
            item = json.loads(item)
        except ValueError as error:
            raise InvalidInputError(f"--lora-modules: not valid JSON: {item}", param="lora-modules") from error
    if isinstance(item, dict):
        name, folder = item.get("name"), item.get("path")
    else:
        name, _, folder = str(item).partition("=")
    if not (isinstance(name, str) and name and isinstance(folder, str) and folder):
        raise InvalidInputError(f"--lora-modules: expected NAME=FOLDER, got '{item}'", param="lora-modules")
    return name, folder


def whole_numbers(text: str, flag: str) -> list[int]:
    """Of a list on the command line. Raises InvalidInputError for anything else."""
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise InvalidInputError(f"--{flag}: expected numbers like 1,8,32, got '{text}'", param=flag)
    return numbers


def model_to_measure(
    model: str,
    load_format: str,
    dtype: str,
    device: str,
    quantization: str | None = None,
    compress_weights: str = "auto",
) -> tuple[ModelConfig, int]:
    """For the commands that load a model themselves: what they load, and the tokens that it takes. Raises CotenantError
    for what cannot be loaded."""
    method = None if quantization == _NO_QUANTIZATION else quantization
    chosen = ModelConfig(
        model,
        load_format=load_format,
        dtype=DTYPE_ALIASES.get(dtype, dtype),
        device=device,
        quantization=method,
        compress_weights=compress_weights,
    )
    return chosen, resolve_model(chosen).spec.max_position_embeddings
