"""Matrix products are tried before they are trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.models.loading import load_decoder
from cotenant.models.product_check import check_products, wrong_share
from cotenant.models.registry import ResolvedModel, read_spec
from cotenant.models.weights import DecoderWeights
from models import support


@pytest.fixture
def weights(llama: support.Pair) -> DecoderWeights:
    resolved = ResolvedModel("llama", llama.folder, read_spec(llama.folder))
    return load_decoder(resolved, support.CPU, torch.bfloat16, seed=0).weights


def leaving_out(monkeypatch: pytest.MonkeyPatch, from_rows: int) -> None:
    """From so many rows on, products do not write a tile of 16 columns."""
    right = torch.mm

    def product(x: torch.Tensor, matrix: torch.Tensor, *, out: torch.Tensor) -> None:
        columns = slice(16, None) if len(x) >= from_rows else slice(0, None)
        out[:, columns] = right(x, matrix)[:, columns]

    monkeypatch.setattr(torch, "mm", product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_rows", "num_out", "num_in"), [(1, 64, 32), (50, 100, 4096), (512, 48, 14336)])
def test_what_is_right_passes(num_rows: int, num_out: int, num_in: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert wrong_share(torch.randn(num_rows, num_in, dtype=dtype), torch.randn(num_out, num_in, dtype=dtype)) == 0.0


def test_what_was_not_written_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    leaving_out(monkeypatch, from_rows=33)
    x, weight = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(160, 128, dtype=torch.bfloat16)
    assert wrong_share(x[:32], weight) == 0.0
    assert wrong_share(x, weight) == pytest.approx(0.1)


def test_a_wrong_sum_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a part of the inputs is left out."""
    right = torch.mm

    def product(x: torch.Tensor, matrix: torch.Tensor, **into: Any) -> torch.Tensor:
        return right(x[:, :-16], matrix[:-16], **into)

    monkeypatch.setattr(torch, "mm", product)
    assert wrong_share(torch.randn(64, 128), torch.randn(160, 128)) > 0.5


def test_a_model_is_not_served_with_wrong_products(weights: DecoderWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    check_products(weights)
    leaving_out(monkeypatch, from_rows=512)
    with pytest.raises(InvalidInputError, match=r"wrong on this device: .* with 512 rows .* CUDA_MPS_ACTIVE_THREAD"):
        check_products(weights)
