"""In half precision our logits are as near to float32's as transformers' own in the same dtype."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from cotenant.core.job import LINEAR_MODULES
from models import support
from models.support import PagedCache, Pair, tokens

DTYPES = [torch.bfloat16, torch.float16]
PROMPTS = [tokens(length) for length in (48, 1, 21, 33)]


def _rms(difference: torch.Tensor) -> float:
    return float(difference.square().mean().sqrt())


def _errors(pair: Pair, dtype: torch.dtype, ours: torch.Tensor) -> tuple[float, float, torch.Tensor]:
    """Root mean squares against float32, of ours and of transformers', and transformers' logits."""
    reference = type(pair.reference).from_pretrained(pair.folder, dtype=dtype)
    exact = torch.cat([pair.reference_logits(prompt) for prompt in PROMPTS])
    theirs = torch.cat([pair.reference_logits(prompt, reference).float() for prompt in PROMPTS])
    return _rms(ours - exact), _rms(theirs - exact), theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_and_decode(pair: Pair, dtype: torch.dtype) -> None:
    cache = PagedCache(support.load(pair.folder, dtype))
    sequences = [cache.add(prompt) for prompt in PROMPTS]
    parts: list[list[torch.Tensor]] = [[] for _ in PROMPTS]
    while waiting := [s for s in sequences if s.num_done < len(s.token_ids)]:
        work = [(s, min(1 if s.num_done >= 16 else 16, len(s.token_ids) - s.num_done)) for s in waiting]
        logits = cache.run(work).split([count for _, count in work])
        for (sequence, _), rows in zip(work, logits, strict=True):
            parts[sequences.index(sequence)].append(rows)
    ours, theirs, _ = _errors(pair, dtype, torch.cat([rows for part in parts for rows in part]))
    assert 0 < ours < 1.05 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_training_segments(pair: Pair, dtype: torch.dtype) -> None:
    """And rounded at the same places: nearer to transformers than either is to float32."""
    decoder = support.load(pair.folder, dtype)
    logits = decoder.logits(decoder.forward(support.training_batch(PROMPTS)))
    ours, theirs, expected = _errors(pair, dtype, logits)
    assert 0 < ours < 1.05 * theirs
    assert _rms(logits - expected) < 0.75 * theirs


@pytest.mark.parametrize("dtype", DTYPES)
def test_training(pair: Pair, dtype: torch.dtype) -> None:
    """Float32 master weights on a half-precision base: their gradients point where float32's do."""
    gradients = []
    for decoder in (pair.decoder, support.load(pair.folder, dtype)):
        adapter = support.random_adapter(decoder, 2, target_modules=LINEAR_MODULES)
        batch = support.training_batch(PROMPTS, adapter)
        targets = batch.token_ids[1:]
        gradients.append(
            support.gradients(
                decoder, batch, adapter, lambda logits, targets=targets: F.cross_entropy(logits[:-1], targets)
            )
        )
    for ours, exact in zip(gradients[1], gradients[0], strict=True):
        assert ours.dtype == torch.float32
        assert F.cosine_similarity(ours.flatten(), exact.flatten(), dim=0) > 0.98
