"""A small Llama, one thread for its products, and jobs with the layers that GPUs capture."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from cotenant.device import Device, create_device
from cotenant.finetune import activations
from cotenant.finetune.job import TrainingJob
from cotenant.models.decoder import Decoder
from finetune import support
from finetune.captured_layers import CHUNK_BYTES, VALIDATION, Make


def save_llama(
    folder: Path, max_positions: int = 256, vocab_size: int = support.VOCAB_SIZE, num_layers: int = 3
) -> None:
    """A random Llama with weights large enough for gradients that matter, saved in ``folder``."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        max_position_embeddings=max_positions,
        initializer_range=0.15,
        tie_word_embeddings=False,
        eos_token_id=2,
        bos_token_id=1,
    )
    model = transformers.LlamaForCausalLM(config).float().eval()
    model.save_pretrained(folder)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_llama(folder)
    return folder


@pytest.fixture(scope="session")
def decoder(model_folder: Path) -> Decoder:
    return support.load(model_folder)


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Make:
    """Makes jobs whose layers are those that GPUs capture."""

    def make(
        decoder: Decoder,
        folder: Path,
        *,
        free_bytes: int | None = None,
        device: Device | None = None,
        chunk_bytes: int = CHUNK_BYTES,
        validation: support.Examples | None = VALIDATION,
        **changes: object,
    ) -> TrainingJob:
        monkeypatch.setattr(activations, "can_capture", lambda *_: True)
        monkeypatch.setattr(activations, "CHUNK_BYTES", chunk_bytes)
        changes = changes if validation is None else {"eval_steps": 3, **changes}
        spec = support.make_spec(folder, validation=validation, **changes)
        return support.make_job(decoder, spec, device=device or create_device("cpu"), free_bytes=free_bytes)

    return make
