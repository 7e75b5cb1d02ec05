"""Fp8 on the GPU: its kernel, the scaled matmul, graphs, gradients, and loading."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from cotenant.core.errors import InvalidInputError
from cotenant.core.job import LINEAR_MODULES
from cotenant.models.decoder import Decoder
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.loading import load_decoder, load_weights
from cotenant.models.quantization import (
    Fp8Linear,
    dequantize,
    product_problem,
    quantize_rows,
    quantize_rows_plainly,
    scaled_product,
)
from cotenant.models.registry import ARCHITECTURES, ResolvedModel, read_spec
from cotenant.models.weights import targets
from models import support
from models.support import tokens

CUDA = torch.device("cuda")
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = ARCHITECTURES["llama-3.2-1b"]


@pytest.fixture(autouse=True)
def _needs_fp8() -> Iterator[None]:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no fp8 on this GPU")
    yield
    torch.cuda.empty_cache()


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=CUDA).to(dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("shape", [(1, 16), (3, 4096), (500, 80), (65, 14336), (2, 28672)])
def test_the_kernel_is_the_plain_arithmetic(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = _random(*shape, dtype=dtype)
    if shape[0] > 2:
        x[0], x[1, 0] = 0, 6e4
    for rows in (x, torch.cat([x, x], dim=1)[:, : shape[1]], x.repeat_interleave(2, dim=1)[:, ::2]):
        values, scales = quantize_rows(rows)
        expected_values, expected_scales = quantize_rows_plainly(rows)
        assert torch.equal(scales, expected_scales)
        share_off = (values.float() != expected_values.float()).float().mean()
        # Ada's conversion goes through float16, cut off: a value just above a tie becomes one.
        assert share_off <= (0.0 if torch.cuda.get_device_capability() >= (9, 0) else 0.01)


def test_the_kernel_on_infinities_and_nan() -> None:
    x = _random(4, 64)
    x[1, 5], x[2, 6] = math.inf, math.nan
    restored = dequantize(*quantize_rows(x), torch.float32)
    assert restored.isnan().any(dim=1).tolist() == [False, True, True, False]


def _modules(num_out: int, num_in: int, dtype: torch.dtype, has_bias: bool = False) -> tuple[Fp8Linear, FusedLinear]:
    values, scales = quantize_rows(_random(num_out, num_in, seed=1, dtype=dtype) * 0.02)
    bias = _random(num_out, seed=2, dtype=dtype) if has_bias else None
    plain = FusedLinear(("o_proj",), (num_out,), dequantize(values, scales, dtype), bias)
    return Fp8Linear(("o_proj",), (num_out,), values, bias, scales=scales), plain


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 200, 513])
@pytest.mark.parametrize("sizes", [(128, 48), (6144, 4096), (4096, 14336)])
def test_product_and_gradient(sizes: tuple[int, int], num_tokens: int, has_bias: bool, dtype: torch.dtype) -> None:
    quantised, plain = _modules(*sizes, dtype, has_bias)
    x = _random(num_tokens, sizes[1], seed=3, dtype=dtype)
    out = quantised.product(x)
    rounded = dequantize(*quantize_rows(x), torch.float32)
    expected = rounded @ dequantize(quantised.weight, quantised.scales, torch.float32).T
    expected = expected if plain.bias is None else expected + plain.bias.float()
    assert out.dtype == dtype
    assert (out.float() - expected).norm() < 0.01 * expected.norm()
    gradient = _random(num_tokens, sizes[0], seed=4, dtype=dtype)
    assert torch.equal(quantised.input_gradient(gradient), plain.input_gradient(gradient))


def test_in_a_captured_graph() -> None:
    quantised, _ = _modules(4096, 4096, torch.bfloat16)
    x = _random(8, 4096)
    stream = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(stream):
        quantised.product(x)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            out = quantised.product(x)
    for seed in (5, 6):
        x.copy_(_random(8, 4096, seed=seed))
        graph.replay()
        assert torch.equal(out, quantised.product(x))


def _model(folder: Path) -> ResolvedModel:
    pair = support.make_pair("llama", folder)
    return ResolvedModel("m", folder, pair.decoder.spec)


def test_decoder_trains_and_serves(tmp_path: Path) -> None:
    """Logits and gradients of the CPU's reference, within what fp8 sums differ by."""
    resolved = _model(tmp_path)
    ours = load_decoder(resolved, CUDA, torch.bfloat16, 0, "fp8")
    weights = load_weights(resolved, support.CPU, torch.bfloat16, 0, "fp8")
    results = []
    for decoder in (ours, Decoder(resolved.spec, weights)):
        adapter = support.random_adapter(decoder, 2, target_modules=LINEAR_MODULES, device=decoder.device)
        batch = support.training_batch([tokens(19), tokens(7)], adapter)
        ids, positions = batch.token_ids.to(decoder.device), batch.positions.to(decoder.device)
        batch = replace(batch, token_ids=ids, positions=positions)
        with torch.no_grad():
            logits = decoder.logits(decoder.forward(batch))
        found = support.gradients(
            decoder, batch, adapter, lambda logits, ids=ids: F.cross_entropy(logits[:-1], ids[1:])
        )
        results.append([logits.cpu(), *(gradient.cpu() for gradient in found)])
    for result, expected in zip(*results, strict=True):
        assert F.cosine_similarity(result.flatten(), expected.flatten(), dim=0) > 0.95


def test_memory_never_holds_the_model_twice() -> None:
    """In fp8 the layers take half; on the way no more than a tensor of each thread comes on top."""
    resolved = ResolvedModel("m", None, SHAPES, random_weights=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = load_weights(resolved, CUDA, torch.bfloat16, 0, "fp8")
    held, peak = (size - before for size in (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    num_head = SHAPES.vocab_size * SHAPES.hidden_size
    num_linear = 1_235_814_400 - num_head
    assert held < 2 * num_head + 1.02 * num_linear
    assert peak < held + 0.1 * num_linear
    del weights


def test_loading_large_tensors_in_parallel(tmp_path: Path) -> None:
    """Tensors of several pinned buffers, in two files, and in another dtype: every bit as in the files."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "vocab_size": 20000,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    shapes = read_spec(tmp_path)
    random = ResolvedModel("m", None, shapes, random_weights=True)
    saved = targets(shapes, load_weights(random, CUDA, torch.bfloat16, 3))
    tensors = {name: place.view.cpu() for name, place in saved.items()}
    names = sorted(tensors)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    files = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in files.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in files.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    loaded = targets(shapes, load_weights(ResolvedModel("m", tmp_path, shapes), CUDA, torch.bfloat16, 0))
    for name, place in loaded.items():
        assert torch.equal(place.view, saved[name].view), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_tried_before_they_are_needed(dtype: torch.dtype) -> None:
    """What is right by float32's product is what the server starts with, and nothing else."""
    x, weight = (quantize_rows(_random(rows, 256, seed=rows)) for rows in (48, 64))
    expected = dequantize(*x, torch.float32) @ dequantize(*weight, torch.float32).T
    try:
        is_right = bool((scaled_product(x, weight, None, dtype).float() - expected).norm() < 0.01 * expected.norm())
    except RuntimeError:
        is_right = False
    assert (product_problem(CUDA, dtype) is None) == is_right


def test_refusals(tmp_path: Path) -> None:
    resolved = _model(tmp_path)
    with pytest.raises(InvalidInputError, match="--dtype bfloat16 or float16, not float32"):
        load_decoder(resolved, CUDA, torch.float32, 0, "fp8")
    odd = ResolvedModel("m", None, replace(SHAPES, intermediate_size=8200), random_weights=True)
    with pytest.raises(InvalidInputError, match="multiples of 16, but those of down_proj are 2048 by 8200"):
        load_decoder(odd, CUDA, torch.bfloat16, 0, "fp8")
