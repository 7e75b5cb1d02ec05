"""The whole configuration of a server, as frozen dataclasses checked on construction.

Environment variables are read here and nowhere else.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path

from cotenant.core.errors import InvalidInputError
from cotenant.core.plan import Slo

POLICIES = (
    "adaptive",
    "multitask",
    "harli",
    "llmstation",
    "static",
    "chunked",
    "temporal",
    "lifecycle",
    "fineinfer",
    "whole-step",
    "inference-only",
)
DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPE_ALIASES = {"float": "float32", "half": "float16"}  # vLLM's, on the command line
LOAD_FORMATS = ("auto", "dummy")
MAX_LORA_RANK = 512
LEAST_MODEL_LEN = 16
COMPRESS_WEIGHTS = ("auto", "off", "on")
QUANTIZATIONS = ("fp8",)
DEVICES = ("auto", "cpu", "cuda")
LOG_LEVELS = ("debug", "info", "warning", "error")
DEFAULT_DATA_DIR = Path("cotenant-data")
_API_KEY_VARIABLE = "COTENANT_API_KEY"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s]+")
_LONGEST_TARGET_MS = 1e9  # eleven days: times that are counted from it stay whole numbers of tokens
_LONGEST_TIMEOUT_S = 1e6  # eleven days
# Far beyond what a machine holds: what is more is a slip, which counters of 64 bits would notice deep in the worker.
_MOST_SEQS = _MOST_LORAS = 1 << 16
_MOST_CPU_LORAS = 1 << 20
_MOST_PAGES = 1 << 31
# (sequences, tokens) of a batch, by the device's type.
_BATCH_LIMITS = {"cuda": (256, 4096), "cpu": (64, 512)}


def _require(condition: bool, flag: str, problem: str) -> None:
    if not condition:
        raise InvalidInputError(f"--{flag}: {problem}", param=flag)


def is_plain(text: str) -> bool:
    """Whether it is printable, without spaces around it, so that it is what it looks like."""
    return text.isprintable() and text == text.strip()


def check_api_key(key: str) -> None:
    """Raise InvalidInputError for a key that no header carries as it is."""
    _require(is_plain(key), "api-key", f"a key (or {_API_KEY_VARIABLE}) is printable text without spaces around it")


def require_target(value_ms: float | None, flag: str) -> None:
    """Raise InvalidInputError for what is no latency to aim at; None: the default."""
    # The worker gets the configuration as JSON, in which what is not finite would be null, which is the default.
    is_target = value_ms is None or 0 < value_ms <= _LONGEST_TARGET_MS
    _require(is_target, flag, "must be above 0 and at most 1e9; leave it out for the default")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Which model, and how it is loaded. ``max_model_len`` None: what the model's own configuration allows.
    ``quantization`` None: weights stay in ``dtype``. ``compress_weights``: whether decode steps read copies of the
    matrices that are compressed without loss; "auto": where that can be done and takes little of the memory.
    ``eos_token_ids`` end an answer beside those that the model's own files name: the tokenizer's, which the server
    fills in for its worker, who has no tokenizer."""

    model: str
    served_model_names: tuple[str, ...] = ()
    load_format: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    compress_weights: str = "auto"
    device: str = "auto"
    max_model_len: int | None = None
    chat_template: str | None = None
    seed: int = 0
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names_are_given = all(name.strip() for name in self.served_model_names)
        _require(names_are_given, "served-model-name", "must not be empty; leave it out for the model's own")
        _require(self.load_format in LOAD_FORMATS, "load-format", f"must be one of {', '.join(LOAD_FORMATS)}")
        _require(self.dtype in DTYPES, "dtype", f"must be one of {', '.join(DTYPES)}")
        _require(
            self.quantization is None or self.quantization in QUANTIZATIONS,
            "quantization",
            f"must be none or one of {', '.join(QUANTIZATIONS)}",
        )
        _require(
            self.compress_weights in COMPRESS_WEIGHTS,
            "compress-weights",
            f"must be one of {', '.join(COMPRESS_WEIGHTS)}",
        )
        _require(self.device in DEVICES, "device", f"must be one of {', '.join(DEVICES)}")
        is_enough = self.max_model_len is None or self.max_model_len >= LEAST_MODEL_LEN
        _require(is_enough, "max-model-len", f"must be at least {LEAST_MODEL_LEN}")
        _require(abs(self.seed) < 1 << 63, "seed", "must be a number of 64 bits")

    @property
    def name(self) -> str:
        """The first name the base model is served under."""
        return self.served_model_names[0] if self.served_model_names else self.model


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The KV cache. ``num_pages`` None: from ``gpu_memory_utilization`` (CUDA) or ``cpu_cache_bytes`` (CPU).
    ``enable_prefix_caching``: full pages of a prompt are used again by prompts that begin alike."""

    page_tokens: int = 16
    num_pages: int | None = None
    gpu_memory_utilization: float = 0.85
    cpu_cache_bytes: int = 1 << 30
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        _require(self.page_tokens in (1, 2, 4, 8, 16, 32, 64, 128), "page-tokens", "must be a power of 2 up to 128")
        _require(0 < self.gpu_memory_utilization <= 1, "gpu-memory-utilization", "must be in (0, 1]")
        are_possible = self.num_pages is None or 2 <= self.num_pages <= _MOST_PAGES
        _require(are_possible, "num-pages", f"must be at least 2 and at most {_MOST_PAGES}")


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """Limits on an online batch and on the queue before it. ``max_queue``: live requests beyond which 503.

    ``max_num_seqs`` and ``max_num_batched_tokens`` 0: chosen for the device by ``resolved``. ``cuda_graph_sizes``:
    batch sizes that decode graphs are captured for; empty: chosen by the server. ``enforce_eager``: no graphs.
    """

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_queue: int = 512
    enforce_eager: bool = False
    cuda_graph_sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _require(
            0 <= self.max_num_seqs <= _MOST_SEQS,
            "max-num-seqs",
            f"must be at least 1 and at most {_MOST_SEQS}, or 0 for the device's default",
        )
        _require(
            self.max_num_batched_tokens >= 0,
            "max-num-batched-tokens",
            "must be at least 1, or 0 for the device's default",
        )
        _require(
            self.max_num_batched_tokens == 0 or self.max_num_batched_tokens >= self.max_num_seqs,
            "max-num-batched-tokens",
            "must be at least --max-num-seqs",
        )
        _require(self.max_queue >= 1, "max-queue", "must be at least 1")
        _require(all(size >= 1 for size in self.cuda_graph_sizes), "cuda-graph-sizes", "must be at least 1 each")

    def resolved(self, device_type: str) -> BatchConfig:
        """The same with no limit left open, for a device of this type (``cuda``, ``cpu``).

        256 sequences and 4,096 tokens on CUDA, 64 and 512 elsewhere; where only one of the two is given, the other
        follows it so far that it fits.
        """
        num_seqs, num_tokens = _BATCH_LIMITS.get(device_type, _BATCH_LIMITS["cpu"])
        if self.max_num_batched_tokens:
            num_seqs = min(num_seqs, self.max_num_batched_tokens)
        num_seqs = self.max_num_seqs or num_seqs
        num_tokens = self.max_num_batched_tokens or max(num_tokens, num_seqs)
        return replace(self, max_num_seqs=num_seqs, max_num_batched_tokens=num_tokens)


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """Adapters. ``modules``: (name, path) pairs served from the start. Up to ``max_loras`` live on the device, and up
    to ``max_cpu_loras`` are kept in host memory (None: chosen by the server)."""

    max_loras: int = 8
    max_cpu_loras: int | None = None
    max_lora_rank: int = 64
    modules: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _require(1 <= self.max_loras <= _MOST_LORAS, "max-loras", f"must be between 1 and {_MOST_LORAS}")
        _require(
            self.max_cpu_loras is None or self.max_loras <= self.max_cpu_loras <= _MOST_CPU_LORAS,
            "max-cpu-loras",
            f"must be at least --max-loras and at most {_MOST_CPU_LORAS}",
        )
        for name, _ in self.modules:
            problem = f"{name!r} is no adapter's name: it has to be printable text without spaces around it"
            _require(bool(name) and is_plain(name), "lora-modules", problem)
        is_taken = 1 <= self.max_lora_rank <= MAX_LORA_RANK
        _require(is_taken, "max-lora-rank", f"must be between 1 and {MAX_LORA_RANK}")


@dataclass(frozen=True, slots=True)
class CoExecutionConfig:
    """How the two tenants share the device. A target of None: four times the model's own median, measured at start
    on the CPU; 500 ms and 40 ms on CUDA.

    ``tasklet_tokens``: training tokens per micro-batch at most (None: 256 on the CPU, about 2,048 on CUDA). ``fuse``
    None: on CUDA only. ``sm_shares``: of a GPU's SMs, that batches may have while training runs on the others (None:
    what the policy wants; empty: none). ``policies``: those that take turns on one engine (empty: ``policy`` alone).
    ``self_profile``: measure in idle time what the predictor lacks (None: on CUDA only).
    """

    policy: str = "adaptive"
    slo_ttft_ms: float | None = None
    slo_tpot_ms: float | None = None
    slo_itl_ms: float | None = None
    slo_attainment: float = 0.99
    tasklet_tokens: int | None = None
    fuse: bool | None = None
    sm_shares: tuple[float, ...] | None = None
    policies: tuple[str, ...] = ()
    self_profile: bool | None = None

    def __post_init__(self) -> None:
        _require(self.policy in POLICIES, "policy", f"must be one of {', '.join(POLICIES)}")
        require_target(self.slo_ttft_ms, "slo-ttft-ms")
        require_target(self.slo_tpot_ms, "slo-tpot-ms")
        require_target(self.slo_itl_ms, "slo-itl-ms")
        _require(0 < self.slo_attainment < 1, "slo-attainment", "must be above 0 and below 1")
        _require(self.tasklet_tokens is None or self.tasklet_tokens >= 16, "tasklet-tokens", "must be at least 16")
        _require(all(0 < share < 1 for share in self.sm_shares or ()), "sm-shares", "must be above 0 and below 1")

    @property
    def trains(self) -> bool:
        """Whether jobs ever run under this policy."""
        return self.policy != "inference-only"

    def slo(self, default: Slo) -> Slo:
        return Slo(
            self.slo_ttft_ms or default.ttft_ms,
            self.slo_tpot_ms or default.tpot_ms,
            self.slo_itl_ms,
            self.slo_attainment,
        )


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """The HTTP side. ``api_key`` empty: no key is asked for. ``allowed_origins``: of web pages whose scripts may read
    answers; "*" for all. ``worker_timeout_s``: a worker that says nothing for so long is taken for one that hangs; 0:
    none is."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = field(default="", repr=False)
    max_upload_bytes: int = 512 * 1024 * 1024
    allowed_origins: tuple[str, ...] = ()
    organization: str = "local"
    worker_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        check_api_key(self.api_key)
        _require(bool(self.host.strip()), "host", "is empty; leave it out for 127.0.0.1, or give 0.0.0.0 for all")
        _require(0 <= self.port <= 65535, "port", "must be between 0 and 65535")
        _require(self.max_upload_bytes >= 1024, "max-upload-bytes", "must be at least 1024")
        is_time = 0 <= self.worker_timeout_s <= _LONGEST_TIMEOUT_S
        _require(is_time, "worker-timeout", f"must be between 0, which is no limit, and {_LONGEST_TIMEOUT_S:.0f}")
        for origin in self.allowed_origins:
            is_one = origin == "*" or _ORIGIN.fullmatch(origin) is not None
            _require(
                is_one, "allowed-origins", f"must be * or like https://example.org, without a path, not {origin!r}"
            )


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything that `cotenant serve` needs; the worker gets the same object as JSON."""

    model: ModelConfig
    cache: CacheConfig = CacheConfig()
    batch: BatchConfig = BatchConfig()
    lora: LoraConfig = LoraConfig()
    coexecution: CoExecutionConfig = CoExecutionConfig()
    api: ApiConfig = ApiConfig()
    data_dir: str = str(DEFAULT_DATA_DIR)
    log_level: str = "info"
    trace_file: str | None = None

    def __post_init__(self) -> None:
        _require(self.log_level in LOG_LEVELS, "log-level", f"must be one of {', '.join(LOG_LEVELS)}")


def api_key_from_environment() -> str:
    """``COTENANT_API_KEY``, or an empty string: a variable that is empty counts as one that is not set."""
    return os.environ.get(_API_KEY_VARIABLE, "")


def child_environment() -> dict[str, str]:
    """The environment for processes of ours: everything but the API key, which they have no use for."""
    return {name: value for name, value in os.environ.items() if name != _API_KEY_VARIABLE}
