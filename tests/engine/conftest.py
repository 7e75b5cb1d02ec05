"""A small random Llama, held by transformers and by our decoder, and helpers to run the engine on it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from cotenant.config import BatchConfig, LoraConfig
from cotenant.core.request import AdapterRef, Request, SamplingParams, SequenceOutput
from cotenant.device import Device
from cotenant.engine.engine import OnlineEngine
from cotenant.models.decoder import Decoder
from cotenant.models.loading import load_decoder
from cotenant.models.lora import LoraAdapter, save_adapter
from cotenant.models.registry import ResolvedModel
from cotenant.models.spec import spec_from_config

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

VOCAB_SIZE = 97
EOS = 5


class SmallModel:
    """The model, and what the tests do with it again and again. ``reference`` may lack where nobody asks for
    ``greedy``."""

    def __init__(self, folder: Path, reference: LlamaForCausalLM | None) -> None:
        self.folder = folder
        self.reference = reference
        spec = spec_from_config(json.loads((folder / "config.json").read_text()), None)
        self.decoder: Decoder = load_decoder(
            ResolvedModel("small", folder, spec), torch.device("cpu"), torch.float32, seed=0
        )
        self._numbers = itertools.count()
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def engine(
        self,
        num_pages: int = 200,
        page_tokens: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 256,
        max_loras: int = 2,
        max_cpu_loras: int | None = None,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
        max_pages: int | None = None,
        device: Device | None = None,
        *,
        enable_prefix_caching: bool = True,
    ) -> OnlineEngine:
        return OnlineEngine(
            self.decoder,
            num_pages,
            page_tokens,
            BatchConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens),
            max_model_len,
            LoraConfig(max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_lora_rank=8),
            eos_token_ids,
            device=device,
            max_pages=max_pages,
            enable_prefix_caching=enable_prefix_caching,
            clock=clock,
        )

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        generator = torch.Generator().manual_seed(1000 * length + seed)
        return tuple(torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist())

    def request(
        self,
        prompt: tuple[int, ...],
        max_tokens: int = 10,
        *,
        priority: int = 0,
        adapter: AdapterRef | None = None,
        request_id: str | None = None,
        **sampling: object,
    ) -> Request:
        """A greedy request unless told otherwise; each arrives a second after the one before."""
        number = next(self._numbers)
        params = SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
        return Request(request_id or f"r{number}", prompt, params, float(number), adapter, priority)

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """What transformers generates after ``prompt``."""
        key = (prompt, num_tokens)
        if key not in self._greedy:
            assert self.reference is not None
            ids = torch.tensor([prompt])
            out = self.reference.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
            )
            self._greedy[key] = out[0, len(prompt) :].tolist()
        return self._greedy[key]

    @staticmethod
    def tokens(outputs: list[SequenceOutput]) -> list[int]:
        return [token for output in outputs for token in output.token_ids]

    def run(
        self, engine: OnlineEngine, requests: Iterable[Request] = (), max_steps: int = 2000
    ) -> dict[str, list[SequenceOutput]]:
        """Add the requests, run until nothing is live, with an integrity check after every step."""
        for request in requests:
            engine.add(request)
        outputs: dict[str, list[SequenceOutput]] = {}
        for _ in range(max_steps):
            if not engine.has_work:
                assert engine.kv_cache_usage == 0.0
                return outputs
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
            engine.check_integrity()
        raise AssertionError(f"not finished after {max_steps} steps")

    def make_adapter(self, folder: Path, name: str, seed: int, poison: float | None = None) -> AdapterRef:
        """A random adapter on disk, strong enough to change the text; ``poison`` replaces a row of one weight."""
        adapter = LoraAdapter.trainable(
            self.decoder.spec,
            r=4,
            alpha=8.0,
            target_modules=("q_proj", "v_proj", "down_proj"),
            seed=seed,
            dropout=0.0,
            use_rslora=False,
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for _, b in adapter.weights.values():
                b.copy_(torch.randn(b.shape, generator=generator) * 0.5)
            if poison is not None:
                adapter.weights[0, "v_proj"].b[3] = poison
        save_adapter(adapter, folder / name, "small")
        return AdapterRef(name, str(folder / name))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return make_small(tmp_path_factory.mktemp("small-model"))


@pytest.fixture(scope="module")
def refs(small: SmallModel, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterRef]:
    """Four adapters of the small model."""
    folder = tmp_path_factory.mktemp("adapters")
    return [small.make_adapter(folder, f"adapter-{seed}", seed) for seed in range(4)]


def make_small(folder: Path) -> SmallModel:
    from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds, which who has the folder already need not

    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,  # wide enough that the text is not one token over and over
        eos_token_id=None,
        bos_token_id=None,
    )
    reference = LlamaForCausalLM(config).eval()
    reference.save_pretrained(folder)
    return SmallModel(folder, reference)
