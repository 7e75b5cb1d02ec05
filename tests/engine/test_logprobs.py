"""Log-probabilities of sampled tokens and of prompts, against transformers."""

import pytest
import torch

from cotenant.core.request import FinishReason, TokenLogprobs
from cotenant.engine.logprobs import score, to_token_logprobs


def reference_logprobs(small, tokens: tuple[int, ...]) -> torch.Tensor:
    with torch.no_grad():
        return small.reference(torch.tensor([tokens])).logits[0].log_softmax(-1)  # [tokens, vocab]


def check(entry: TokenLogprobs, row: torch.Tensor, token_id: int, num_top: int) -> None:
    assert entry.token_id == token_id
    assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-4)
    order = row.argsort(descending=True).tolist()
    assert entry.rank == order.index(token_id) + 1
    assert [token for token, _ in entry.top] == order[:num_top]
    assert [value for _, value in entry.top] == pytest.approx(row[order[:num_top]].tolist(), abs=1e-4)


def test_sampled_tokens_report_the_raw_distribution(small) -> None:
    """Whatever the sampler does with the logits: penalties, bias, temperature and filters are not seen in them."""
    sampling = {"temperature": 2.0, "top_p": 0.9, "presence_penalty": 1.0, "logit_bias": {3: 4.0}}
    prompt = small.prompt(8)
    requests = [small.request(prompt, 8, seed=num_top, logprobs=num_top, **sampling) for num_top in (0, 3, 5)]
    silent = small.request(prompt, 8)
    outputs = small.run(small.engine(), [*requests, silent])
    assert all(output.logprobs == () for output in outputs[silent.request_id])
    for request in requests:
        text = tuple(small.tokens(outputs[request.request_id]))
        rows = reference_logprobs(small, prompt + text)[len(prompt) - 1 :]
        for row, token_id, output in zip(rows, text, outputs[request.request_id], strict=False):
            (entry,) = output.logprobs
            check(entry, row, token_id, request.sampling.logprobs)


@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("budget", [4, 9, 64])
def test_prompt_logprobs_over_chunks(small, max_tokens: int, budget: int) -> None:
    engine = small.engine(max_num_seqs=3, max_num_batched_tokens=budget)
    requests = [small.request(small.prompt(length), max_tokens, prompt_logprobs=2) for length in (1, 2, 23)]
    outputs = small.run(engine, requests)
    for request in requests:
        first, *rest = outputs[request.request_id]
        assert first.prompt_logprobs is not None
        assert first.prompt_logprobs[0] is None
        assert len(first.prompt_logprobs) == len(request.prompt)
        rows = reference_logprobs(small, request.prompt)
        for row, token_id, entry in zip(rows, request.prompt[1:], first.prompt_logprobs[1:], strict=False):
            check(entry, row, token_id, 2)
        assert all(output.prompt_logprobs is None for output in rest)
        assert small.tokens(outputs[request.request_id]) == small.greedy(request.prompt, max_tokens or 1)[:max_tokens]
        assert outputs[request.request_id][-1].finish_reason is FinishReason.LENGTH


def test_prompt_logprobs_of_a_preempted_request_come_once(small) -> None:
    """The prompt is scored half, loses its pages to a request of a higher class, and is scored to the end later."""
    engine = small.engine(num_pages=10, page_tokens=4, max_num_seqs=2, max_num_batched_tokens=8)
    low = small.request(small.prompt(30), 3, priority=1, prompt_logprobs=0)
    engine.add(low)
    engine.step()
    engine.step()
    outputs = small.run(engine, [small.request(small.prompt(20), 6)])[low.request_id]
    assert engine.num_preemptions == 1
    assert [output.prompt_logprobs is not None for output in outputs] == [True, False, False]
    entries = outputs[0].prompt_logprobs
    assert len(entries) == 30
    for row, token_id, entry in zip(reference_logprobs(small, low.prompt), low.prompt[1:], entries[1:], strict=False):
        check(entry, row, token_id, 0)
    assert small.tokens(outputs) == small.greedy(low.prompt, 3)


def test_more_alternatives_than_the_vocabulary_has() -> None:
    scored = score(torch.zeros(1, 4), torch.tensor([2]), [20])
    (entry,) = to_token_logprobs(scored.tensors(), [2], [20])
    assert len(entry.top) == 4
    assert entry.rank == 1


def test_rows_that_want_different_numbers_of_alternatives() -> None:
    logits = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    token_ids, num_top = [4, 9, -1], [0, 5, 2]  # the last row's numbers were not finite
    scored = score(logits.bfloat16(), torch.tensor(token_ids), num_top)
    entries = to_token_logprobs(scored.tensors(), token_ids, num_top)
    rows = logits.bfloat16().float().log_softmax(-1)
    for entry, row, token_id, count in zip(entries[:2], rows, token_ids, num_top, strict=False):
        assert entry.token_id == token_id
        assert entry.logprob == pytest.approx(float(row[token_id]), abs=1e-5)
        assert entry.rank == int((row > row[token_id]).sum()) + 1
        assert [value for _, value in entry.top] == pytest.approx(row.topk(count).values.tolist(), abs=1e-5)
    assert len(entries[2].top) == 2
