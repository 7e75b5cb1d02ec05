"""Tests that need an NVIDIA GPU; skipped where there is none. And the model and the engine that several files test."""

from __future__ import annotations

import pytest
import torch

from gpu import support
from gpu.engine_runs import GRAPH_SIZES, PAGE_TOKENS
from gpu.support import Model, Overlapped, logits_of, prompt


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "tests/gpu" in str(item.path):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return support.make_model("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def rounding(model: Model) -> float:
    """The largest error of a logit of transformers in bfloat16."""
    texts = [prompt(200, seed) for seed in range(4)]
    theirs = model.reference_in(torch.bfloat16)
    return max(float((logits_of(theirs, text) - logits_of(model.reference, text)).abs().max()) for text in texts)


@pytest.fixture(scope="module")
def online(model: Model) -> Overlapped:
    """Without prefix caching, so that the same requests make the same batches again. 512 pages in chunks of 32."""
    online = Overlapped(model.decoder(torch.bfloat16), enable_prefix_caching=False, page_tokens=PAGE_TOKENS)
    online.capture(GRAPH_SIZES)
    online.engine.wait_for_kernels()  # prompts go through other ones from then on
    return online
