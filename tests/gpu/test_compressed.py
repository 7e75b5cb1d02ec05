"""Products with compressed matrices are products with the matrices."""

from __future__ import annotations

import pytest
import torch

from cotenant.models.compressed import compress, decompress
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.skinny_tiling import sms_at_hand

CUDA = torch.device("cuda")
SHAPES = [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 1024), (384, 256)]


def _base(shape: tuple[int, int], *, has_bias: bool = False) -> FusedLinear:
    weight = torch.randn(shape, device=CUDA, dtype=torch.bfloat16) * shape[1] ** -0.5
    weight.view(-1)[:: weight.numel() // 31] = 0.0  # which no code stands for
    bias = torch.randn(shape[0], device=CUDA, dtype=torch.bfloat16) if has_bias else None
    compressed = compress(weight)
    assert compressed is not None
    return FusedLinear((), (), weight, bias, compressed)


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_product(shape: tuple[int, int], num_rows: int) -> None:
    """Finished or not, with a bias or without; and of each weight by itself exactly what it is."""
    from cotenant.models.kernels.skinny import skinny_product, unfinished_product

    for has_bias in (False, True):
        base = _base(shape, has_bias=has_bias)
        assert base.compressed is not None
        x = torch.randn(num_rows, shape[1], device=CUDA, dtype=torch.bfloat16)
        exact = torch.nn.functional.linear(x.double(), base.weight.double())
        finished = skinny_product(x, base.compressed, None)
        torch.testing.assert_close(finished.double(), exact, atol=2e-2, rtol=2e-2)
        sums, _, delta = unfinished_product(x, base, None)
        assert delta is None
        if base.bias is not None:
            exact = exact + base.bias.double()
        torch.testing.assert_close(sums.double().sum(0), exact, atol=2e-2, rtol=2e-2)
        depths = torch.randint(shape[1], (num_rows,), device=CUDA)
        one = torch.zeros_like(x)
        one[torch.arange(num_rows), depths] = 1.0
        assert torch.equal(skinny_product(one, base.compressed, None), base.weight[:, depths].T)


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_in_any_company_and_on_any_sms(shape: tuple[int, int]) -> None:
    from cotenant.models.kernels.skinny import unfinished_product

    base = _base(shape)
    x = torch.randn(64, shape[1], device=CUDA, dtype=torch.bfloat16)
    whole = unfinished_product(x, base, None).sums
    for num_rows in (1, 15, 32, 33):
        assert torch.equal(unfinished_product(x[:num_rows].contiguous(), base, None).sums, whole[:, :num_rows])
    for count in (8, 16, 32, 48, 64, 96):
        with sms_at_hand(count):
            assert torch.equal(unfinished_product(x, base, None).sums, whole), count


def test_the_device_compresses_as_the_host_does() -> None:
    weight = _base((384, 256)).weight
    there, here = compress(weight), compress(weight.cpu())
    assert there is not None
    assert here is not None
    assert there.base == here.base
    assert all(torch.equal(getattr(there, name).cpu(), getattr(here, name)) for name in ("blocks", "places", "values"))
    assert torch.equal(decompress(there), weight)
