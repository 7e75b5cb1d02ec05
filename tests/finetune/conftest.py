from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from cotenant.models.decoder import Decoder
from finetune import support


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
