"""Fp8 weights: the numerics, the module, gradients through it, and a whole decoder. Products by the reference here."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES
from cotenant.models.batch import AdapterSpan
from cotenant.models.decoder import Decoder
from cotenant.models.dropout import DropoutMasks, token_keys
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.linear import linear
from cotenant.models.loading import load_decoder, load_weights
from cotenant.models.lora import LoraAdapter
from cotenant.models.quantization import FP8, Fp8Linear, dequantize, product_problem, quantize_rows, scaled_product
from cotenant.models.registry import ResolvedModel, read_spec
from cotenant.models.tape import LayerTape
from cotenant.models.weights import DecoderWeights
from models import support
from models.support import PagedCache, Pair, tokens

QKV = ("q_proj", "k_proj", "v_proj")
Rows = tuple[torch.Tensor, torch.Tensor]


def _round_trip(x: torch.Tensor) -> torch.Tensor:
    return dequantize(*quantize_rows(x), torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    exponents=st.lists(st.integers(-60, 80), min_size=1, max_size=6),
    spread=st.sampled_from([0.0, 1.0, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_error_of_each_element(exponents: list[int], spread: float, dtype: torch.dtype, seed: int) -> None:
    """Half a step of e4m3, for rows of any size, with elements of one magnitude or of many."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.tensor(exponents, dtype=torch.float32).exp2()[:, None]
    noise = torch.randn((len(exponents), 64), generator=generator)
    x = (noise * (spread * torch.randn(noise.shape, generator=generator)).exp() * size).to(dtype)
    values, scales = quantize_rows(x)
    assert values.dtype == FP8
    assert scales.shape == (len(exponents), 1)
    x, restored = x.float(), dequantize(values, scales, torch.float32)
    bound = torch.maximum(x.abs() / 16, scales / 1024) * 1.0001
    assert bool(((restored - x).abs() <= bound).all())
    peaks = x.abs().amax(dim=1, keepdim=True)
    assert torch.allclose(restored.abs().amax(dim=1, keepdim=True), peaks, rtol=1e-5, atol=0)


def test_rounding_twice_is_rounding_once() -> None:
    x = torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    once = _round_trip(x)
    assert not torch.equal(once, x)
    assert torch.allclose(_round_trip(once), once, rtol=1e-6, atol=0)


def test_extreme_rows() -> None:
    """None of them spoils another."""
    largest = torch.finfo(torch.bfloat16).max
    rows = [[0.0, 0.0], [largest, -largest], [1e-38, 1e-40], [math.inf, 1.0], [math.nan, 1.0], [3.0, -1.5]]
    restored = _round_trip(torch.tensor(rows))
    assert restored[0].tolist() == [0.0, 0.0]
    assert restored[1].tolist() == pytest.approx([largest, -largest], rel=1e-6)
    assert restored[2].abs().max() <= 1e-33
    assert restored[3].isnan().all()
    assert restored[4].isnan().any()
    assert restored[5].tolist() == pytest.approx([3.0, -1.5], rel=1e-6)


def _pair_of_modules(dtype: torch.dtype = torch.bfloat16) -> tuple[Fp8Linear, FusedLinear]:
    """An fp8 module of the small Llama's shape, and one whose weight is the dequantised one."""
    generator = torch.Generator().manual_seed(7)
    sizes = (64, 32, 32)
    weight = torch.randn((128, 48), generator=generator) * torch.rand((128, 1), generator=generator)
    bias = torch.randn(128, generator=generator).to(dtype)
    values, scales = quantize_rows(weight)
    plain = FusedLinear(QKV, sizes, dequantize(values, scales, dtype), bias)
    return Fp8Linear(QKV, sizes, values, bias, scales=scales), plain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_product(dtype: torch.dtype) -> None:
    quantised, plain = _pair_of_modules(dtype)
    assert list(quantised.columns()) == list(plain.columns())
    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(2)).to(dtype)
    out = quantised.product(x)
    assert out.dtype == dtype
    exact = F.linear(x.float(), plain.weight.float(), plain.bias.float())  # type: ignore[union-attr]
    of_rounded = F.linear(_round_trip(x), plain.weight.float(), plain.bias.float())  # type: ignore[union-attr]
    assert (out.float() - of_rounded).abs().max() < 0.01 * of_rounded.abs().max()
    assert (out.float() - exact).norm() < 0.04 * exact.norm()
    assert torch.equal(quantised.product(x[4:5]), out[4:5])


def test_gradients_are_those_of_the_dequantised_weight(llama: Pair) -> None:
    """Of the input and of LoRA's matrices, bit for bit, given the same gradient of the output."""
    adapter = support.random_adapter(llama.decoder, 3, target_modules=QKV, dropout=0.2)
    adapter.dropout_masks = DropoutMasks(token_keys(["a"], [7]), 0.2)
    generator = torch.Generator().manual_seed(4)
    upstream = torch.randn((10, 128), generator=generator).bfloat16()
    inputs = torch.randn((10, 48), generator=generator).bfloat16()
    gradients = []
    for base in _pair_of_modules():
        tape, found = LayerTape(slice(2, 9)), [base.input_gradient(upstream)]
        with torch.no_grad():
            linear(inputs, base, 1, (AdapterSpan(2, 9, adapter),), tape=tape)
            below = support.linear_backward(
                inputs[2:9], upstream[2:9], base, tape.deltas["q_proj"], lambda _, part, found=found: found.append(part)
            )
        gradients.append([below, *found])
    assert gradients[0][2].dtype == torch.float32
    for ours, expected in zip(*gradients, strict=True):
        assert expected.abs().max() > 0
        assert torch.equal(ours, expected)


def _load(folder: Path, random_weights: bool = False, seed: int = 0) -> DecoderWeights:
    resolved = ResolvedModel("m", folder, read_spec(folder), random_weights)
    return load_weights(resolved, support.CPU, torch.bfloat16, seed, "fp8")


def _fp8_modules(weights: DecoderWeights) -> list[Fp8Linear]:
    groups = [group for layer in weights.layers for group in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    assert all(isinstance(group, Fp8Linear) for group in groups)
    return groups  # type: ignore[return-value]


def test_loading(pair: Pair) -> None:
    """Linear weights within their rounding of the checkpoint's; everything else is not touched."""
    ours = _load(pair.folder)
    exact = load_weights(ResolvedModel("m", pair.folder, pair.decoder.spec), support.CPU, torch.bfloat16, 0)
    assert torch.equal(ours.embedding, exact.embedding)
    assert torch.equal(ours.head, exact.head)
    assert torch.equal(ours.final_norm, exact.final_norm)
    index = 0
    modules = _fp8_modules(ours)
    for ours_layer, layer in zip(ours.layers, exact.layers, strict=True):
        assert torch.equal(ours_layer.input_norm, layer.input_norm)
        assert torch.equal(ours_layer.mlp_norm, layer.mlp_norm)
        assert (layer.qk_norm is None) or torch.equal(ours_layer.qk_norm, layer.qk_norm)  # type: ignore[arg-type]
        for group in (layer.qkv, layer.output, layer.gate_up, layer.down):
            quantised = modules[index]
            index += 1
            assert (group.bias is None) or torch.equal(quantised.bias, group.bias)  # type: ignore[arg-type]
            weight = group.weight.float()
            restored = dequantize(quantised.weight, quantised.scales, torch.float32)
            bound = torch.maximum(weight.abs() / 16, quantised.scales / 1024) * 1.0001
            assert bool(((restored - weight).abs() <= bound).all())


def test_random_weights_depend_on_the_seed(llama: Pair) -> None:
    one, same, other = (_fp8_modules(_load(llama.folder, True, seed)) for seed in (1, 1, 2))
    for module, again, different in zip(one, same, other, strict=True):
        assert torch.equal(module.weight.float(), again.weight.float())
        assert torch.equal(module.scales, again.scales)
        assert not torch.equal(module.scales, different.scales)
        assert abs(dequantize(module.weight, module.scales, torch.float32).std() - 0.02) < 0.002


def _decoder(pair: Pair) -> Decoder:
    return Decoder(pair.decoder.spec, _load(pair.folder))


def test_logits_stay_near(pair: Pair) -> None:
    """With an adapter on top, whose delta is not quantised, over pages and in chunks."""
    decoder = _decoder(pair)
    prompt = tokens(40)
    logits = []
    for model in (decoder, pair.decoder):
        adapter = support.random_adapter(model, 5, target_modules=LINEAR_MODULES)
        cache = PagedCache(model)
        sequence = cache.add(prompt, adapter.for_serving(support.CPU, model.dtype))
        logits.append(torch.cat([cache.run([(sequence, count)]) for count in (25, 1, 14)]))
    assert F.cosine_similarity(*logits, dim=1).mean() > 0.97
    assert not torch.equal(*logits)


def _gradients(decoder: Decoder, adapter: LoraAdapter) -> list[torch.Tensor]:
    batch = support.training_batch([tokens(19), tokens(7)], adapter)
    return support.gradients(decoder, batch, adapter, lambda logits: F.cross_entropy(logits[:-1], batch.token_ids[1:]))


def test_training_on_a_frozen_fp8_base(pair: Pair) -> None:
    decoder = _decoder(pair)
    adapter = support.random_adapter(decoder, 2, target_modules=LINEAR_MODULES)
    ours, exact = _gradients(decoder, adapter), _gradients(pair.decoder, adapter)
    for gradient, expected in zip(ours, exact, strict=True):
        assert gradient.dtype == torch.float32
        assert F.cosine_similarity(gradient.flatten(), expected.flatten(), dim=0) > 0.8


def _bits_of_bfloat16(x: Rows, weight: Rows, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """What torch's kernel for compute capability 8.9 gives whatever it is asked for."""
    return scaled_product(x, weight, bias, torch.bfloat16).view(dtype)


def _refusal(*_: object) -> torch.Tensor:
    raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_tried_before_they_are_needed(dtype: torch.dtype) -> None:
    assert product_problem(support.CPU, dtype) is None
    problem = product_problem(support.CPU, dtype, _bits_of_bfloat16)
    assert (problem is not None and "wrongly" in problem) == (dtype == torch.float16)
    problem = product_problem(support.CPU, dtype, _refusal)
    assert problem is not None
    assert "CUBLAS_STATUS_NOT_SUPPORTED" in problem


def test_refused_where_there_is_no_hardware_for_it(llama: Pair) -> None:
    resolved = ResolvedModel("m", llama.folder, llama.decoder.spec)
    with pytest.raises(InvalidInputError, match=r"needs an NVIDIA GPU .* not the device cpu; leave it out") as caught:
        load_decoder(resolved, support.CPU, torch.bfloat16, 0, "fp8")
    assert caught.value.param == "quantization"
    with pytest.raises(InvalidInputError, match="int3: not known; supported is fp8"):
        load_decoder(resolved, support.CPU, torch.bfloat16, 0, "int3")
