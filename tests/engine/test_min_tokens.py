"""The first tokens of an answer that is not to end before it has some: against transformers, and batch by batch."""

from __future__ import annotations

import pytest
import torch

from cotenant.core.errors import InvalidInputError
from cotenant.core.request import FinishReason, SamplingParams
from cotenant.engine.sampler import Sampler, SampleRow
from cotenant.engine.sampling_state import SamplingState
from engine.conftest import VOCAB_SIZE
from engine.launches import run_ahead

NUM_TOKENS = 16


def theirs(small, prompt: tuple[int, ...], ends: tuple[int, ...], min_tokens: int) -> list[int]:
    """What transformers generates after ``prompt``."""
    ids = torch.tensor([prompt])
    out = small.reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NUM_TOKENS,
        min_new_tokens=min_tokens,
        eos_token_id=list(ends),
        do_sample=False,
        pad_token_id=0,
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("num_pages", [200, 14])
def test_no_end_comes_before_them(small, num_pages) -> None:
    """Beside requests that may end at once, in batches that are launched ahead, with preemption and without; also
    where a bias would have an end come."""
    prompts = [small.prompt(7 + seed % 3, seed) for seed in range(9)]
    texts = [small.greedy(prompt, NUM_TOKENS) for prompt in prompts]
    ends = (texts[0][1], texts[2][0], texts[3][2])
    requests = [
        small.request(
            prompt,
            NUM_TOKENS,
            stop_token_ids=ends[2:],
            min_tokens=least,
            logit_bias={ends[0]: 1e3} if least == 7 else {},
        )
        for prompt, least in zip(prompts, [4, 0, 3, 5, 1, 0, 7, 16, 7], strict=True)
    ]
    engine = small.engine(num_pages=num_pages, max_num_batched_tokens=16, eos_token_ids=ends[:2])
    outputs = run_ahead(engine, requests, [0, 0, 0, 0, 1, 1, 2, 3, 3])
    assert num_pages > 100 or engine.num_preemptions > 0
    num_prevented = 0
    for request, text in zip(requests, texts, strict=True):
        least = request.sampling.min_tokens
        expected = theirs(small, request.prompt, ends, least)
        if request.sampling.logit_bias:
            expected = [*expected[:least], ends[0]]
        assert small.tokens(outputs[request.request_id]) == expected
        assert len(expected) >= least
        num_prevented += bool(set(text[:least]) & set(ends))
    assert num_prevented >= 3


def test_ends_that_are_ignored_come_after_them_alone(small) -> None:
    prompt = small.prompt(6)
    text = small.greedy(prompt, NUM_TOKENS)
    ends = (text[3],)
    engine = small.engine(eos_token_ids=ends)
    for least in (0, 1, 9):
        (outputs,) = small.run(engine, [small.request(prompt, NUM_TOKENS, ignore_eos=True, min_tokens=least)]).values()
        tokens = small.tokens(outputs)
        assert tokens[:least] == theirs(small, prompt, ends, NUM_TOKENS)[:least]
        assert (tokens == text) == (least <= text.index(text[3]))
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert len(tokens) == NUM_TOKENS


def test_ends_outside_the_vocabulary(small) -> None:
    """A model's files may name such; a request may not."""
    engine = small.engine(eos_token_ids=(-1, VOCAB_SIZE, 10**9))
    prompt = small.prompt(6)
    (outputs,) = small.run(engine, [small.request(prompt, 5, min_tokens=5)]).values()
    assert small.tokens(outputs) == small.greedy(prompt, 5)
    with pytest.raises(InvalidInputError, match="stop_token_ids"):
        engine.add(small.request(prompt, stop_token_ids=(VOCAB_SIZE,), min_tokens=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.8}, {"presence_penalty": 1.0}])
def test_tokens_are_those_of_logits_without_the_ends(dtype: torch.dtype, params: dict[str, float]) -> None:
    vocab_size, count, ends = 60, 40, (3, 17, 40)
    logits = (torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(0)) * 2).to(dtype)
    logits[:, 17] += 5
    without = logits.index_fill(1, torch.tensor(ends), -torch.inf)

    def tokens(logits: torch.Tensor, index: int, **more: object) -> list[int]:
        sampler = Sampler(count, vocab_size, torch.device("cpu"))
        rows = [
            SampleRow(SamplingState(SamplingParams(seed=seat, **params, **more)), seat, index)  # type: ignore[arg-type]
            for seat in range(count)
        ]
        for row in rows:
            sampler.open(row.seat, row.state, 2, [3, 4, *range(index)])
        chosen: list[int] = sampler.sample(logits, sampler.plan(rows)).tolist()
        return chosen

    for index in (0, 1):
        spared = tokens(logits, index, stop_token_ids=ends, min_tokens=2)
        assert spared == tokens(without, index)
        assert not set(spared) & set(ends)
    assert tokens(logits, 2, stop_token_ids=ends, min_tokens=2) == tokens(logits, 2)
    assert 17 in tokens(logits, 2)
