"""Training through the decoder: the backward pass that is written out, dropout, and fusion with decodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel

from cotenant.core.job import LINEAR_MODULES
from cotenant.models.batch import AdapterSpan, Batch
from cotenant.models.dropout import DropoutMasks, token_keys
from cotenant.models.fused_linear import FusedLinear
from cotenant.models.linear import linear
from cotenant.models.lora import LoraAdapter, save_adapter
from cotenant.models.tape import LayerTape
from models import support
from models.support import PagedCache, Pair, tokens

SEQUENCES = [tokens(11, seed=3), tokens(17, seed=3), tokens(4, seed=3)]
QKV = ("q_proj", "k_proj", "v_proj")
TARGETS = torch.tensor([token for sequence in SEQUENCES for token in [*sequence[1:], 0]])


def _loss(logits: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, TARGETS)


def _gradients(pair: Pair, adapter: LoraAdapter) -> list[torch.Tensor]:
    found = support.gradients(pair.decoder, support.training_batch(SEQUENCES, adapter), adapter, _loss)
    assert all(gradient.abs().max() > 0 for gradient in found)
    return found


def _adapter(pair: Pair, dropout: float = 0.0) -> LoraAdapter:
    adapter = support.random_adapter(pair.decoder, 2, target_modules=LINEAR_MODULES, dropout=dropout)
    adapter.dropout_masks = _masks("abc", dropout=dropout) if dropout else None
    return adapter


def _masks(
    names: Sequence[str], lengths: Sequence[int] = tuple(map(len, SEQUENCES)), dropout: float = 0.4
) -> DropoutMasks:
    return DropoutMasks(token_keys(names, lengths), dropout)


def test_gradients_are_those_of_peft(pair: Pair, tmp_path: Path) -> None:
    adapter = _adapter(pair)
    save_adapter(adapter, tmp_path, str(pair.folder))
    base = type(pair.reference).from_pretrained(pair.folder)
    model = PeftModel.from_pretrained(base, tmp_path, is_trainable=True)
    _loss(torch.cat([model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES])).backward()
    theirs = dict(model.named_parameters())
    for name, ours in zip(adapter.named_parameters(), _gradients(pair, adapter), strict=True):
        layer, module, letter = name.split(".")
        (their_name,) = [n for n in theirs if f"layers.{layer}." in n and f"{module}.lora_{letter}." in n]
        expected = theirs[their_name].grad
        assert expected is not None
        assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_gradients_are_those_of_autograd(pair: Pair, dropout: float) -> None:
    adapter = _adapter(pair, dropout)
    _loss(pair.decoder.logits(pair.decoder.forward(support.training_batch(SEQUENCES, adapter)))).backward()
    for ours, matrix in zip(_gradients(pair, adapter), adapter.parameters(), strict=True):
        assert matrix.grad is not None
        assert ours.is_contiguous()
        assert (ours - matrix.grad).abs().max() < 1e-5 * matrix.grad.abs().max()


def test_dropout_masks_depend_on_the_names_alone(llama: Pair) -> None:
    adapter = _adapter(llama, dropout=0.4)
    first = _gradients(llama, adapter)
    torch.rand(5)  # the global generator has no say
    assert all(map(torch.equal, _gradients(llama, adapter), first))
    adapter.dropout_masks = _masks("abd")
    assert not any(map(torch.equal, _gradients(llama, adapter), first))
    adapter.dropout_masks = None
    plain = _adapter(llama)
    assert all(map(torch.equal, _gradients(llama, adapter), _gradients(llama, plain)))


@pytest.mark.parametrize("rows", [(0, 12), (3, 9)])
def test_gradients_through_dropout(llama: Pair, rows: tuple[int, int]) -> None:
    """Against autograd's own, with the same masks, for a span of all the rows and of some."""
    adapter = _adapter(llama, dropout=0.4)
    adapter.dropout_masks = _masks("a", [rows[1] - rows[0]])
    sizes = tuple(llama.decoder.spec.module_shape(module)[0] for module in QKV)
    base = FusedLinear(QKV, sizes, torch.randn(sum(sizes), 48), torch.randn(sum(sizes)))
    x = torch.randn(12, 48, requires_grad=True)
    weight = torch.randn(12, sum(sizes))
    used = [x] + [matrix for module in QKV for matrix in adapter.weights[1, module]]
    tape, found = LayerTape(slice(*rows)), []
    with torch.no_grad():
        ours = linear(x, base, 1, (AdapterSpan(*rows, adapter),), tape=tape)
        below = support.linear_backward(
            x[tape.rows], weight[tape.rows], base, tape.deltas["q_proj"], lambda _, gradient: found.append(gradient)
        )
    whole = base.input_gradient(weight)
    whole[tape.rows] = below
    gradients = [whole, *found]
    part = x[slice(*rows)]
    deltas = []
    for module in QKV:
        a, b = adapter.weights[1, module]
        mask = adapter.dropout_mask(1, module, part)
        assert mask is not None
        deltas.append(2.0 * ((part * mask) @ a.T @ b.T))
    delta = F.pad(torch.cat(deltas, dim=1), (0, 0, rows[0], 12 - rows[1]))
    expected = F.linear(x, base.weight, base.bias) + delta
    assert torch.allclose(ours, expected, atol=1e-4)
    for gradient, exact in zip(gradients, torch.autograd.grad((expected * weight).sum(), used), strict=True):
        assert torch.allclose(gradient, exact, atol=1e-3)


def test_dropout_masks_are_independent_and_keep_the_mean() -> None:
    """Of neighbouring layers, modules and sequences, and of a mask's neighbouring tokens and columns."""
    x = torch.ones(400, 600)
    masks = [
        _masks([name], [400]).mask(layer, module, x)
        for name in ("1/7", "1/8", "2/7")
        for layer in (0, 1)
        for module in ("q_proj", "k_proj")
    ]
    for index, mask in enumerate(masks):
        assert mask.unique().tolist() == pytest.approx([0.0, 1 / 0.6])
        assert abs(mask.mean() - 1) < 0.01
        for other in (mask[1:], mask[:, 1:], *masks[:index]):
            rows, columns = other.shape
            pair = torch.stack([mask[:rows, :columns].flatten(), other.flatten()])
            assert abs(torch.corrcoef(pair)[0, 1]) < 0.02
        for dim in (0, 1):  # each row's and column's share, too
            shares = mask.mean(dim)
            assert shares.std() == pytest.approx((0.4 / 0.6 / mask.shape[dim]) ** 0.5, rel=0.2)


@pytest.mark.parametrize("dropout", [0.05, 0.1, 0.5, 0.9])
def test_dropout_drops_with_its_probability(dropout: float) -> None:
    mask = _masks("abcd", [300] * 4, dropout).mask(3, "down_proj", torch.ones(1200, 1000))
    error = (dropout * (1 - dropout) / mask.numel()) ** 0.5
    assert abs(float((mask == 0).double().mean()) - dropout) < 5 * error


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_dropout_mask_in_any_micro_batch(dtype: torch.dtype) -> None:
    """In batches large enough that masks are made in pieces."""
    x = torch.ones(900, 1000, dtype=dtype)
    whole = _masks("abc", [200, 600, 100]).mask(1, "q_proj", x)
    assert whole.dtype == dtype
    assert torch.equal(_masks("cb", [100, 600]).mask(1, "q_proj", x[:700]), torch.cat([whole[800:], whole[200:800]]))
    assert torch.equal(_masks("b", [50]).mask(1, "q_proj", x[:50]), whole[200:250])


def _fused_batch(pair: Pair, adapter: LoraAdapter) -> tuple[Batch, PagedCache]:
    served = support.random_adapter(pair.decoder, 5).for_serving(support.CPU, torch.float32)
    cache = PagedCache(pair.decoder)
    one, two, three = (cache.add(tokens(n), owner) for n, owner in ((9, None), (14, served), (10, None)))
    cache.run([(one, 8), (two, 13)])
    return cache.batch([[(one, 1), (two, 1)], [(three, 10)]], SEQUENCES, adapter), cache


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_fusion_changes_neither_side(pair: Pair, dropout: float) -> None:
    """Training rows behind online rows in every layer: the same gradients, the same logits, the same cache."""
    adapter = _adapter(pair, dropout)
    expected = _gradients(pair, adapter)
    batch, cache = _fused_batch(pair, adapter)
    ours_found = support.gradients(pair.decoder, batch, adapter, _loss, kv_cache=cache.cache)
    for ours, alone in zip(ours_found, expected, strict=True):
        assert (ours - alone).abs().max() < 1e-4 * alone.abs().max()
    plain, plain_cache = _fused_batch(pair, adapter)
    with torch.no_grad():
        pair.decoder.forward(plain, plain_cache.cache)
    assert torch.allclose(cache.cache, plain_cache.cache, atol=1e-5, equal_nan=True)


def test_half_precision_base_trains_float32_masters(pair: Pair) -> None:
    decoder = support.load(pair.folder, torch.bfloat16)
    adapter = _adapter(pair)
    expected = _gradients(pair, adapter)
    found = support.gradients(decoder, support.training_batch(SEQUENCES, adapter), adapter, _loss)
    for ours, exact in zip(found, expected, strict=True):
        assert ours.dtype == torch.float32
        assert F.cosine_similarity(ours.flatten(), exact.flatten(), dim=0) > 0.98
