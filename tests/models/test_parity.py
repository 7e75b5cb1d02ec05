"""Our logits and greedy text are those of transformers, for every family."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models import support
from models.support import PagedCache, Pair, tokens

TOLERANCE = 1e-4


def _assert_close(ours: torch.Tensor, expected: torch.Tensor) -> None:
    assert ours.dtype == torch.float32
    assert ours.shape == expected.shape
    assert expected.std() > 0.3, "the reference's logits are too flat to tell anything"
    assert (ours - expected).abs().max() < TOLERANCE


def test_prefill_of_several_prompts(pair: Pair) -> None:
    prompts = [tokens(length) for length in (1, 23, 5, 64)]
    cache = PagedCache(pair.decoder)
    logits = cache.run([(cache.add(prompt), len(prompt)) for prompt in prompts])
    _assert_close(logits, torch.cat([pair.reference_logits(prompt) for prompt in prompts]))


def test_prefill_in_chunks_then_decode(pair: Pair) -> None:
    """Contexts of different lengths, chunks that end anywhere in a page, and decodes beside chunks."""
    cache = PagedCache(pair.decoder)
    texts = [tokens(length) for length in (30, 17, 41)]
    expected = [pair.reference_logits(text) for text in texts]
    first, second, third = (cache.add(text) for text in texts)
    _assert_close(cache.run([(first, 11), (second, 3)]), torch.cat([expected[0][:11], expected[1][:3]]))
    _assert_close(cache.run([(second, 1)], [(first, 7)]), torch.cat([expected[1][3:4], expected[0][11:18]]))
    _assert_close(
        cache.run([(first, 1), (second, 1)], [(third, 30)]),
        torch.cat([expected[0][18:19], expected[1][4:5], expected[2][:30]]),
    )
    for step in range(11):
        rows = [expected[0][19 + step], expected[1][5 + step], expected[2][30 + step]]
        _assert_close(cache.run([(first, 1), (second, 1), (third, 1)]), torch.stack(rows))


def test_training_segments(pair: Pair) -> None:
    for lengths in ((12, 12, 12), (3, 40, 1, 17), (25,)):
        sequences = [tokens(length, seed) for seed, length in enumerate(lengths)]
        logits = pair.decoder.logits(pair.decoder.forward(support.training_batch(sequences)))
        _assert_close(logits, torch.cat([pair.reference_logits(sequence) for sequence in sequences]))


def test_greedy_text(pair: Pair) -> None:
    """40 tokens of three sequences decoded together."""
    cache = PagedCache(pair.decoder)
    prompts = [tokens(length, seed=1) for length in (4, 19, 33)]
    sequences = [cache.add(prompt) for prompt in prompts]
    logits = cache.run([(sequence, len(sequence.token_ids)) for sequence in sequences])
    last = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    logits = logits[last]
    for _ in range(40):
        for sequence, token in zip(sequences, logits.argmax(-1).tolist(), strict=True):
            sequence.token_ids.append(token)
        logits = cache.run([(sequence, 1) for sequence in sequences])
    for sequence, prompt in zip(sequences, prompts, strict=True):
        ids = torch.tensor([prompt])
        generated = pair.reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False, pad_token_id=0
        )
        assert sequence.token_ids == generated[0].tolist()
        assert len(set(sequence.token_ids[-40:])) > 3, "text of one token over and over proves little"


def test_bfloat16_rounds_where_transformers_does(pair: Pair) -> None:
    """Nearly all of the error against float32 is common to both, so they are much closer to each other than to it."""
    prompt = tokens(48)
    ours = support.load(pair.folder, torch.bfloat16)
    logits = ours.logits(ours.forward(support.training_batch([prompt])))
    exact = pair.reference_logits(prompt)
    reference = type(pair.reference).from_pretrained(pair.folder, dtype=torch.bfloat16)
    expected = pair.reference_logits(prompt, reference).float()
    rounding = (expected - exact).square().mean().sqrt()
    assert rounding > 1e-3
    assert (logits - expected).square().mean().sqrt() < 0.75 * rounding


def test_same_inputs_same_bits(llama: Pair) -> None:
    def run() -> torch.Tensor:
        cache = PagedCache(llama.decoder)
        sequences = [cache.add(tokens(length)) for length in (20, 9)]
        outs = [cache.run([(sequence, 8) for sequence in sequences])]
        outs.append(cache.run([(sequences[1], 1)], [(sequences[0], 12)]))
        return torch.cat(outs)

    assert torch.equal(run(), run())


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_same_logits(llama: Pair, data: st.DataObject) -> None:
    """However sequences are cut into chunks, mixed and laid out in pages."""
    page_tokens = data.draw(st.sampled_from([1, 2, 8]))
    cache = PagedCache(llama.decoder, 64, page_tokens, seed=data.draw(st.integers(0, 9)))
    sequences = [
        cache.add(tokens(length)) for length in data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    ]
    expected = {id(sequence): llama.reference_logits(sequence.token_ids) for sequence in sequences}
    while waiting := [sequence for sequence in sequences if sequence.num_done < len(sequence.token_ids)]:
        chosen = data.draw(st.lists(st.sampled_from(waiting), min_size=1, unique_by=id))
        work = [
            (sequence, data.draw(st.integers(1, len(sequence.token_ids) - sequence.num_done))) for sequence in chosen
        ]
        starts = [sequence.num_done for sequence in chosen]
        logits = cache.run(work)
        rows = [
            expected[id(sequence)][start : start + count] for (sequence, count), start in zip(work, starts, strict=True)
        ]
        assert (logits - torch.cat(rows)).abs().max() < TOLERANCE


def test_a_paged_segment_needs_a_cache(llama: Pair) -> None:
    cache = PagedCache(llama.decoder)
    batch = cache.batch([[(cache.add(tokens(3)), 3)]])
    with pytest.raises(ValueError, match="kv_cache"):
        llama.decoder.forward(batch)
