"""Small random models whose heads the fused attention takes, the engine that runs them as the worker does, and
transformers beside it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.request import Request, SamplingParams, SequenceOutput
from cotenant.device import create_device
from cotenant.engine.engine import OnlineEngine
from cotenant.engine.flight import Collected, OnlineStep
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.registry import ResolvedModel, read_spec
from cotenant.models.spec import ModelSpec

DEVICE = torch.device("cuda")
VOCAB_SIZE = 1024
WINDOW = 48

_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.05,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}

# One of each family. FlashInfer compiles for each head_dim, dtype, and window or none.
MODELS: dict[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": _LLAMA3_ROPE, "head_dim": 128}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": WINDOW, "head_dim": 128}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"num_attention_heads": 8, "tie_word_embeddings": True}),  # 64 wide
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_attention_heads": 8, "head_dim": 128}),
    "narrow": (LlamaConfig, LlamaForCausalLM, {"head_dim": 80}),  # which no kernel has: they lie in rows of 128
}

ONE_ADAPTER = LoraConfig(max_loras=1, max_lora_rank=16)
_names = itertools.count()


@dataclass(frozen=True)
class Model:
    """A model in a folder, and in transformers in float32 on the device."""

    folder: Path
    reference: PreTrainedModel

    @property
    def spec(self) -> ModelSpec:
        return read_spec(self.folder)

    def decoder(self, dtype: torch.dtype, *, compress: bool = False) -> Decoder:
        resolved = ResolvedModel(self.folder.name, self.folder, self.spec)
        return load_decoder(resolved, DEVICE, dtype, seed=0, compress=compress)

    def reference_in(self, dtype: torch.dtype) -> PreTrainedModel:
        reference: PreTrainedModel = type(self.reference).from_pretrained(self.folder, dtype=dtype).to(DEVICE).eval()
        return reference


def make_model(name: str, folder: Path, seed: int = 0) -> Model:
    """Norms and biases are random too. All weights are numbers of bfloat16, so what differs in half precision is the
    arithmetic alone."""
    config_class, model_class, options = MODELS[name]
    torch.manual_seed(seed)
    reference = model_class(config_class(**(_SHAPE | options))).eval()
    with torch.no_grad():
        for parameter_name, parameter in reference.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (1.0 if "norm" in parameter_name else 0.0))
            parameter.copy_(parameter.bfloat16())
    reference.save_pretrained(folder)
    return Model(folder, reference.to(DEVICE))


@torch.no_grad()
def logits_of(reference: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocab] of one sequence, as float32."""
    logits: torch.Tensor = reference(torch.tensor([list(token_ids)], device=DEVICE)).logits[0]
    return logits.float()


def prompt(length: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return tuple(torch.randint(0, vocab_size, (length,), generator=generator).tolist())


def request(prompt: Sequence[int], max_tokens: int, **sampling: Any) -> Request:
    """A greedy request unless told otherwise; each arrives a second after the one before."""
    number = next(_names)
    params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, "ignore_eos": True, **sampling})
    return Request(f"r{number}", tuple(prompt), params, float(number))


Outputs = dict[str, list[SequenceOutput]]


def tokens(outputs: Iterable[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def logprobs(outputs: Iterable[SequenceOutput]) -> list[float]:
    """The log-probabilities of the chosen tokens."""
    return [entry.logprob for output in outputs for entry in output.logprobs]


class Overlapped:
    """An engine on the device, each batch launched before the one before it is collected."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_pages: int = 512,
        page_tokens: int = 16,
        max_num_seqs: int = 16,
        max_num_batched_tokens: int = 96,
        max_model_len: int = 256,
        enable_prefix_caching: bool = True,
        lora: LoraConfig = ONE_ADAPTER,
    ) -> None:
        self.device = create_device(DEVICE.type)
        with self.device.online():
            self.engine = OnlineEngine(
                decoder,
                num_pages,
                page_tokens,
                BatchConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
                max_model_len,
                lora,
                (),
                device=self.device,
                enable_prefix_caching=enable_prefix_caching,
            )
        self.steps: list[OnlineStep] = []  # all that were launched
        self.collected: list[Collected] = []

    def capture(self, sizes: Sequence[int], lanes: Sequence[int] = ()) -> None:
        """Graphs for these decode batches, and those for prompts."""
        with self.device.online():
            self.engine.warm_up(tuple(sizes), tuple(lanes))

    @property
    def runner(self) -> Any:
        """The engine's, which must be the fast one."""
        from cotenant.engine.cuda_runner import CudaRunner

        runner = self.engine._runner
        assert isinstance(runner, CudaRunner)
        return runner

    def iterate(self) -> list[SequenceOutput]:
        """One iteration: what was collected in it."""
        with self.device.online():
            iterated = self.engine.iterate(num_ahead=1)
        if iterated.launched is not None:
            self.steps.append(iterated.launched)
        self.collected += iterated.collected
        return iterated.outputs

    def run(self, requests: Sequence[Request] = (), at_once: int = 3) -> Outputs:
        """To the end, with ``at_once`` of the requests added before each iteration."""
        outputs: Outputs = {one.request_id: [] for one in requests}
        for index in itertools.count():
            for one in requests[index * at_once : (index + 1) * at_once]:
                self.engine.add(one)
            if not self.engine.has_work:
                break
            for output in self.iterate():
                outputs.setdefault(output.request_id, []).append(output)
            self.engine.check_integrity()
        assert self.engine.kv_cache_usage == 0
        return outputs
