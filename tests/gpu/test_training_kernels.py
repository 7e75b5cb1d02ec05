"""The kernels of a training pass give what plain torch operations give, and a layer on the GPU what it gives on the
CPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from cotenant.models import elementwise_ops as ops
from cotenant.models.batch import AdapterSpan, Batch, TrainingSegment
from cotenant.models.decoder import Decoder
from cotenant.models.layer_backward import layer_backward
from cotenant.models.loading import load_decoder
from cotenant.models.lora import LoraAdapter
from cotenant.models.registry import ResolvedModel
from cotenant.models.rope import RopeTables
from cotenant.models.tape import LayerTape
from gpu import support

CUDA = torch.device("cuda")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPSILON = 1e-5
# One step of rounding, relative, and a little for sums in another order.
STEP = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

Result = torch.Tensor | tuple[torch.Tensor, ...]


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


def _check(name: str, *arguments: object, agreeing: float = 0.99) -> None:
    """Fused, without autograd, against plain operations, with it; what they may write to is copied. In half precision
    the share ``agreeing`` of the elements has the same bits."""
    results: list[Result] = []
    for is_plain in (False, True):
        copies = [one.clone() if isinstance(one, torch.Tensor) and one.is_contiguous() else one for one in arguments]
        with torch.set_grad_enabled(is_plain):
            results.append(getattr(ops, name)(*copies))
    for ours, plain in zip(*((one,) if isinstance(one, torch.Tensor) else one for one in results), strict=True):
        assert ours.shape == plain.shape
        assert ours.dtype == plain.dtype
        step = STEP[ours.dtype]
        torch.testing.assert_close(ours.float(), plain.float(), rtol=step, atol=4 * step)
        if ours.dtype != torch.float32:
            assert (ours == plain).float().mean() > agreeing


def _random(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "hidden"), [(5, 96), (333, 5120), (17, 16384)])
def test_norms(num_rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, y, gradient = (_random(num_rows, hidden, dtype=dtype) for _ in range(3))
    weight = torch.rand(hidden, device=CUDA).to(dtype) + 0.5
    _check("norm", x, weight, EPSILON)
    _check("norm_backward", x, weight, gradient, EPSILON)
    _check("norm_backward", x, weight, gradient, EPSILON, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(5, 96), (513, 2500), (64, 14336)])
def test_silu(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 2 * _random(num_rows, 2 * width, dtype=dtype)
    _check("silu_and_multiply", gate_up)
    _check("silu_backward", gate_up, _random(num_rows, width, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(5, 1, 96), (32, 8, 128)])
def test_rotation(heads: int, kv_heads: int, head_dim: int, is_normed: bool, dtype: torch.dtype) -> None:
    """The gradients come with the strides that attention gives them."""
    tokens, num_rotated = 71, heads + kv_heads
    packed = _random(tokens, heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = torch.rand(tokens, 1, head_dim // 2, device=CUDA) * 6
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    cos, signed_sin = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    weight = torch.rand(num_rotated, head_dim, device=CUDA).to(dtype) + 0.5 if is_normed else None
    _check("rotate_heads", packed, cos, signed_sin, num_rotated, weight, EPSILON, agreeing=0.7)
    query = _random(heads, tokens, head_dim, dtype=dtype).transpose(0, 1)
    key = _random(tokens, kv_heads, 2 * head_dim, dtype=dtype)[:, :, :head_dim]
    value = _random(tokens, kv_heads, head_dim, dtype=dtype)
    _check("rotate_heads_backward", query, key, value, cos, signed_sin, packed, weight, EPSILON, agreeing=0.7)


def test_rotation_takes_the_models_own_tables(tmp_path: Path) -> None:
    spec = support.make_model("llama", tmp_path).spec
    tables = RopeTables(spec, CUDA, torch.bfloat16)
    cos, signed_sin = tables.at(torch.arange(40, device=CUDA) * 3)
    num_rotated = spec.num_heads + spec.num_kv_heads
    packed = _random(40, num_rotated + spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16)
    _check("rotate_heads", packed, cos, signed_sin, num_rotated, None, EPSILON, agreeing=0.7)


def _layer(decoder: Decoder, hidden: torch.Tensor, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Layer 1's output, and the gradients of its input and of an adapter's matrices; as float32 on the CPU."""
    device, lengths = decoder.device, (37, 70, 1)
    adapter = LoraAdapter.trainable(
        decoder.spec,
        r=8,
        alpha=16.0,
        target_modules=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        seed=0,
        device=device,
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, b in adapter.weights.values():
            b.copy_(torch.randn(b.shape, generator=generator) * 0.1)
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        total = sum(lengths)
        span = AdapterSpan(0, total, adapter)
        batch = Batch(torch.zeros_like(positions), positions, (TrainingSegment(lengths),), (span,))
        tape = LayerTape(slice(0, total))
        hidden, gradient = (one.to(device, decoder.dtype) for one in (hidden, gradient))
        found = {"output": decoder.layer(1, hidden, batch, None, tape)}
        parts: dict[int, torch.Tensor] = {}
        below = layer_backward(decoder, 1, tape, gradient, lambda matrix, part: parts.update({id(matrix): part}))
    assert below is not None
    found["input"] = below
    for (layer, module), (a, b) in adapter.weights.items():
        if layer == 1:
            found[f"{module}.a"], found[f"{module}.b"] = parts[id(a)], parts[id(b)]
    return {name: one.float().cpu() for name, one in found.items()}


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_layer_gives_what_it_gives_on_the_cpu(family: str, tmp_path: Path) -> None:
    model = support.make_model(family, tmp_path)
    resolved = ResolvedModel(tmp_path.name, tmp_path, model.spec)
    generator = torch.Generator().manual_seed(1)
    hidden, gradient = torch.randn(2, 108, model.spec.hidden_size, generator=generator).bfloat16().float()
    expected = _layer(load_decoder(resolved, torch.device("cpu"), torch.float32, seed=0), hidden, gradient)
    for dtype, bound in ((torch.float32, 1e-4), (torch.float16, 6e-3), (torch.bfloat16, 4e-2)):
        ours = _layer(model.decoder(dtype), hidden, gradient)
        assert ours.keys() == expected.keys()
        for name, one in ours.items():
            error = float(torch.linalg.norm(one - expected[name]) / torch.linalg.norm(expected[name]))
            assert error < bound, (dtype, name, error)


@torch.inference_mode()
def test_the_kernels_can_be_captured() -> None:
    """A replay gives what a launch gives."""
    gate_up, gradient = _random(300, 4096, dtype=torch.bfloat16), _random(300, 2048, dtype=torch.bfloat16)
    weight = torch.rand(2048, device=CUDA).bfloat16()

    def run() -> list[torch.Tensor]:
        activated, out = ops.silu_backward(gate_up, gradient.clone())
        normed = ops.norm(activated, weight, EPSILON)
        return [activated, out, normed, ops.norm_backward(activated, weight, normed, EPSILON, add=gradient)]

    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = run()
    graph.replay()
    for one, other in zip(results, expected, strict=True):
        assert torch.equal(one, other)
