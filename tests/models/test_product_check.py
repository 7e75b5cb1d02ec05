"""Matrix products are tried before they are trusted."""

from __future__ import annotations

from collections.abc import Callable
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


def leaving_out(
    monkeypatch: pytest.MonkeyPatch, rows: slice, columns: slice, *, of: Callable[[torch.Tensor], bool]
) -> None:
    """Products of such a result do not write a part of it."""
    right = torch.mm

    def product(x: torch.Tensor, matrix: torch.Tensor, *, out: torch.Tensor) -> None:
        is_written = torch.ones(out.shape, dtype=torch.bool)
        is_written[rows, columns] = not of(out)
        out[is_written] = right(x, matrix)[is_written]

    monkeypatch.setattr(torch, "mm", product)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_rows", "num_out", "num_in"), [(16, 64, 32), (50, 100, 4096), (512, 48, 14336)])
@pytest.mark.parametrize("scale", [1.0, 1e-7, 0.0])
def test_what_is_right_passes(num_rows: int, num_out: int, num_in: int, scale: float, dtype: torch.dtype) -> None:
    """In fp16 the smallest are multiples of the least number that there is."""
    torch.manual_seed(0)
    weight = torch.randn(num_out, num_in, dtype=dtype) * scale
    assert wrong_share(torch.randn(num_rows, num_in, dtype=dtype), weight) == 0.0


def test_what_no_number_says_is_not_judged() -> None:
    """A weight that is not a number, and sums beyond the dtype's largest, are not the library's fault."""
    torch.manual_seed(0)
    x, weight = torch.randn(64, 128, dtype=torch.float16), torch.randn(160, 128, dtype=torch.float16)
    weight[3, 5], weight[80, 100] = torch.nan, torch.inf
    weight[90] *= 1e4
    assert wrong_share(x, weight) == 0.0


@pytest.mark.parametrize(
    ("rows", "share"), [(slice(None), 0.1), (slice(40, 41), 1 / 640), (slice(41, 42), 1 / 640)], ids=str
)
def test_what_was_not_written_is_wrong_in_any_row(rows: slice, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    leaving_out(monkeypatch, rows, slice(0, 16), of=lambda out: len(out) > 32)
    x, weight = torch.randn(64, 128, dtype=torch.bfloat16), torch.randn(160, 128, dtype=torch.bfloat16)
    assert wrong_share(x[:32], weight) == 0.0
    assert wrong_share(x, weight) >= share


def test_a_wrong_sum_is_wrong_whatever_other_columns_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a part of the inputs is left out."""
    right = torch.mm

    def product(x: torch.Tensor, matrix: torch.Tensor, **into: Any) -> torch.Tensor:
        return right(x[:, :-16], matrix[:-16], **into)

    monkeypatch.setattr(torch, "mm", product)
    weight = torch.randn(160, 128)
    weight[7] *= 1e4
    assert wrong_share(torch.randn(64, 128), weight) > 0.5


@pytest.mark.parametrize("num_rows", [16, 64, 512])
@pytest.mark.parametrize("matrix", ["qkv", "down", "head"])
def test_a_model_is_not_served_with_wrong_products(
    matrix: str, num_rows: int, weights: DecoderWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_products(weights)
    num_out = len(weights.head if matrix == "head" else getattr(weights.layers[0], matrix).weight)
    leaving_out(monkeypatch, slice(None), slice(0, 16), of=lambda out: out.shape == (num_rows, num_out))
    with pytest.raises(InvalidInputError, match=rf"wrong on this device: .* with {num_rows} rows .* CUDA_MPS_ACTIVE"):
        check_products(weights)
