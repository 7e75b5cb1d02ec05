"""The kernels of a decode step give what plain torch operations give."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cotenant.models.fused_linear import FusedLinear
from cotenant.models.products import product

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]


def _close(ours: torch.Tensor, exact: torch.Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, atol=2e-2, rtol=2e-2)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_rows", [1, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 1024), (384, 256)], ids=str)
def test_a_product_of_a_few_rows(shape: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    """Finished or not, with a bias or without."""
    from cotenant.models.kernels.skinny import fits_unfinished, unfinished_product

    num_out, num_in = shape
    x = torch.randn(num_rows, num_in, device=CUDA, dtype=dtype)
    weight = torch.randn(num_out, num_in, device=CUDA, dtype=dtype) * num_in**-0.5
    for bias in (None, torch.randn(num_out, device=CUDA, dtype=dtype)):
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        _close(product(x, weight, bias), exact)
        base = FusedLinear((), (), weight, bias)
        assert fits_unfinished(x, base)
        sums, _, delta = unfinished_product(x, base, None)
        assert delta is None
        _close(sums.double().sum(0), exact)
    out = torch.empty(num_rows, num_out, device=CUDA, dtype=dtype)
    assert product(x, weight, out=out) is out
    _close(out, F.linear(x.double(), weight.double()))


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 32, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (4096, 14336), (28672, 1024), (384, 256)], ids=str)
def test_a_product_is_the_same_however_many_sms_it_is_cut_for(shape: tuple[int, int], num_rows: int) -> None:
    from cotenant.models.kernels.skinny import unfinished_product
    from cotenant.models.skinny_tiling import sms_at_hand

    num_out, num_in = shape
    x = torch.randn(num_rows, num_in, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(num_out, num_in, device=CUDA, dtype=torch.bfloat16) * num_in**-0.5
    base = FusedLinear((), (), weight)
    whole = unfinished_product(x, base, None).sums
    for count in (8, 16, 24, 32, 40, 48, 64, 80, 96):
        with sms_at_hand(count):
            assert torch.equal(unfinished_product(x, base, None).sums, whole), count


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", [1, 17, 33])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 14336)], ids=str)
def test_a_product_by_tma_has_the_bits_of_one_by_copies_of_the_threads(shape: tuple[int, int], num_rows: int) -> None:
    """Rows that its tiles have beyond the input's count as zeros, whatever lies there."""
    from cotenant.models.kernels import skinny
    from cotenant.models.skinny_tiling import choose_tiling

    num_out, num_in = shape
    every = skinny.multiprocessors(CUDA)
    if not every.are_large:
        pytest.skip("needs TMA")
    beyond = torch.full((64, num_in), torch.nan, device=CUDA, dtype=torch.bfloat16)
    x = beyond[:num_rows].normal_()
    weight = torch.randn(num_out, num_in, device=CUDA, dtype=torch.bfloat16) * num_in**-0.5
    for count in (16, 32, 48, 64, every.num):
        tiling = choose_tiling(num_rows, num_out, num_in, every._replace(num=count))
        assert tiling is not None
        assert tiling.by_tma
        by_tma, by_threads = (torch.zeros(tiling.splits, num_rows, num_out, device=CUDA) for _ in range(2))
        skinny._launch(x, weight, None, by_tma, tiling, None)
        skinny._launch(x, weight, None, by_threads, tiling._replace(by_tma=False), None)
        _close(by_tma.double().sum(0), F.linear(x.double(), weight.double()))
        assert torch.equal(by_tma, by_threads), tiling


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 3])
def test_norm_and_silu_finish_a_product_first(splits: int, dtype: torch.dtype) -> None:
    """The same bits as with the finished product."""
    from cotenant.models.kernels.elementwise import add_rms_norm, silu_and_multiply
    from cotenant.models.kernels.skinny import Unfinished

    sums = torch.randn(splits, 9, 1536, device=CUDA)
    unfinished = Unfinished(sums if splits > 1 else sums.to(dtype), dtype)
    finished = (sums[0] + sums[1] + sums[2] if splits > 1 else sums[0]).to(dtype)
    residual, weight = torch.randn(9, 1536, device=CUDA, dtype=dtype), torch.rand(1536, device=CUDA, dtype=dtype)
    ours, theirs = residual.clone(), residual.clone()
    normed = add_rms_norm(unfinished, ours, weight, 1e-5)
    assert torch.equal(normed, add_rms_norm(finished, theirs, weight, 1e-5))
    assert torch.equal(ours, theirs)
    assert torch.equal(ours, residual + finished)
    _close(normed, F.rms_norm(ours.double(), (1536,), weight.double(), 1e-5))
    activated = silu_and_multiply(unfinished)
    assert torch.equal(activated, silu_and_multiply(finished))
    gate, up = finished.double().chunk(2, dim=1)
    _close(activated, F.silu(gate) * up)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("num_rows", [5, 64])
@pytest.mark.parametrize(("head_dim", "width"), [(64, 64), (40, 64)])
def test_rope_finishes_a_product_first(
    head_dim: int, width: int, num_rows: int, splits: int, dtype: torch.dtype
) -> None:
    """And leaves zeros behind heads that are narrower than their room in the cache."""
    from cotenant.models.kernels.rope import rope_and_cache
    from cotenant.models.kernels.skinny import Unfinished

    num_heads, num_kv_heads = 6, 2
    sums = torch.randn(splits, num_rows, (num_heads + 2 * num_kv_heads) * head_dim, device=CUDA)
    unfinished = Unfinished(sums if splits > 1 else sums.to(dtype), dtype)
    finished = (sums[0] + sums[1] if splits > 1 else sums[0]).to(dtype)
    positions = torch.arange(num_rows, dtype=torch.int32, device=CUDA) * 3 % 100
    angles = torch.outer(torch.arange(100, device=CUDA), torch.linspace(1, 0.01, head_dim // 2, device=CUDA))
    table = torch.cat([angles.cos(), angles.sin()], dim=1).to(dtype)
    places = torch.arange(num_rows, dtype=torch.int32, device=CUDA)
    places[1] = -1
    caches = [torch.zeros(4, 2, 16, num_kv_heads, width, device=CUDA, dtype=dtype) for _ in range(2)]
    query, same = (
        rope_and_cache(qkv, positions, places, table, None, cache, num_heads, 1e-5)
        for qkv, cache in zip((unfinished, finished), caches, strict=True)
    )
    assert torch.equal(query, same)
    assert torch.equal(*caches)
    assert not query[..., head_dim:].any()
    assert not caches[0][..., head_dim:].any()
    query, cache = query[..., :head_dim], caches[0][..., :head_dim]
    heads = finished.double().view(num_rows, -1, head_dim)
    cos, sin = table.double()[positions.long()].unsqueeze(1).chunk(2, dim=-1)
    low, high = heads[:, : num_heads + num_kv_heads].chunk(2, dim=-1)
    rotated = torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1)
    _close(query, rotated[:, :num_heads])
    keys, values = (cached.flatten(0, 1)[:num_rows] for cached in cache.unbind(1))
    kept = places >= 0
    _close(keys[kept], rotated[kept, num_heads:])
    _close(values[kept], heads[kept, num_heads + num_kv_heads :])
    assert not keys[~kept].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocab", [50, 32000, 128256])
def test_cross_entropy_leaves_its_gradient_in_place_of_the_logits(vocab: int, dtype: torch.dtype) -> None:
    from cotenant.models.kernels.cross_entropy import cross_entropy_in_place

    logits = (torch.randn(33, vocab, device=CUDA) * 3).to(dtype)
    targets = torch.randint(0, vocab, (33,), device=CUDA)
    targets[:5] = logits[:5].argmax(dim=1)
    scales = torch.rand(33, device=CUDA)
    wide = logits.float().requires_grad_()
    expected = F.cross_entropy(wide, targets, reduction="none")
    (gradient,) = torch.autograd.grad((expected * scales).sum(), wide)
    is_likeliest = logits.argmax(dim=1) == targets
    losses, correct = cross_entropy_in_place(logits, targets, scales)
    torch.testing.assert_close(losses, expected.detach(), atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(logits.float(), gradient, atol=1e-2 if dtype != torch.float32 else 1e-6, rtol=1e-2)
    assert torch.equal(correct, is_likeliest)


@torch.inference_mode()
def test_kernels_compiled_together_are_those_that_launches_need() -> None:
    from triton import knobs

    from cotenant.models.kernels import skinny
    from cotenant.models.kernels.elementwise import rms_norm, silu_and_multiply
    from cotenant.models.kernels.together import compiled_together
    from cotenant.models.skinny_tiling import Tiling

    # Nothing chooses two stages.
    tiling = Tiling(16, 64, 64, 1, 4, 2, by_tma=skinny.multiprocessors(CUDA).are_large)

    def multiplied(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty(1, len(x), len(weight), device=CUDA, dtype=x.dtype)
        skinny._launch(x[:, :8192].contiguous(), weight, None, out, tiling, None)
        return out

    def run() -> tuple[torch.Tensor, ...]:
        return tuple(
            result
            for x in (narrow, wide)
            for result in (rms_norm(x, torch.ones_like(x[0]), 1e-5), silu_and_multiply(x), multiplied(x))
        )

    # The norm's constant is the width's next power of two: no other test has these.
    narrow, wide = (torch.randn(5, width, device=CUDA, dtype=torch.bfloat16) for width in (8208, 16400))
    weight = torch.randn(128, 8192, device=CUDA, dtype=torch.bfloat16) / 90
    compiled: list[str] = []
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_: compiled.append(fn.name)
    try:
        with compiled_together():
            run()
            run()
            assert not compiled
        assert len(compiled) >= 3
        num_compiled = len(compiled)
        results = run()
        assert len(compiled) == num_compiled
    finally:
        knobs.runtime.jit_post_compile_hook = None
    for x, normed, activated, multiple in ((narrow, *results[:3]), (wide, *results[3:])):
        _close(normed, F.rms_norm(x.double(), x.shape[1:], eps=1e-5))
        gate, up = x.double().chunk(2, dim=1)
        _close(activated, F.silu(gate) * up)
        _close(multiple[0], F.linear(x[:, :8192].double(), weight.double()))
